"""Published weights: the state hash, snapshot files, the lossless delta codec, manifests and the chain of versions.

This package does not use the bus: an actor passes bytes in and gets bytes back. Every decoded block is compared with
hashes that the trainer computed from the exact bits that engines serve. Nothing is unpickled.
"""
