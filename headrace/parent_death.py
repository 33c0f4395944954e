"""A child process that ends with its parent, also when the parent is killed with SIGKILL (prctl(2), PR_SET_PDEATHSIG).

The signal belongs to the thread that started the child: start it from a thread that lives as long as the process. QEMU
gets the same by `setpriv --pdeathsig`, the slot agent by its own code, because both run without this package.

`ending_with_parent` asks for it in the command line, `die_with` between fork and exec. A fork copies the page tables of
the parent, 26 ms of CPU time in one of 400 MB; without a `preexec_fn` Python starts a child by vfork, in 1 ms.
"""

import ctypes
import os
import shutil
import signal
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with(parent: int, number: int = signal.SIGTERM) -> None:
    """Run in the child between fork and exec (`preexec_fn`): send it signal `number` when the parent ends.

    parent: the process id of the starter. The child exits at once if the starter is gone already.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def ending_with_parent(argv: Sequence[str], number: signal.Signals = signal.SIGTERM, before: str = "") -> list[str]:
    """The command line of a child that asks for the signal, then becomes `argv`; it exits if this process is gone.

    before: what a shell does as the child first, such as `ulimit -t 5 || exit 1`.
    """
    script = f'test "$PPID" = "$1" || exit 1; {before or ":"}; shift; exec "$@"'
    setpriv = [shutil.which("setpriv") or "setpriv", "--pdeathsig", number.name.removeprefix("SIG"), "--"]
    return [*setpriv, "/bin/sh", "-c", script, "sh", str(os.getpid()), *argv]
