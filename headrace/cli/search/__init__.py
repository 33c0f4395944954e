"""The commands of `headrace search`: adapters of semantic search."""
