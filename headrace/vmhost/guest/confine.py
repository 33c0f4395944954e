"""What a slot may ask of the guest's kernel, and how much of the machine it may take.

A seccomp filter refuses calls that no task needs and that reach what namespaces do not separate: keyrings, BPF,
userfaultfd, io_uring, performance counters, mounts, modules, clocks; and every call of another architecture. A control
group of its own gives each slot an equal share of the processor, whatever it forks, and bounds its memory and its
processes, so that a slot without end is killed or refused alone and its siblings go on.

Sources: seccomp(2), Linux Documentation/admin-guide/cgroup-v2.rst. Numbers are those of x86-64.
"""

import ctypes
import errno
import os
import struct
from contextlib import suppress

_libc = ctypes.CDLL(None, use_errno=True)
_SET_SECCOMP, _FILTER, _DETACH = 22, 2, 2
_X86_64, _X32 = 0xC000003E, 0x40000000
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
_LOAD, _EQUAL, _ABOVE, _RETURN = 0x20, 0x15, 0x35, 0x06
_AT_NUMBER, _AT_ARCH = 0, 4
REFUSED = {
    "modify_ldt": 154,
    "pivot_root": 155,
    "acct": 163,
    "settimeofday": 164,
    "mount": 165,
    "umount2": 166,
    "swapon": 167,
    "swapoff": 168,
    "reboot": 169,
    "iopl": 172,
    "ioperm": 173,
    "init_module": 175,
    "delete_module": 176,
    "quotactl": 179,
    "clock_settime": 227,
    "kexec_load": 246,
    "add_key": 248,
    "request_key": 249,
    "keyctl": 250,
    "unshare": 272,
    "perf_event_open": 298,
    "open_by_handle_at": 304,
    "setns": 308,
    "finit_module": 313,
    "kexec_file_load": 320,
    "bpf": 321,
    "userfaultfd": 323,
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "mount_setattr": 442,
}
GROUPS = "/sys/fs/cgroup"
RESERVE, KEEPER = 8 << 20, 5 << 20
"""Bytes that no slot may take: the kernel's, and what each of the others needs to go on answering."""


def program() -> bytes:
    """The filter as classic BPF: struct sock_filter, one after the other."""

    def line(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("HBBI", code, yes, no, value)

    numbers = sorted(REFUSED.values())
    lines = [line(_LOAD, _AT_ARCH), line(_EQUAL, _X86_64, 1, 0), line(_RETURN, _REFUSE), line(_LOAD, _AT_NUMBER)]
    lines.append(line(_ABOVE, _X32, len(numbers) + 1, 0))
    lines += [line(_EQUAL, number, len(numbers) - at, 0) for at, number in enumerate(numbers)]
    return b"".join([*lines, line(_RETURN, _ALLOW), line(_RETURN, _REFUSE)])


def seccomp() -> None:
    """Put the filter on this process and all that come of it; it can't be taken off. Needs no_new_privs."""
    code = program()
    buffer = ctypes.create_string_buffer(code, len(code))
    # struct sock_fprog: length, padding, pointer.
    head = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer)))
    if _libc.prctl(_SET_SECCOMP, _FILTER, ctypes.byref(head), 0, 0) < 0:
        raise OSError(ctypes.get_errno(), "seccomp")


def open_groups() -> bool:
    """Mount the control groups, with the controllers that slots need; False where the kernel has none."""
    if _libc.mount(b"cgroup", GROUPS.encode(), b"cgroup2", ctypes.c_ulong(14), None) < 0:
        return False
    with open(f"{GROUPS}/cgroup.subtree_control", "w") as file:
        file.write("+cpu +memory +pids")
    return True


def share(slots: int) -> int:
    """Bytes that one of so many slots may take of what is free before they are opened, and leave the others alive.

    Files lie in memory, and no killing frees them: a slot that could fill all of it would end its siblings with it.
    """
    with open("/proc/meminfo") as file:
        free = next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:"))
    return max(free - RESERVE - (slots - 1) * KEEPER, RESERVE)


def join(name: str, memory: int, processes: int) -> None:
    """Move this process into a group of its own. memory: bytes, of which its files in memory are a part."""
    if not os.path.exists(f"{GROUPS}/cgroup.procs"):
        return
    group = f"{GROUPS}/{name}"
    os.mkdir(group)
    for file, value in (("memory.max", memory), ("pids.max", processes), ("cgroup.procs", 0)):
        with open(f"{group}/{file}", "w") as out:
            out.write(str(value))


def hide() -> None:
    """Take the groups out of this mount namespace."""
    with suppress(OSError):
        _libc.umount2(GROUPS.encode(), _DETACH)
