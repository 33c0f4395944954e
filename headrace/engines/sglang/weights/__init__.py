"""Weights of an SGLang server: staging, swapping, checking."""
