"""Tools that search the repository: by regular expression, by keywords, and by meaning."""
