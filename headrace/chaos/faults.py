"""The fault plan: which process fails, how and when, drawn from a seed before the run starts.

The idea: targets are assigned round-robin in random order, and so are the kinds of fault of each target. A few faults
already cover every process, and many cover every kind of fault of every process. A fault is due when a share of the
run's work is done, not at a time, so one plan injects at the same places of a run on a fast and on a slow machine.

A connection is cut from outside: the injector duplicates the process's socket (pidfd_getfd) and shuts it down. Actor
and broker see the same as when a network breaks, and the broker needs no additional rights.
"""

import ctypes
import errno
import os
import random
import socket
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from headrace import process_stat
from headrace.config import Config
from headrace.launch.guests import has_machines
from headrace.launch.processes import process_groups
from headrace.launch.runs import RunError

Fault = Literal["kill", "stop", "cut"]
BROKER, MACHINE = "broker", "machine"
FAULTS: dict[str, tuple[Fault, ...]] = {BROKER: ("kill", "stop"), MACHINE: ("kill", "stop")}
ACTOR_FAULTS: tuple[Fault, ...] = ("kill", "stop", "cut")
MACHINES = 2
"""Number of times that each round targets a machine; a run has several machines and one of each other target."""
PAUSE_S = {BROKER: (0.3, 6.0), MACHINE: (0.3, 8.0)}
"""Seconds for which a target stays stopped, where they differ from an actor's."""
SHORT_S, LONG_S = (0.3, 4.0), (31.0, 45.0)
LONG_SHARE = 1 / 6
"""Share of the stopped actors that sleep longer than the broker waits for an acknowledgement, so that other actors
have their work when they continue."""
LATEST = 0.92
"""The last fault is due here, so that the run does not end before it."""
_PIDFD_GETFD = 438


class PlannedFault(NamedTuple):
    """One fault of the plan."""

    target: str
    """A process's name as in the run's logs, `broker` or `machine`."""
    fault: Fault
    asleep_s: float
    due: float
    """Share of the run's work, 0 to 1."""


def targets(config: Config) -> list[str]:
    """The targets of faults in a run of this configuration."""
    names = [group[0].replace(":", "-") for group in process_groups(config)]
    own_broker = [] if config.bus.url else [BROKER]
    return names + own_broker + (MACHINES * [MACHINE] if has_machines(config) else [])


def plan(config: Config, kills: int, seed: int, kinds: Collection[Fault] = ACTOR_FAULTS) -> list[PlannedFault]:
    """The faults of a run, in the order in which they are due. kinds: only targets that allow one of these."""
    possible = [name for name in targets(config) if {*FAULTS.get(name, ACTOR_FAULTS)} & {*kinds}]
    rng = random.Random(seed)
    dues = sorted(rng.random() * LATEST for _ in range(kills))
    round_targets: list[str] = []
    round_faults: dict[str, list[Fault]] = {}
    planned = []
    for due in dues:
        if not round_targets:
            round_targets = rng.sample(possible, len(possible))
        target = round_targets.pop()
        if not round_faults.get(target):
            allowed = [kind for kind in FAULTS.get(target, ACTOR_FAULTS) if kind in kinds]
            round_faults[target] = rng.sample(allowed, len(allowed))
        short, long = PAUSE_S.get(target, SHORT_S), PAUSE_S.get(target, LONG_S)
        asleep = rng.uniform(*(long if rng.random() < LONG_SHARE else short))
        planned.append(PlannedFault(target, round_faults[target].pop(), round(asleep, 2), due))
    return planned


def machines(pid: int) -> list[int]:
    """The virtual machines among a process's descendants."""
    children: dict[int, list[int]] = {}
    for child, stat in process_stat.everything():
        children.setdefault(stat.parent, []).append(child)
    pids = []
    waiting = list(children.get(pid, ()))
    while waiting:
        child = waiting.pop()
        waiting += children.get(child, ())
        if _program(child).startswith("qemu-system"):
            pids.append(child)
    return pids


def _program(pid: int) -> str:
    try:
        return Path(os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0])).name
    except OSError:
        return ""


def cut(pid: int, ports: Sequence[int]) -> int:
    """Shut down a process's TCP connections to these ports; their number. RunError where this is not permitted."""
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
            copy = _duplicate(handle, int(name))
            if copy is None:
                continue
            with copy:
                try:
                    if copy.family == socket.AF_INET and copy.getpeername()[1] in ports:
                        copy.shutdown(socket.SHUT_RDWR)
                        count += 1
                except OSError:
                    continue  # not connected any more
    finally:
        os.close(handle)
    return count


def _duplicate(handle: int, number: int) -> socket.socket | None:
    """Another process's socket under a descriptor of this process; None when it was closed in the meantime."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor: int = libc.syscall(_PIDFD_GETFD, handle, number, 0)
    if descriptor >= 0:
        return socket.socket(fileno=descriptor)
    code = ctypes.get_errno()
    if code in (errno.EBADF, errno.ESRCH):
        return None
    raise RunError(f"connections cannot be cut here ({os.strerror(code)}): run as root, or with CAP_SYS_PTRACE", 3)
