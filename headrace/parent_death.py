"""A child process that ends with its parent, also when the parent is killed with SIGKILL (prctl(2), PR_SET_PDEATHSIG).

The signal belongs to the thread that started the child: start it from a thread that lives as long as the process. QEMU
gets the same by `setpriv --pdeathsig`, the slot agent by its own code, because both run without this package.
"""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with(parent: int, number: int = signal.SIGTERM) -> None:
    """Run in the child between fork and exec (`preexec_fn`): send it signal `number` when the parent ends.

    parent: the process id of the starter. The child exits at once if the starter is gone already.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
