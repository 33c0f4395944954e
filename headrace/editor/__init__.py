"""Programs on a user's machine: an agent for editors by ACP, and reports of what became of an agent's lines."""
