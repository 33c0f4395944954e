"""The agent: the loop that samples turns and runs their tool calls in a sandbox, the tools, and scripted policies."""
