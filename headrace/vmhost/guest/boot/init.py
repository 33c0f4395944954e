"""The machine's first process: opens the slots while the template is built, then serves the control port as root.

In a clone this process sets the clock and the random pool (`start`), reports facts, sets a slot's host name, and kills
a slot on request. Nothing that a policy writes ever reaches it.
"""

import fcntl
import gc
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..files import Answer
from ..frames import START, START_SIZE, STARTED, Reader, pack, send
from ..testing import pytests
from . import condition, confine, drives, syscalls
from .slot import ENVIRONMENT, ROOT, Slot, say
from .syscalls import mount

_RNDADDENTROPY, _RNDRESEEDCRNG = 0x40085203, 0x5207
PORTS_S = 60
"""Deadline for the serial ports to appear, seconds."""


def _load_module(name: str) -> None:
    """Insert a kernel module if its file exists. A refusal is logged: the module may be built in."""
    path = f"/lib/modules/{name}.ko"
    if os.path.exists(path):
        fd = os.open(path, os.O_RDONLY)
        try:
            syscalls.insert_module(fd)
        except OSError as error:
            say(f"{name}: {error}")
        os.close(fd)


def _open_ports(count: int) -> list[int]:
    """Descriptors of the ports hr.0 to hr.<count-1>. The kernel adds ports one at a time; a port whose host side is
    not connected yet reports a hang-up, so this waits for that to end. RuntimeError after `PORTS_S`."""
    ports: dict[int, int] = {}
    deadline = time.monotonic() + PORTS_S
    while len(ports) < count and time.monotonic() < deadline:
        folder = "/sys/class/virtio-ports"
        for entry in os.listdir(folder) if os.path.isdir(folder) else ():
            with suppress(OSError), open(f"{folder}/{entry}/name") as file:
                name = re.fullmatch(r"hr\.(\d+)\n?", file.read())
                if name and int(name[1]) not in ports:
                    ports[int(name[1])] = os.open(f"/dev/{entry}", os.O_RDWR | os.O_CLOEXEC)
        time.sleep(0.01)
    if len(ports) < count:
        raise RuntimeError(f"{len(ports)} of {count} ports appeared within {PORTS_S} s")
    for fd in ports.values():
        poll = select.poll()
        poll.register(fd, 0)
        while poll.poll(0) and time.monotonic() < deadline:
            time.sleep(0.01)
    return [ports[number] for number in range(count)]


def start(words: bytes, pool: int) -> bytes:
    """Answer a START frame. A clone resumes with the template's clock and random state; this resets both.

    A clone that resumes from a stop has random state of its own, so its START carries no entropy and only the clock is
    set. pool: a descriptor of /dev/urandom. The emulator translates every instruction of this function anew in every
    clone, so it does nothing else.
    """
    try:
        time.clock_settime_ns(time.CLOCK_REALTIME, int.from_bytes(words[8:16], "little"))
        if words[20]:  # number of bytes of entropy
            fcntl.ioctl(pool, _RNDADDENTROPY, words[16:])
            fcntl.ioctl(pool, _RNDRESEEDCRNG)
    except OSError as error:
        return pack({"i": 0, "ok": False, "error": str(error)})
    return STARTED


class Control:
    """Serves port 0."""

    def __init__(self, ports: list[int]) -> None:
        self.ports = ports
        self.slots: list[int] = []
        """Pids of the slots' first processes."""
        self.pool = -1
        """A descriptor of /dev/urandom. It is opened after the slots, so that no slot inherits it."""
        self.drives: list[str] = []
        """Devices of the drives, in order."""
        self.waiting: Any = None
        """The slot that waits for its image, in a machine with drives."""

    def serve(self) -> None:
        """Answer frames until the port closes, which ends the machine."""
        reader = Reader()
        port = self.ports[0]
        while data := os.read(port, 65536):
            if data[:8] == START:
                while len(data) < START_SIZE:
                    data += os.read(port, START_SIZE - len(data))
                os.write(port, start(data, self.pool))
                continue
            for header, bodies in reader.feed(data):
                answer: Answer
                try:
                    answer = self.operate(header, bodies)
                except Exception as error:
                    answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}, []
                send(port, {"i": header["i"]} | answer[0], answer[1])

    def operate(self, header: dict[str, Any], bodies: list[bytes]) -> Answer:
        """Run one operation by its name. KeyError for an unknown one."""
        operations: dict[str, Callable[[], dict[str, Any]]] = {
            "open_slots": lambda: self._open_slots(header["count"], header["size_mb"], header.get("drives", 0)),
            "attach": lambda: self._attach(header),
            "name": lambda: self._name(header["slot"], header["name"].encode()),
            "kill": lambda: self._kill(header["slot"]),
            "facts": lambda: facts(),
            "pages": _pages,
            "condition": lambda: _condition(self.slots),
            "clock": lambda: {"monotonic": time.monotonic_ns(), "urandom": os.urandom(16).hex()},
        }
        if header["op"] == "changes":
            return drives.changes(header)
        return operations[header["op"]](), []

    def _open_slots(self, count: int, size_mb: int, disks: int) -> dict[str, Any]:
        has_pytest = not disks and pytests.available()
        if has_pytest:
            pytests.load()
        if disks:
            return self._open_image_slot(size_mb, disks)
        share = confine.share(count)
        gc.collect()
        gc.freeze()
        for number in range(count):
            port = self.ports[1 + number]
            others = [fd for fd in self.ports if fd != port]
            slot = Slot(number, port, size_mb)
            slot.memory = share
            self.slots.append(slot.open(others))
        for port in self.ports[1:]:
            os.close(port)
        del self.ports[1:]
        self.pool = os.open("/dev/urandom", os.O_WRONLY | os.O_CLOEXEC)
        return {"slots": self.slots, "pytest": has_pytest}

    def _open_image_slot(self, size_mb: int, disks: int) -> dict[str, Any]:
        """One slot that waits for its image."""
        from . import images

        self.drives = drives.devices(disks)
        drives.share_mounts(disks)
        gc.collect()
        gc.freeze()
        waiting = images.WaitingSlot(self.ports[1], size_mb)
        self.slots.append(waiting.open([self.ports[0]]))
        self.waiting = waiting
        os.close(self.ports.pop())
        self.pool = os.open("/dev/urandom", os.O_WRONLY | os.O_CLOEXEC)
        drives.forget(self.drives)
        return {"slots": self.slots, "pytest": False}

    def _attach(self, header: dict[str, Any]) -> dict[str, Any]:
        """Mount the image and let the slot begin in it. Returns the slot's mounts, which nothing may change from then
        on."""
        if self.waiting is None:
            raise ValueError("this machine has its image already")
        waiting, self.waiting = self.waiting, None
        drives.attach(self.drives, header["drives"], header["size"], header["disk"])
        waiting.begin(header["image"])
        return {"mounts": condition.mounts(self.slots)}

    def _name(self, slot: int, name: bytes) -> dict[str, Any]:
        namespace = os.open(f"/proc/{self.slots[slot]}/ns/uts", os.O_RDONLY)
        init_namespace = os.open("/proc/self/ns/uts", os.O_RDONLY)
        try:
            syscalls.check(syscalls.libc.setns(namespace, syscalls.NEWUTS), "setns")
            syscalls.set_hostname(name)
        finally:
            syscalls.check(syscalls.libc.setns(init_namespace, syscalls.NEWUTS), "setns")
            os.close(namespace)
            os.close(init_namespace)
        return {}

    def _kill(self, slot: int) -> dict[str, Any]:
        with suppress(ProcessLookupError):
            os.kill(self.slots[slot], signal.SIGKILL)
        return {}


def _pages() -> dict[str, Any]:
    from . import pages  # used once, while a template is built; slots do not need it

    return pages.report()


def _condition(slots: list[int]) -> dict[str, Any]:
    return dict(condition.report(slots))


def facts() -> dict[str, Any]:
    """Facts that a tool could notice about its machine, equal in every lane (see tests/support/fidelity.py)."""

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
    """Boot: mount the kernel's file systems, load modules, restrict the kernel, serve the control port."""
    for source, target, kind in (("proc", "/proc", "proc"), ("sys", "/sys", "sysfs"), ("dev", "/dev", "devtmpfs")):
        with suppress(OSError):
            mount(source, target, kind)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with open("/proc/cmdline") as file:
        options = dict(word.partition("=")[::2] for word in file.read().split())
    for module in options.get("headrace.modules", "").split(","):
        _load_module(module)
    for path, value in (
        ("/proc/sys/user/max_user_namespaces", "0"),
        ("/proc/sys/kernel/dmesg_restrict", "1"),
        ("/proc/sys/kernel/kptr_restrict", "2"),
        ("/proc/sys/kernel/hostname", "sandbox"),
        ("/proc/sys/vm/overcommit_memory", "0"),
    ):
        with suppress(OSError), open(path, "w") as file:
            file.write(value)
    if not confine.mount_cgroups():
        say("the kernel has no control groups")
    os.environ.clear()
    os.environ.update(ENVIRONMENT)
    say("init is up")
    Control(_open_ports(int(options["headrace.ports"]))).serve()
