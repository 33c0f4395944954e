"""Commands that report which lines of agents a repository still has."""
