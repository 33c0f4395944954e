"""Semantic search over a workspace: chunks, their embeddings, keyword scores, and one index per state of the files."""
