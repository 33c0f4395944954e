"""Reads and writes the Hugging Face layout of checkpoints."""
