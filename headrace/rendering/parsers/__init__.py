"""Parsers of tool calls: one file per wire syntax, each a parser from text to calls."""
