"""Commands that plan the trainer."""
