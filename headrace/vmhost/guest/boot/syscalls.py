"""System calls and constants that Python's standard library lacks: mounts, namespaces, capabilities, prctl.

Sources: mount(2), unshare(2), prctl(2), capset(2), netdevice(7); the numbers are those of x86-64.
"""

import array
import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Sequence

libc = ctypes.CDLL(None, use_errno=True)

# mount(2)
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, MOVE, REC, PRIVATE = 1, 2, 4, 8, 32, 4096, 8192, 16384, 1 << 18
# umount2(2)
DETACH = 2
# unshare(2), setns(2)
NEWNS, NEWUTS, NEWIPC, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x20000000, 0x40000000
# prctl(2)
DUMPABLE, SET_SECCOMP, CAPBSET_DROP, NO_NEW_PRIVS = 4, 22, 24, 38
_CAPSET, _FINIT_MODULE = 126, 313
_CAPABILITY_VERSION_3 = 0x20080522
_SIOCGIFFLAGS, _SIOCSIFFLAGS = 0x8913, 0x8914


def check(result: int, call: str) -> None:
    """OSError from errno when a C function returned a negative number."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str, flags: int = 0, options: str = "") -> None:
    """mount(2). OSError."""
    arguments = source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()
    check(libc.mount(*arguments), f"mount {target}")


def become_root(folder: str) -> None:
    """Make a mounted folder the root of this process and of those that it will start. OSError."""
    os.chdir(folder)
    mount(".", "/", "", MOVE)
    os.chroot(".")


def set_hostname(name: bytes) -> None:
    """sethostname(2). OSError."""
    check(libc.sethostname(name, len(name)), "sethostname")


def prctl(option: int, value: int = 0) -> int:
    """prctl(2) with one argument; the raw result."""
    return int(libc.prctl(option, value, 0, 0, 0))


def insert_module(fd: int) -> None:
    """finit_module(2). OSError, also when the kernel already has this module."""
    check(libc.syscall(_FINIT_MODULE, fd, b"", 0), "finit_module")


def set_capabilities(capabilities: Sequence[int], effective: Sequence[int] | None = None) -> None:
    """capset(2): exactly these capabilities are permitted; none is inheritable. effective: those in effect; default:
    all of them. OSError."""
    permitted, now = (
        sum(1 << each for each in them) for them in (capabilities, capabilities if effective is None else effective)
    )
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    check(libc.syscall(_CAPSET, header, struct.pack("=6I", now, permitted, 0, 0, 0, 0)), "capset")


def loopback_up() -> None:
    """Bring up ``lo`` of a new network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = array.array("b", struct.pack("16sh14x", b"lo", 0))
        fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request, True)
        (flags,) = struct.unpack_from("h", request, 16)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | 1))
