"""Conversations to token ids and back: renderers, tool-call parsers, tokenizers."""
