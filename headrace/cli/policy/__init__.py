"""Commands on policies."""
