"""A distribution outside of headrace: one plugin for each seam, a file each."""

__version__ = "1.5"
