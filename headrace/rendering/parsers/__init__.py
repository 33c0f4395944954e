"""Tool calls as models write them: one file per wire syntax, each a parser from text to calls."""
