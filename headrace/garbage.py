"""Keeps Python's garbage collector away from what a process loads once.

Modules, classes and functions live as long as their process: 300,000 objects in one that imports torch. The collector
runs while they are made, which takes a seventh of the time of the imports, and visits all of them again in every full
collection.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Load something in this block: the collector waits until its end, and never visits the objects that exist then."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
