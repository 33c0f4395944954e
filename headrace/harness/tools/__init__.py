"""The agent's tools, one file each with its schema beside its code; all of them act through sandbox operations."""
