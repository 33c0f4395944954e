"""Commands about a whole run."""
