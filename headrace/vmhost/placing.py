"""Which slot of a machine a sandbox gets: a pure function of its request, as long as that slot is unused.

A slot's number shows inside, in user ids, device numbers and the name of the control group. Were the first one always
taken first, a sandbox with a machine for itself (the production lane) would always be number 0, and those of training
mostly not. So a group begins at a number drawn from its name, and its slots follow: they never meet in their first
attempts, a lone sandbox may be any, and the same request has the same number when its calls are run again.
"""

import hashlib
from collections.abc import Collection

from headrace.messages.sandbox import Acquire


def choose(request: Acquire, unused: Collection[int], slots: int) -> int:
    """One of the `unused` numbers of a machine with `slots`: the request's own, or the next after it, around."""
    name = f"{request.run}/{request.group}".encode()
    first = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") + request.slot + request.attempt
    return min(unused, key=lambda number: (number - first) % slots)
