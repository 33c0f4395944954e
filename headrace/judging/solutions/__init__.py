"""Known solutions of tasks: made in a sandbox, broken on purpose, and searched for in what the agent can read."""
