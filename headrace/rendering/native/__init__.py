"""A checkpoint's own chat format: its template in a sandbox, placeholders for content, encoding by pieces."""
