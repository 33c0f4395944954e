"""The `process` backend's side: a warm process that forks a keeper for every sandbox. It isolates nothing.

Started with one end of a socket pair. Each request is a message ``{"root": folder}`` that carries the keeper's channel
as a passed descriptor. A sandbox ends when its channel closes: the keeper is the subreaper of what it started, kills
all of it on its way out, and removes its folder.
"""

import ctypes
import json
import os
import re
import shutil
import signal
import socket
import sys

from . import keeper

_PDEATHSIG, _SUBREAPER = 1, 36


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]


def _end() -> None:
    """Kill everything that this keeper started, until nothing is left to inherit."""
    while pids := _children():
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for _ in pids:
            os.waitpid(-1, 0)


def _keep(channel: socket.socket, root: str, libc: ctypes.CDLL) -> None:
    libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_SUBREAPER, 1, 0, 0, 0)
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
        keeper.Keeper(channel.fileno(), root, environment, become).serve()
    finally:
        _end()
        shutil.rmtree(root, ignore_errors=True)


def main(descriptor: int) -> None:
    """Serve requests that come over a descriptor (a SOCK_SEQPACKET socket) until the host goes away."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    re.compile("warm")
    control = socket.socket(fileno=descriptor)
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 65536, 1)
        if not data:
            return
        channel = socket.socket(fileno=descriptors[0])
        pid = os.fork()
        if pid == 0:
            try:
                control.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _keep(channel, json.loads(data)["root"], libc)
            finally:
                os._exit(0)
        channel.close()
