"""The Model Context Protocol: external servers as tools of an episode, and headrace's tools as a server."""
