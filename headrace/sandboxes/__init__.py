"""The client library for sandboxes on environment nodes, over request and reply."""
