"""Commands about the trainer."""
