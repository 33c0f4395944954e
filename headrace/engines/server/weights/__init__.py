"""Weights of a server: staging, swaps, checksums."""
