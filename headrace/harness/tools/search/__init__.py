"""Tools that search the repository: by regular expression, and by keywords."""
