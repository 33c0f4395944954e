"""Weights on the move: the state hash, snapshot files, the lossless delta codec, manifests and the chain of versions.

The room knows no bus: an actor hands in bytes and gets bytes. Whatever is decoded is verified against hashes that the
trainer took of the exact bits that engines serve, and nothing is ever unpickled.
"""
