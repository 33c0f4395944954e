"""Followers of a run that write its figures to other programs. Each is off unless [metrics] names its target."""
