"""The sockets on which processes listen, from /proc: TCP, UDP, and Unix sockets with a name."""

import os
import socket
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Listening(NamedTuple):
    """One socket that other processes can reach."""

    kind: str
    """tcp, udp or unix."""
    host: str
    """An address; a path for unix, and @name for an abstract one."""
    port: int
    pid: int


def listening(pids: Iterable[int]) -> set[Listening]:
    """The sockets of these processes in their own network namespaces."""
    return {found for pid in pids for found in _of_process(pid)}


def _of_process(pid: int) -> set[Listening]:
    here = Path(f"/proc/{pid}")
    inodes: set[str] = set()
    try:
        for name in os.listdir(here / "fd"):
            try:
                target = os.readlink(here / "fd" / name)
            except FileNotFoundError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
        tables = {name: (here / "net" / name).read_text().splitlines()[1:] for name in TABLES}
    except OSError:
        return set()  # it has ended
    found = set()
    for name in ("tcp", "tcp6", "udp", "udp6"):
        for line in tables[name]:
            fields = line.split()
            # A TCP socket that listens; a UDP socket that is bound to no peer.
            if fields[9] in inodes and fields[3] == ("0A" if name.startswith("tcp") else "07"):
                found.add(Listening(name[:3], *_address(fields[1]), pid))
    for line in tables["unix"]:
        fields = line.split()
        if fields[6] in inodes and len(fields) > 7:
            found.add(Listening("unix", fields[7], 0, pid))
    return found


TABLES = ("tcp", "tcp6", "udp", "udp6", "unix")


def _address(text: str) -> tuple[str, int]:
    digits, _, port = text.partition(":")
    raw = bytes.fromhex(digits)
    words = struct.unpack(f"={len(raw) // 4}I", raw)
    packed = struct.pack(f">{len(words)}I", *words)
    return socket.inet_ntop(socket.AF_INET6 if len(packed) == 16 else socket.AF_INET, packed), int(port, 16)
