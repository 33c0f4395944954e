"""The environment actor: serves the sandboxes of one node."""
