"""The base of this package's errors. Each class has a code, and the status with which it ends a process.

Programs decide by class, code and fields. The text is one sentence for a person, and may change. docs/errors.md lists
the codes.
"""

import errno
import re

FAILED, WRONG_INPUT, MACHINE, BROKER = 1, 2, 3, 4
"""Exit statuses: a check failed; wrong arguments or configuration; this machine lacks something; the broker does not
answer, or a port is taken."""
GAVE_UP_LACKING = 6
"""Of a process of actors that gave up because this machine lacks something: another start may succeed."""
LACKING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE})


class HeadraceError(Exception):
    """An error that this package raises; the text is one sentence that says what to do."""

    code: str = "error"
    """Snake case, unique; by default the name of the class."""
    exit_status: int = FAILED

    def __init_subclass__(cls, code: str = "", exit_status: int = 0) -> None:
        super().__init_subclass__()
        cls.code = code or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()
        cls.exit_status = exit_status or cls.exit_status


def exit_status(error: BaseException) -> int:
    """The status with which an error ends a process. OSError: `MACHINE` where space, memory or descriptors lack."""
    if isinstance(error, HeadraceError):
        return error.exit_status
    return MACHINE if isinstance(error, OSError) and error.errno in LACKING else FAILED
