"""Measurements of policies from the command line: one evaluation, or a benchmark of several trials."""
