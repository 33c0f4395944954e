"""Published weights: the state hash, snapshot files, the lossless delta codec, manifests and the chain of versions.

This package knows no bus: an actor passes bytes in and gets bytes back. Every decoded block is verified against hashes
that the trainer took of the exact bits that engines serve, and nothing is ever unpickled.
"""
