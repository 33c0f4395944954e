"""Payloads over 1 MiB: claim checks and shared memory."""
