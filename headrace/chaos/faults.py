"""What may befall a run: which process, how, when. A plan is drawn from a seed before anything runs.

The idea: a deck of victims is dealt again and again, and each victim has a deck of its own blows, so that a few blows
already hit everybody and many hit everybody in every way. Blows are due by work done, not by the clock: the same plan
strikes at the same places of a run on a fast machine and on a slow one, and never waits for a run that stands still.

A connection is cut from outside: the process's socket is borrowed (pidfd_getfd) and shut down. The actor and the broker
see what they would see of a network that breaks; neither is asked, and the broker needs no further right.
"""

import ctypes
import errno
import os
import random
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from headrace.config import Config
from headrace.launch.processes import process_groups
from headrace.launch.runs import RunError

Blow = Literal["kill", "stop", "cut"]
BROKER, MACHINE = "broker", "machine"
BLOWS: dict[str, tuple[Blow, ...]] = {BROKER: ("kill", "stop"), MACHINE: ("kill", "stop")}
ANYBODY: tuple[Blow, ...] = ("kill", "stop", "cut")
MACHINES = 2
"""Machines in each deal: there are more of them than of anything else."""
NAP_S = {BROKER: (0.3, 6.0), MACHINE: (0.3, 8.0)}
"""How long a stopped one sleeps, where it is not as for the others."""
SHORT_S, LONG_S = (0.3, 4.0), (31.0, 45.0)
LONG_SHARE = 1 / 6
"""So many of the stopped actors sleep past the broker's wait for an acknowledgement, and wake up to find their work
given to others."""
LATEST = 0.92
"""The last blow is due here, so that a run ends after it and not in front of it."""
_PIDFD_GETFD = 438


class Card(NamedTuple):
    """One blow of the plan."""

    victim: str
    """A process's name as in the run's logs, `broker` or `machine`."""
    blow: Blow
    asleep_s: float
    due: float
    """Share of the run's work, 0 to 1."""


def victims(config: Config) -> list[str]:
    """Who may be struck in a run of this configuration."""
    names = [group[0].replace(":", "-") for group in process_groups(config)]
    own_broker = [] if config.bus.url else [BROKER]
    return names + own_broker + ([] if config.environment.backend == "process" else MACHINES * [MACHINE])


def plan(config: Config, kills: int, seed: int) -> list[Card]:
    """The blows of a run, in the order in which they are due."""
    rng = random.Random(seed)
    dues = sorted(rng.random() * LATEST for _ in range(kills))
    deal: list[str] = []
    decks: dict[str, list[Blow]] = {}
    cards = []
    for due in dues:
        if not deal:
            deal = rng.sample(victims(config), len(victims(config)))
        victim = deal.pop()
        if not decks.get(victim):
            ways = BLOWS.get(victim, ANYBODY)
            decks[victim] = rng.sample(ways, len(ways))
        short, long = NAP_S.get(victim, SHORT_S), NAP_S.get(victim, LONG_S)
        asleep = rng.uniform(*(long if rng.random() < LONG_SHARE else short))
        cards.append(Card(victim, decks[victim].pop(), round(asleep, 2), due))
    return cards


def machines(pid: int) -> list[int]:
    """The virtual machines among a process's descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            except OSError:
                continue
            children.setdefault(int(parent), []).append(int(entry.name))
    found = []
    waiting = list(children.get(pid, ()))
    while waiting:
        child = waiting.pop()
        waiting += children.get(child, ())
        if _program(child).startswith("qemu-system"):
            found.append(child)
    return found


def _program(pid: int) -> str:
    try:
        return Path(os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0])).name
    except OSError:
        return ""


def cut(pid: int, ports: Sequence[int]) -> int:
    """Shut down a process's TCP connections to these ports; how many. RunError where this is not permitted."""
    try:
        handle = os.pidfd_open(pid)
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return 0  # it is gone
    count = 0
    try:
        for name in names:
            try:
                if not os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                    continue
            except OSError:
                continue
            borrowed = _borrow(handle, int(name))
            if borrowed is None:
                continue
            with borrowed:
                try:
                    if borrowed.family == socket.AF_INET and borrowed.getpeername()[1] in ports:
                        borrowed.shutdown(socket.SHUT_RDWR)
                        count += 1
                except OSError:
                    continue  # not connected any more
    finally:
        os.close(handle)
    return count


def _borrow(handle: int, number: int) -> socket.socket | None:
    """Another process's socket under a descriptor of our own; None when it was closed just now."""
    libc = ctypes.CDLL(None, use_errno=True)
    borrowed: int = libc.syscall(_PIDFD_GETFD, handle, number, 0)
    if borrowed >= 0:
        return socket.socket(fileno=borrowed)
    code = ctypes.get_errno()
    if code in (errno.EBADF, errno.ESRCH):
        return None
    raise RunError(
        f"connections can't be cut here ({os.strerror(code)}): it takes root, or the right to trace processes", 3
    )
