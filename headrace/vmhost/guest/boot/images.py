"""A slot whose root is a container image: its programs see the image's files, user, folder and environment.

Such a slot has its machine for itself and is forked while the template is built, long before its image is known
(drives.py). The tools run as the image's user, which may be root. Root keeps here the rights that a container engine
leaves to root in a container: a few capabilities, no way to gain more, /proc/sys read-only, no device nodes.

The slot's agent is loaded from the machine's own root, which it no longer sees once it has changed its root. Everything
that it may need later is therefore imported before that.
"""

import bz2
import codecs
import gzip
import lzma
import os
import resource
import signal
import socket
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from xml.etree import ElementTree

from .. import agent, changes, trees
from ..files import Answer, Workspace
from ..frames import Reader, pack
from ..walks import OperationError
from . import confine, drives, syscalls
from .slot import Slot, mount_devices, set_oom_score
from .syscalls import BIND, NODEV, NOEXEC, NOSUID, RDONLY, REMOUNT, mount

ALLOWED = (0, 1, 3, 4, 5, 6, 7, 10)
"""Capabilities: chown, dac_override, fowner, fsetid, kill, setgid, setuid, net_bind_service."""
_ACCOUNTS_BYTES = 1 << 20
"""Bytes that are read of the image's /etc/passwd and /etc/group."""
_MASKED = (
    "kcore", "keys", "kmsg", "kpagecgroup", "kpagecount", "kpageflags", "latency_stats", "sched_debug", "sysrq-trigger",
    "timer_list", "vmallocinfo",
)  # fmt: skip
_READ_ONLY = ("acpi", "asound", "bus", "driver", "fs", "irq", "mtrr", "pressure", "scsi", "sys", "tty")
"""Files and folders of /proc with which root would change the kernel's settings, those of devices included."""
NEW = drives.IMAGE

for _name in ("unicode_escape", "utf-8", "latin-1", "ascii"):
    codecs.lookup(_name)
socket.socket().close()
ElementTree.fromstring("<report/>")
PRELOADED = ElementTree, trees, bz2, gzip, lzma
"""Used after the root has changed: reports of test commands, archives."""


class WaitingSlot(Slot):
    """One slot that waits until `begin` gives it the image under `NEW`, described as in vmhost/images/imported.py."""

    processes = 1024
    oom_score = -500
    """Of its agent: the kernel's out-of-memory killer should choose tools, whose score is 500, before it."""

    def __init__(self, port: int, size_mb: int) -> None:
        super().__init__(0, port, size_mb)
        self.image: dict[str, Any] = {}
        self._gate_read, self._gate_write = os.pipe()
        self._ready_read, self._ready_write = os.pipe()

    def begin(self, image: dict[str, Any]) -> None:
        """Let the slot continue in its image, and wait until it has begun. RuntimeError when it ended instead; the
        machine's serial log has the reason."""
        os.close(self._ready_write)
        os.write(self._gate_write, pack(image))
        os.close(self._gate_write)
        if not os.read(self._ready_read, 1):
            raise RuntimeError("the slot ended before it reached its image")
        os.close(self._ready_read)

    def _await_image(self) -> None:
        """Wait for `begin`: nothing runs in the slot before."""
        os.close(self._gate_write)
        reader = Reader()
        while not (frames := reader.feed(os.read(self._gate_read, 65536))):
            pass
        self.image = frames[0][0]
        self.tool = self.image["uid"]
        os.close(self._gate_read)

    def _become_slot(self) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(self._ready_read)
        self._await_image()
        workdir = self.image["workdir"]
        self._mounts()
        os.write(self._ready_write, b"1")
        os.close(self._ready_write)
        syscalls.loopback_up()
        syscalls.set_hostname(b"sandbox")
        set_oom_score(self.oom_score)
        for limit, values in (
            (resource.RLIMIT_CORE, (0, 0)),
            (resource.RLIMIT_NPROC, (self.processes, self.processes)),
            (resource.RLIMIT_NOFILE, (1024, 4096)),
        ):
            resource.setrlimit(limit, values)
        self._make_workdir(workdir)
        for capability in range(64):
            if capability not in ALLOWED:
                syscalls.prctl(syscalls.CAPBSET_DROP, capability)
        os.setgroups(self.image["groups"])
        os.setresgid(self.image["gid"], self.image["gid"], self.image["gid"])
        syscalls.set_capabilities(ALLOWED)
        os.setresuid(0, self.tool, 0)
        syscalls.check(syscalls.prctl(syscalls.NO_NEW_PRIVS, 1), "no_new_privs")
        syscalls.check(syscalls.prctl(syscalls.DUMPABLE, 0), "dumpable")
        confine.seccomp()
        os.umask(0o022)
        os.chdir(workdir)
        ImageSlotAgent(self.port, workdir, self.image["env"], self._become_tool, self.tools).serve()

    def _become_tool(self) -> None:
        if self.tools is not None:
            self.tools.enter()
        os.setresuid(0, 0, 0)
        with suppress(OSError):
            set_oom_score(500)
        os.setgroups(self.image["groups"])
        os.setresgid(self.image["gid"], self.image["gid"], self.image["gid"])
        os.setresuid(self.tool, self.tool, self.tool)

    def _make_workdir(self, path: str) -> None:
        """Create the working directory where it is missing; an empty one belongs to the image's user."""
        os.makedirs(path, exist_ok=True)
        if not os.listdir(path):
            os.chown(path, self.tool, self.image["gid"])

    def _mounts(self) -> None:
        drives.keep_mounts()
        for name in ("proc", "sys", "dev", "tmp", "etc"):
            os.makedirs(f"{NEW}/{name}", exist_ok=True)
        os.chmod(f"{NEW}/tmp", 0o1777)
        mount("sys", f"{NEW}/sys", "sysfs", RDONLY | NOSUID | NODEV | NOEXEC)
        mount("proc", f"{NEW}/proc", "proc", NOSUID | NODEV | NOEXEC)
        mount_devices(f"{NEW}/dev", self.size)
        mount("none", f"{NEW}/dev", "", REMOUNT | BIND | RDONLY | NOSUID | NOEXEC)
        for name in _MASKED:
            if os.path.exists(f"{NEW}/proc/{name}"):
                mount(f"{NEW}/dev/null", f"{NEW}/proc/{name}", "", BIND)
        for name in _READ_ONLY:
            if os.path.exists(path := f"{NEW}/proc/{name}"):
                mount(path, path, "", BIND)
                mount("none", path, "", REMOUNT | BIND | RDONLY | NOSUID | NODEV | NOEXEC)
        for name, text in (("hostname", "sandbox\n"), ("hosts", "127.0.0.1 localhost sandbox\n")):
            with suppress(OSError):  # also a pipe, whose opening would wait for a reader
                flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
                fd = os.open(f"{NEW}/etc/{name}", flags, 0o644)
                if os.fstat(fd).st_size == 0:
                    os.write(fd, text.encode())
                os.close(fd)
        syscalls.become_root(NEW)


class ImageSlotAgent(agent.SlotAgent):
    """An agent whose tools have no Python of headrace: an image's tests run by a command of the image."""

    def _tests(self, number: int, header: dict[str, Any]) -> Answer | None:
        if header["kind"] != "command":
            raise OperationError(
                f"an imported image runs its tests by a command of its own, not by kind {header['kind']!r}"
            )
        return super()._tests(number, header)

    def user(self, name: str) -> Callable[[], None]:
        """A function that turns a fork into the image's user of that name or number. OperationError without one."""
        if not name:
            return self.become
        users, groups = _rows("/etc/passwd"), _rows("/etc/group")
        entry = next((row for row in users if len(row) > 3 and name in (row[0], row[2])), None)
        if entry is None and not (name.isascii() and name.isdigit()):
            raise OperationError(f"there is no user {name!r} here")
        uid, gid = (_id(entry[2]), _id(entry[3])) if entry else (_id(name), 0)
        extra = [_id(row[2]) for row in groups if len(row) > 3 and entry and entry[0] in row[3].split(",")]

        tools = self.tools

        def become() -> None:
            if tools is not None:
                tools.enter()
            os.setresuid(0, 0, 0)
            os.setgroups(extra)
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)

        return become

    def _move(self, folder: str, fill: bool) -> None:
        """Make another folder of the image the workspace. fill: files will be written there, so a missing folder is
        created; otherwise a missing folder is an OperationError."""
        if not folder.startswith("/") or ".." in folder.split("/"):
            raise OperationError("expected an absolute path without ..")
        if fill and not os.path.lexists(folder):
            user = os.geteuid()
            with _as_root():
                os.makedirs(folder)
                os.chown(folder, user, -1)
        if not os.path.isdir(folder):
            raise OperationError("the image has no such folder")
        self.root = "/" + "/".join(part for part in folder.split("/") if part not in ("", "."))
        self.workspace = Workspace(self.root)
        os.chdir(self.root)

    def _expire(self) -> None:
        with _as_root():
            super()._expire()

    def operate(self, number: int, header: dict[str, Any], bodies: Sequence[bytes]) -> Answer | None:
        """Run one operation. Those that end jobs run as root, because a job may run as any user of the image."""
        if header["op"] == "open_at":
            self._move(header["workdir"], bool(header["paths"]))
            header = header | {"op": "open"}
        if header.get("forced"):
            with _forced():
                return self.operate(number, header | {"forced": False}, bodies)
        if header["op"] == "apply_changes":  # changes of an image lie outside the workspace too
            return changes.apply(self.workspace, header, bodies, everywhere=True)
        if header["op"] in ("stop_job", "cancel", "end"):
            with _as_root():
                return super().operate(number, header, bodies)
        return super().operate(number, header, bodies)


def _rows(path: str) -> list[list[str]]:
    """The rows of a file such as /etc/passwd. None of a file that is missing or is not a regular one: the image's
    author chose it, and a pipe would block the agent."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return []
        text = os.read(fd, _ACCOUNTS_BYTES).decode("utf-8", "replace")
    except OSError:
        return []
    finally:
        os.close(fd)
    return [line.split(":") for line in text.split("\n")]


def _id(text: str) -> int:
    """A number of a user or group. OperationError for a text that is none: the kernel has 32 bits, and the highest
    number means "unchanged"."""
    if not (text.isascii() and text.isdigit() and len(text) < 11 and int(text) < (1 << 32) - 1):
        raise OperationError(f"{text[:40]!r} is not the number of a user or group")
    return int(text)


@contextmanager
def _forced() -> Iterator[None]:
    """Write where the image's user may not; what is made belongs to that user."""
    if os.geteuid() == 0:
        yield
        return
    syscalls.set_capabilities(ALLOWED)
    try:
        yield
    finally:
        syscalls.set_capabilities(ALLOWED, ())


@contextmanager
def _as_root() -> Iterator[None]:
    user = os.geteuid()
    os.seteuid(0)
    try:
        yield
    finally:
        os.seteuid(user)
