"""MCP both ways: external servers as tools of an episode, and headrace's tools as a server."""
