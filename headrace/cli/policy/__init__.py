"""Commands that convert checkpoints of policies."""
