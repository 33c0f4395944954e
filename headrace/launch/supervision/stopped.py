"""Finds a process that SIGSTOP or SIGTSTP has stopped and that nobody continues; its supervisor kills and restarts it.

A process that a debugger holds (state ``t``) is left alone. Looks are counted and not seconds, so the time in which the
supervisor itself is stopped does not count. `headrace chaos` stops processes for up to 45 s.
"""

import asyncio
from collections.abc import Callable

from headrace import process_stat

LOOK_S = 5.0
"""Seconds between two looks."""
STOPPED_S = 120.0
"""Seconds for which a process may be stopped."""


async def until_stopped_for_long(pid: Callable[[], int]) -> int:
    """Return the process id as soon as the process was stopped at every look for `STOPPED_S`. pid: the present one, 0
    while there is none."""
    looks, last = 0, 0
    while True:
        await asyncio.sleep(LOOK_S)
        present = pid()
        stat = process_stat.read(present) if present else None
        looks = looks + 1 if stat is not None and stat.state == "T" and present == last else 0
        last = present
        if looks * LOOK_S >= STOPPED_S:
            return present


def sentence(pid: int) -> str:
    """The cause of a restart after this."""
    return (
        f"process {pid} was stopped by a signal for {STOPPED_S:g} s and is killed; to stop a process for longer, "
        "attach a debugger, or continue it in time with kill -CONT"
    )
