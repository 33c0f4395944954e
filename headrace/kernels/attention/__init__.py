"""Attention on a GPU. Its twin is `block_attention`."""
