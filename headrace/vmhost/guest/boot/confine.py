"""Limits of a slot: which system calls it may make, and how much of the machine it may use.

A seccomp filter refuses calls that no task needs and that reach resources outside of namespaces: keyrings, BPF,
userfaultfd, io_uring, performance counters, mounts, modules, clocks, the kernel's log; and every call of another
architecture. New namespaces are refused too, because a user namespace would give its process every capability in it,
and so are sockets of a machine's hypervisor (vsock), which no network namespace separates. A control
group per slot gives each an equal share of the processor, however many processes it forks, and bounds its memory and
its number of processes. A slot that exceeds them is killed or refused, and its siblings go on.

Inside a slot's group the tools have a group of their own, so that the agent can still run, allocate memory and end them
when they have used up theirs. A tool enters it right after the fork; moving a process is cheap under ``favordynmods``.

Sources: seccomp(2), Linux Documentation/admin-guide/cgroup-v2.rst. Numbers are those of x86-64.
"""

import ctypes
import errno
import os
import struct
from contextlib import suppress

from .syscalls import DETACH, SET_SECCOMP, libc

_FILTER = 2
_X86_64, _X32 = 0xC000003E, 0x40000000
_ALLOW, _REFUSE, _ABSENT = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
_LOAD, _EQUAL, _ABOVE, _ANY, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_AT_NUMBER, _AT_ARCH, _AT_FIRST = 0, 4, 16
_SOCKET, _CLONE, _CLONE3 = 41, 56, 435
_NEW_NAMESPACES = 0x7E020000
"""Flags of clone(2): NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""
_VSOCK = 40
REFUSED = {
    "syslog": 103,
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
CGROUPS = "/sys/fs/cgroup"
RESERVE, AGENT = 8 << 20, 5 << 20
"""Bytes that no slot may use: those of the kernel, and those that each other slot's agent needs to go on answering."""
WORKING = 6 << 20
"""Bytes of a slot's tools that its workspace and /tmp leave free when both are full: a shell and rm still run then."""


_AGENT_WEIGHT = 10000
"""The largest cpu.weight; the tools of a slot together have 100."""
_WRITE = os.O_WRONLY | os.O_CLOEXEC


def program() -> bytes:
    """The filter as classic BPF: an array of struct sock_filter."""
    lines: list[tuple[int, int, int, int]] = [(_LOAD, _AT_ARCH, 0, 0), (_EQUAL, _X86_64, 0, _REFUSE)]
    lines += [(_LOAD, _AT_NUMBER, 0, 0), (_ABOVE, _X32, _REFUSE, 0)]
    lines += [(_EQUAL, number, _REFUSE, 0) for number in sorted(REFUSED.values())]
    # Its flags are in memory, which no filter reads; programs use clone(2) where the kernel has no clone3(2).
    lines.append((_EQUAL, _CLONE3, _ABSENT, 0))
    for number, test, value in ((_CLONE, _ANY, _NEW_NAMESPACES), (_SOCKET, _EQUAL, _VSOCK)):
        lines += [(_EQUAL, number, 0, 2), (_LOAD, _AT_FIRST, 0, 0), (test, value, _REFUSE, _ALLOW)]
    ends = {end: len(lines) + place for place, end in enumerate((_ALLOW, _REFUSE, _ABSENT))}
    lines += [(_RETURN, end, 0, 0) for end in ends]
    return b"".join(
        struct.pack("HBBI", code, *(ends[to] - at - 1 if to in ends else to for to in jumps), value)
        for at, (code, value, *jumps) in enumerate(lines)
    )


def seccomp() -> None:
    """Install the filter on this process and its descendants, for good. Needs no_new_privs. OSError."""
    code = program()
    buffer = ctypes.create_string_buffer(code, len(code))
    # struct sock_fprog: length, padding, pointer.
    head = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer)))
    if libc.prctl(SET_SECCOMP, _FILTER, ctypes.byref(head), 0, 0) < 0:
        raise OSError(ctypes.get_errno(), "seccomp")


def mount_cgroups() -> bool:
    """Mount the control groups and enable the controllers that slots need. False if the kernel has none."""
    if libc.mount(b"cgroup", CGROUPS.encode(), b"cgroup2", ctypes.c_ulong(14), b"favordynmods") < 0:
        return False
    with open(f"{CGROUPS}/cgroup.subtree_control", "w") as file:
        file.write("+cpu +memory +pids")
    return True


def share(slots: int) -> int:
    """Bytes that each of `slots` slots may use of the memory that is free before they are opened.

    The slots' files lie in memory, and killing processes does not free them. A slot that could fill all of the memory
    would end its siblings too.
    """
    with open("/proc/meminfo") as file:
        free = next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:"))
    return max(free - RESERVE - (slots - 1) * AGENT, RESERVE)


def join(name: str, memory: int, processes: int) -> "Tools | None":
    """Move this process into a new control group, as the agent of a slot; its tools get a group beside it. None where
    the kernel has no control groups. OSError.

    memory: limit of both together in bytes, files in tmpfs included; processes: limit of the tools.
    """
    if not os.path.exists(f"{CGROUPS}/cgroup.procs"):
        return None
    slot = f"{CGROUPS}/{name}"
    agent, tools = f"{slot}/agent", f"{slot}/tools"
    for path, value in (
        (f"{slot}/memory.max", memory),
        (f"{slot}/cgroup.subtree_control", "+cpu +memory +pids"),
        (f"{agent}/cpu.weight", _AGENT_WEIGHT),
        (f"{tools}/memory.max", memory - AGENT),
        (f"{tools}/pids.max", processes),
        (f"{agent}/cgroup.procs", 0),
    ):
        folder = os.path.dirname(path)
        if not os.path.isdir(folder):
            os.mkdir(folder)
        with open(path, "w") as file:
            file.write(str(value))
    return Tools(tools, processes)


class Tools:
    """The control group of a slot's tools, through descriptors that root opened: they keep root's rights to it."""

    def __init__(self, folder: str, processes: int) -> None:
        self._processes = processes
        self._procs, self._kill = (os.open(f"{folder}/cgroup.{name}", _WRITE) for name in ("procs", "kill"))
        self._current, self._processes_events, self._memory_events = (
            os.open(f"{folder}/{name}", os.O_RDONLY | os.O_CLOEXEC)
            for name in ("pids.current", "pids.events", "memory.events")
        )
        self._seen = self._events()

    def enter(self) -> None:
        """Move this process into the group, and close the descriptors: no tool may have them."""
        os.write(self._procs, b"0")
        for fd in (self._procs, self._kill, self._current, self._processes_events, self._memory_events):
            os.close(fd)

    def full(self) -> bool:
        """Whether the group holds as many processes as it may."""
        return int(os.pread(self._current, 32, 0)) >= self._processes

    def exhausted(self) -> bool:
        """Whether the kernel has refused a fork, or killed for lack of memory, since the last `kill`."""
        return self._events() != self._seen

    def _events(self) -> tuple[int, ...]:
        """Forks refused at the limit; allocations that found no memory; processes killed for it."""
        refused, memory = (
            dict(line.split() for line in os.pread(fd, 1024, 0).splitlines())
            for fd in (self._processes_events, self._memory_events)
        )
        return int(refused[b"max"]), int(memory[b"oom"]), int(memory[b"oom_kill"])

    def kill(self) -> None:
        """Kill every process in the group, also those that fork at this moment."""
        os.write(self._kill, b"1")
        self._seen = self._events()


def hide() -> None:
    """Unmount the control groups in this mount namespace."""
    with suppress(OSError):
        libc.umount2(CGROUPS.encode(), DETACH)
