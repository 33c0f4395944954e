"""The hidden tests of an examination: the files that decide how they run, and their altered copies."""
