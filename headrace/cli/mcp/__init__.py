"""`headrace mcp`: the tools for external agents."""
