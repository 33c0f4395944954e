"""Assigns a slot of a machine to a sandbox: a pure function of its request, as long as that slot is unused.

Programs in a sandbox can see its slot's number in user ids, device numbers and the name of the control group. If the
first unused slot were always taken, a sandbox with a machine for itself (the production lane) would always have number
0, and those of training mostly not. So the numbers of a group start at a hash of its name: first attempts of a group
never collide, a single sandbox may have any number, and a repeated request has the same one.
"""

import hashlib
from collections.abc import Collection

from headrace.messages.sandbox import Acquire


def choose(request: Acquire, unused: Collection[int], slots: int) -> int:
    """One of the `unused` numbers of a machine with `slots` slots: the request's, or the next one after it, cyclic."""
    name = f"{request.run}/{request.group}".encode()
    first = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") + request.slot + request.attempt
    return min(unused, key=lambda number: (number - first) % slots)
