"""`headrace mcp`."""
