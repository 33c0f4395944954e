"""Finds a process that SIGSTOP or SIGTSTP has stopped and that nobody continues; its supervisor kills and restarts it.

A process that a debugger holds is left alone (`process_stat.Stops`). `headrace chaos` stops processes for up to 45 s.
"""

import asyncio
from collections.abc import Callable

from headrace.process_stat import LOOK_S, STOPPED_S, Stops


async def until_stopped_for_long(pid: Callable[[], int]) -> int:
    """Return the process id as soon as the process was stopped at every look for `STOPPED_S`. pid: the present one, 0
    while there is none."""
    stops = Stops()
    while True:
        await asyncio.sleep(LOOK_S)
        present = pid()
        if stops.seconds(present, LOOK_S) >= STOPPED_S:
            return present
