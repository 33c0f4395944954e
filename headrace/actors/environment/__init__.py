"""The environment actor: sandboxes of one node."""
