"""The agent: the loop that samples a turn, runs its calls in a sandbox and goes on; its tools; scripted policies."""
