"""Weights of an SGLang server: staging, swaps, checksums."""
