"""The agents of the `process` backend: a warm process that forks one for every sandbox. It isolates nothing.

The host starts it with one end of a socket pair. Each request is a message ``{"root": folder, "join": files}`` with the
agent's channel as a passed descriptor. ``join`` names the cgroup.procs files of the sandbox's control group; without
one, and without root's rights, a limit on the user's processes bounds what a sandbox may fork.

After the first run of pytest the warm process imports pytest and its plugins, so later sandboxes do not do so again.

A sandbox ends when its channel closes. Its agent is the subreaper of all that it started; before it exits, it kills
them and removes its folder.
"""

import ctypes
import json
import mmap
import os
import re
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from . import agent, jobs, walks
from .testing import pytests

_PDEATHSIG, _SUBREAPER = 1, 36
_AGENTS_END_S = 5.0
"""How long the warm process waits for agents that are ending."""
PROCESSES = 256
"""Processes that a sandbox may have at one time, its agent included."""


def _children(pid: int) -> list[int]:
    """Pids of a process's children, of all of its threads."""
    pids: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                pids += [int(child) for child in file.read().split()]
    return pids


def _descendants(pid: int) -> Iterator[int]:
    pending = _children(pid)
    while pending:
        child = pending.pop()
        yield child
        pending += _children(child)


def _kill_descendants() -> None:
    """Kill everything that this agent started. They are stopped first, round by round until no new one appears, because
    processes that fork faster than they are found would survive a single round of kills."""
    stopped: set[int] = set()
    while new := set(_descendants(os.getpid())) - stopped:
        for pid in new:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGSTOP)
        stopped |= new
    for pid in stopped:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


class Descendants:
    """The processes that an agent of this backend has started."""

    def full(self) -> bool:
        """Unknown: the fork itself fails at the limit."""
        return False

    def exhausted(self) -> bool:
        """Unknown as well."""
        return False

    def kill(self) -> None:
        """Kill all of them."""
        _kill_descendants()

    def enter(self) -> None:
        """A fork of the agent is its descendant already."""


def _end() -> None:
    """Kill and reap everything that this agent started, until nothing is left to inherit."""
    while True:
        _kill_descendants()
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def _limit(join: list[str]) -> None:
    """Bound the number of processes of this sandbox: by its control group, or by the user's limit."""
    for path in join:
        with open(path, "w") as file:
            file.write("0")
    if not join and os.geteuid() != 0:
        threads = 0
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                if os.stat(f"/proc/{pid}").st_uid == os.getuid():
                    threads += len(os.listdir(f"/proc/{pid}/task"))
        _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
        wanted = threads + PROCESSES
        resource.setrlimit(resource.RLIMIT_NPROC, (wanted if hard < 0 else min(wanted, hard), hard))


class LocalAgent(agent.SlotAgent):
    """A slot agent that tells the warm process when it runs pytest."""

    wanted: mmap.mmap
    """One shared byte; 1 after a run of pytest."""

    @property
    def home(self) -> str:
        """Beside the workspace: sandboxes share /tmp."""
        return f"{self.root}.home"

    def _pytest(self, header: dict[str, Any]) -> jobs.Job:
        self.wanted[0] = 1
        return super()._pytest(header)


def _serve_slot(channel: socket.socket, root: str, join: list[str], libc: ctypes.CDLL, wanted: mmap.mmap) -> None:
    # The agent gets no signal at its parent's death, because a killed agent leaves the processes that it started. Its
    # channel closes when the host ends, also when the host is killed; then the agent ends everything.
    libc.prctl(_SUBREAPER, 1, 0, 0, 0)
    _limit(join)
    channel.setblocking(True)
    environment = {
        "PATH": f"{os.path.dirname(sys.executable)}:/usr/local/bin:/usr/bin:/bin",
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
    }

    def become() -> None:
        libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    try:
        slot = LocalAgent(channel.fileno(), root, environment, become, Descendants())
        slot.wanted = wanted
        slot.serve()
    finally:
        _end()
        walks.remove(f"{root}.home")
        walks.remove(root)


def _await_agents() -> None:
    """Return once all agents have ended: the host that waits for this process then finds nothing left."""
    deadline = time.monotonic() + _AGENTS_END_S
    with suppress(ChildProcessError):  # none is left; they are reaped by themselves
        while time.monotonic() < deadline:
            os.waitpid(-1, os.WNOHANG)
            time.sleep(0.002)


def main(descriptor: int) -> None:
    """Serve requests that come over a descriptor (a SOCK_SEQPACKET socket) until the host closes it."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    re.compile("warm")
    control = socket.socket(fileno=descriptor)
    wanted, loaded = mmap.mmap(-1, 1), False
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 65536, 1)
        if not data:
            _await_agents()
            return
        if wanted[0] and not loaded:
            pytests.load()
            loaded = True
        channel = socket.socket(fileno=descriptors[0])
        pid = os.fork()
        if pid == 0:
            try:
                control.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                request = json.loads(data)
                _serve_slot(channel, request["root"], request["join"], libc, wanted)
            finally:
                os._exit(0)
        channel.close()
