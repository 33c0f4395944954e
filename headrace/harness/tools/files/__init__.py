"""Tools that read, list, edit and write files."""
