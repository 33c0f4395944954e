"""The machine's first process: opens the slots while the template is made, then serves the control port as root.

A slot is a PID, mount, IPC, network and UTS namespace with a read-only view of the root, its own workspace and /tmp in
memory, its own /dev and /proc, a share of the machine (see confine), and a keeper as its first process (see keeper). In
a clone this process does three things only: it sets the clock and the entropy pool (`start`), it reports facts, and it
kills a slot when told to. Nothing of a policy's ever reaches it.
"""

import array
import ctypes
import fcntl
import gc
import os
import re
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from . import confine, keeper, pytests
from .files import Answer
from .frames import START, START_SIZE, STARTED, Reader, pack

_libc = ctypes.CDLL(None, use_errno=True)
_NEWNS, _NEWUTS, _NEWIPC, _NEWPID, _NEWNET = 0x20000, 0x4000000, 0x8000000, 0x20000000, 0x40000000
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
NO_NEW_PRIVS, CAPBSET_DROP, DUMPABLE = 38, 24, 4
_RNDADDENTROPY, _RNDRESEEDCRNG = 0x40085203, 0x5207
_SIOCGIFFLAGS, _SIOCSIFFLAGS = 0x8913, 0x8914
TOOL_UID, KEEPER_UID = 20100, 20200
ROOT = "/workspace"
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
    "HOME": "/tmp",
    "USER": "agent",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
}


def check(result: int, what: str) -> None:
    """OSError from errno when a C function said -1."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str, flags: int = 0, options: str = "") -> None:
    """mount(2)."""
    args = (source.encode(), target.encode(), kind.encode(), flags, options.encode())
    check(_libc.mount(*args[:3], ctypes.c_ulong(flags), args[4]), f"mount {target}")


def _load(module: str) -> None:
    """Insert a kernel module if it is there; the kernel says no to those that are in already."""
    path = f"/lib/modules/{module}.ko"
    if os.path.exists(path):
        fd = os.open(path, os.O_RDONLY)
        if _libc.syscall(313, fd, b"", 0) < 0:  # finit_module
            say(f"{module}: {os.strerror(ctypes.get_errno())}")
        os.close(fd)


def _ports(count: int) -> list[int]:
    """Descriptors of the ports hr.0 .. hr.<count-1>. They appear one by one, and hang up until the host is there."""
    found: dict[int, int] = {}
    until = time.monotonic() + 60
    while len(found) < count and time.monotonic() < until:
        base = "/sys/class/virtio-ports"
        for entry in os.listdir(base) if os.path.isdir(base) else ():
            with suppress(OSError), open(f"{base}/{entry}/name") as file:
                name = re.fullmatch(r"hr\.(\d+)\n?", file.read())
                if name and int(name[1]) not in found:
                    found[int(name[1])] = os.open(f"/dev/{entry}", os.O_RDWR | os.O_CLOEXEC)
        time.sleep(0.01)
    if len(found) < count:
        raise RuntimeError(f"{len(found)} of {count} ports appeared")
    for fd in found.values():
        poll = select.poll()
        poll.register(fd, 0)
        while poll.poll(0) and time.monotonic() < until:
            time.sleep(0.01)
    return [found[number] for number in range(count)]


class Slot:
    """Makes one slot; everything after `unshare` happens in its first process."""

    processes = 128

    def __init__(self, number: int, port: int, size_mb: int) -> None:
        self.port = port
        self.tool, self.own = TOOL_UID + number, KEEPER_UID + number
        self.size = size_mb
        self.memory = 1 << 62
        """Bytes that it may take, its files in memory among them."""

    def open(self, others: list[int]) -> int:
        """Start the slot; the pid of its first process as the root namespace sees it."""
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            confine.join(f"slot{self.tool}", self.memory, self.processes)
            check(_libc.unshare(_NEWNS | _NEWUTS | _NEWIPC | _NEWPID | _NEWNET), "unshare")
            first = os.fork()
            if first:
                os.write(write, b"%d" % first)
                os._exit(0)
            try:
                for fd in (read, write, *others):
                    os.close(fd)
                self._become_slot()
            except BaseException as error:
                say(f"slot: {type(error).__name__}: {error}")
            finally:
                os._exit(1)
        os.close(write)
        with os.fdopen(read) as answer:
            return int(answer.read() or "0")

    def _become_slot(self) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._mounts()
        loopback_up()
        check(_libc.sethostname(b"sandbox", 7), "sethostname")
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("-500")
        for limit, value in (
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_NPROC, self.processes),
            (resource.RLIMIT_NOFILE, 1024),
        ):
            resource.setrlimit(limit, (value, value))
        for capability in range(64):
            _libc.prctl(CAPBSET_DROP, capability, 0, 0, 0)
        os.setgroups([])
        os.setresgid(self.tool, self.tool, self.tool)
        os.setresuid(self.own, self.tool, self.own)
        check(_libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
        confine.seccomp()
        os.umask(0o022)
        os.chdir(ROOT)
        mine = keeper.Keeper(self.port, ROOT, ENVIRONMENT, self._become_tool)
        mine.worker.prepare()
        mine.serve()

    def _become_tool(self) -> None:
        # To be the first that the kernel ends takes a file that is root's in a process that was root. Until the user
        # is the tools' own, none of them can trace what is dumpable here.
        _libc.prctl(DUMPABLE, 1, 0, 0, 0)
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("500")
        _libc.prctl(DUMPABLE, 0, 0, 0, 0)
        os.setresuid(self.tool, self.tool, self.tool)

    def _mounts(self) -> None:
        mount("none", "/", "", REC | PRIVATE)
        confine.hide()
        owner = f"uid={self.tool},gid={self.tool}"
        mount("workspace", ROOT, "tmpfs", NOSUID | NODEV, f"size={self.size}m,mode=755,{owner}")
        mount("tmp", "/tmp", "tmpfs", NOSUID | NODEV, f"size={self.size}m,mode=1777")
        mount("proc", "/proc", "proc", NOSUID | NODEV | NOEXEC)
        devices("/dev", self.size)
        for place in ("/dev", "/sys", "/"):
            mount("none", place, "", REMOUNT | BIND | RDONLY | (NOSUID if place != "/dev" else NOSUID | NOEXEC))


def devices(place: str, size_mb: int) -> None:
    """A /dev with what programs expect and nothing else."""
    mount("dev", place, "tmpfs", NOSUID | NOEXEC, "size=1m,mode=755")
    for name, minor in (("null", 3), ("zero", 5), ("full", 7), ("random", 8), ("urandom", 9)):
        os.mknod(f"{place}/{name}", 0o20666, os.makedev(1, minor))
        os.chmod(f"{place}/{name}", 0o666)
    os.mkdir(f"{place}/shm")
    mount("shm", f"{place}/shm", "tmpfs", NOSUID | NODEV, f"size={size_mb}m,mode=1777")
    os.mkdir(f"{place}/pts")
    mount("devpts", f"{place}/pts", "devpts", NOSUID | NOEXEC, "newinstance,ptmxmode=0666,mode=620")
    links = {"fd": "/proc/self/fd", "ptmx": "pts/ptmx"} | {
        name: f"/proc/self/fd/{fd}" for fd, name in enumerate(("stdin", "stdout", "stderr"))
    }
    for name, target in links.items():
        os.symlink(target, f"{place}/{name}")


def loopback_up() -> None:
    """Bring up ``lo`` of a new network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = array.array("b", struct.pack("16sh14x", b"lo", 0))
        fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request, True)
        (flags,) = struct.unpack_from("h", request, 16)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | 1))


def start(words: bytes, pool: int) -> bytes:
    """A clone wakes with the template's clock and, worse, with its random numbers: set both. One that goes on after a
    stop has numbers of its own, and no entropy comes. The answer to START. pool: a descriptor of /dev/urandom. Every
    line here is translated anew in every clone: it is the shortest that does.
    """
    try:
        time.clock_settime_ns(time.CLOCK_REALTIME, int.from_bytes(words[8:16], "little"))
        if words[20]:  # bytes of entropy
            fcntl.ioctl(pool, _RNDADDENTROPY, words[16:])
            fcntl.ioctl(pool, _RNDRESEEDCRNG)
    except OSError as error:
        return pack({"i": 0, "ok": False, "error": str(error)})
    return STARTED


def say(text: str) -> None:
    """A line for the template's serial log."""
    with suppress(OSError), open("/dev/kmsg", "w") as log:
        log.write(f"<3>headrace: {text}\n")


class Control:
    """Serves port 0."""

    def __init__(self, ports: list[int]) -> None:
        self.ports = ports
        self.slots: list[int] = []
        self.pool = -1
        """A descriptor of /dev/urandom, once the slots are open: none of theirs."""

    def serve(self) -> None:
        """Until the port ends, and with it the machine."""
        reader = Reader()
        port = self.ports[0]
        while data := os.read(port, 65536):
            if data[:8] == START:
                while len(data) < START_SIZE:
                    data += os.read(port, START_SIZE - len(data))
                os.write(port, start(data, self.pool))
                continue
            for header, bodies in reader.feed(data):
                try:
                    answer = self.operate(header, bodies)
                except Exception as error:
                    answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}, []
                view = memoryview(pack({"i": header["i"]} | answer[0], answer[1]))
                while view:
                    view = view[os.write(port, view) :]

    def operate(self, header: dict[str, Any], bodies: list[bytes]) -> Answer:
        """One operation by its name."""
        operations: dict[str, Callable[[], dict[str, Any]]] = {
            "open_slots": lambda: self._open_slots(header["count"], header["size_mb"], header.get("image")),
            "name": lambda: self._name(header["slot"], header["name"].encode()),
            "kill": lambda: self._kill(header["slot"]),
            "facts": lambda: facts(),
            "pages": _pages,
            "condition": lambda: _condition(self.slots),
            "clock": lambda: {"monotonic": time.monotonic_ns(), "urandom": os.urandom(16).hex()},
        }
        return operations[header["op"]](), []

    def _open_slots(self, count: int, size_mb: int, image: dict[str, Any] | None) -> dict[str, Any]:
        has_pytest = image is None and pytests.available()
        make: Callable[[int, int, int], Slot] = Slot
        if image is not None:
            from . import images

            # The root is a tmpfs: half of the memory at most, unless it is told otherwise.
            with suppress(OSError):
                mount("none", "/", "", REMOUNT, "size=85%")
            make = partial(images.ImageSlot, image)
        share = confine.share(count)
        gc.collect()
        gc.freeze()
        for number in range(count):
            port = self.ports[1 + number]
            others = [fd for fd in self.ports if fd != port]
            slot = make(number, port, size_mb)
            if image is None:
                slot.memory = share
            self.slots.append(slot.open(others))
        for port in self.ports[1:]:
            os.close(port)
        del self.ports[1:]
        self.pool = os.open("/dev/urandom", os.O_WRONLY | os.O_CLOEXEC)
        return {"slots": self.slots, "pytest": has_pytest}

    def _name(self, slot: int, name: bytes) -> dict[str, Any]:
        namespace = os.open(f"/proc/{self.slots[slot]}/ns/uts", os.O_RDONLY)
        own = os.open("/proc/self/ns/uts", os.O_RDONLY)
        try:
            check(_libc.setns(namespace, _NEWUTS), "setns")
            check(_libc.sethostname(name, len(name)), "sethostname")
        finally:
            check(_libc.setns(own, _NEWUTS), "setns")
            os.close(namespace)
            os.close(own)
        return {}

    def _kill(self, slot: int) -> dict[str, Any]:
        with suppress(ProcessLookupError):
            os.kill(self.slots[slot], signal.SIGKILL)
        return {}


def _pages() -> dict[str, Any]:
    from . import pages  # asked once, while a template is made: slots need not carry it

    return pages.report()


def _condition(slots: list[int]) -> dict[str, Any]:
    from . import condition

    return dict(condition.report(slots))


def facts() -> dict[str, Any]:
    """What a tool could notice about the machine it runs in; equal in every lane (see vmhost.fidelity)."""

    def text(path: str) -> str:
        try:
            with open(path) as file:
                return file.read().strip()
        except OSError:
            return ""

    return {
        "uname": list(os.uname()),
        "cmdline": text("/proc/cmdline"),
        "python": sys.version,
        "environment": ENVIRONMENT,
        "workspace": ROOT,
        "mounts": sorted(line.split(" - ")[1] for line in text("/proc/self/mountinfo").splitlines()),
        "modules": sorted(line.split()[0] for line in text("/proc/modules").splitlines()),
        "users": text("/etc/passwd"),
        "clocksource": text("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
        "memory_kb": int(text("/proc/meminfo").split()[1]),
        "userns_max": text("/proc/sys/user/max_user_namespaces"),
    }


def main() -> None:
    """Boot."""
    for source, target, kind in (("proc", "/proc", "proc"), ("sys", "/sys", "sysfs"), ("dev", "/dev", "devtmpfs")):
        with suppress(OSError):
            mount(source, target, kind)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with open("/proc/cmdline") as file:
        options = dict(word.partition("=")[::2] for word in file.read().split())
    for module in options.get("headrace.modules", "").split(","):
        _load(module)
    for path, value in (
        ("/proc/sys/user/max_user_namespaces", "0"),
        ("/proc/sys/kernel/dmesg_restrict", "1"),
        ("/proc/sys/kernel/kptr_restrict", "2"),
        ("/proc/sys/kernel/hostname", "sandbox"),
        ("/proc/sys/vm/overcommit_memory", "0"),
    ):
        with suppress(OSError), open(path, "w") as file:
            file.write(value)
    if not confine.open_groups():
        say("no control groups")
    os.environ.clear()
    os.environ.update(ENVIRONMENT)
    say("init is up")
    Control(_ports(int(options["headrace.ports"]))).serve()
