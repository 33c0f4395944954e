"""The agents API: headrace's own agent in a sandbox with a user's workspace, run after run."""
