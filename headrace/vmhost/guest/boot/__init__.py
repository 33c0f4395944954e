"""The guest's first process and what it prepares."""
