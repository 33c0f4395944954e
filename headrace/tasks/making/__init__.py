"""Tasks from the commits of a repository, and the journal of a suite that is being made."""
