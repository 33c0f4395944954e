"""Archives of users, registries and task authors: tars, zips and commits of git, read within limits."""
