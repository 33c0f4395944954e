"""The agents API: headrace's own agent, with a sandbox that keeps the user's workspace from run to run."""
