"""The trainer on several processes."""
