"""Commands that look at a recorded run again."""
