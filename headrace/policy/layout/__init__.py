"""Hugging Face layout, in and out."""
