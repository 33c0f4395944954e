"""Makers of tasks from code with tests: features that are deleted, commits of a repository."""
