"""A slot whose root is an imported image: its programs see the image's files, user, folder and environment.

The machine is the sandbox: such a slot is alone in it, so the image's tree is simply its writable root, and the
image's user is the tools' user, root included. What a container engine leaves to root in a container is what root has
here: a few capabilities, no new ones ever, /proc/sys read-only, no device nodes.

The keeper comes from our own root, which its slot no longer sees: whatever it may need is imported before that.
"""

import bz2
import codecs
import ctypes
import gzip
import lzma
import os
import resource
import signal
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from xml.etree import ElementTree

from . import confine, init, keeper, trees
from .files import Answer, Refused

_libc = ctypes.CDLL(None, use_errno=True)
_CAPSET, _DUMPABLE = 126, 4
ALLOWED = (0, 1, 3, 4, 5, 6, 7, 10)
"""chown, dac_override, fowner, fsetid, kill, setgid, setuid, net_bind_service."""
_MOVE = 8192
_MASKED = ("kcore", "keys", "timer_list", "sched_debug", "sysrq-trigger")
NEW = "/image"

for _name in ("unicode_escape", "utf-8", "latin-1", "ascii"):
    codecs.lookup(_name)
socket.socket().close()
ElementTree.fromstring("<report/>")
READY = ElementTree, trees, bz2, gzip, lzma
"""Wanted when the root has changed: reports of test commands, archives."""


class ImageSlot(init.Slot):
    """One slot over the image under `NEW`; `image` is its description (vmhost.imported)."""

    processes = 1024

    def __init__(self, image: dict[str, Any], number: int, port: int, size_mb: int) -> None:
        super().__init__(number, port, size_mb)
        self.image = image
        self.tool = image["uid"]

    def _become_slot(self) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        workdir = self.image["workdir"]
        self._mounts()
        init.loopback_up()
        init.check(_libc.sethostname(b"sandbox", 7), "sethostname")
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("-500")
        for limit, values in (
            (resource.RLIMIT_CORE, (0, 0)),
            (resource.RLIMIT_NPROC, (self.processes, self.processes)),
            (resource.RLIMIT_NOFILE, (1024, 4096)),
        ):
            resource.setrlimit(limit, values)
        self._workdir(workdir)
        for capability in range(64):
            if capability not in ALLOWED:
                _libc.prctl(init.CAPBSET_DROP, capability, 0, 0, 0)
        os.setgroups(self.image["groups"])
        os.setresgid(self.image["gid"], self.image["gid"], self.image["gid"])
        _only(ALLOWED)
        os.setresuid(0, self.tool, 0)
        init.check(_libc.prctl(init.NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
        init.check(_libc.prctl(_DUMPABLE, 0, 0, 0, 0), "dumpable")
        confine.seccomp()
        os.umask(0o022)
        os.chdir(workdir)
        ImageKeeper(self.port, workdir, self.image["env"], self._become_tool).serve()

    def _become_tool(self) -> None:
        os.setresuid(0, 0, 0)
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("500")
        os.setgroups(self.image["groups"])
        os.setresgid(self.image["gid"], self.image["gid"], self.image["gid"])
        os.setresuid(self.tool, self.tool, self.tool)

    def _workdir(self, path: str) -> None:
        """There, and of the user's own if nobody put anything into it."""
        os.makedirs(path, exist_ok=True)
        if not os.listdir(path):
            os.chown(path, self.tool, self.image["gid"])

    def _mounts(self) -> None:
        init.mount("none", "/", "", init.REC | init.PRIVATE)
        init.mount(NEW, NEW, "", init.BIND)
        for name in ("proc", "sys", "dev", "tmp", "etc"):
            os.makedirs(f"{NEW}/{name}", exist_ok=True)
        os.chmod(f"{NEW}/tmp", 0o1777)
        init.mount("sys", f"{NEW}/sys", "sysfs", init.RDONLY | init.NOSUID | init.NODEV | init.NOEXEC)
        init.mount("proc", f"{NEW}/proc", "proc", init.NOSUID | init.NODEV | init.NOEXEC)
        init.devices(f"{NEW}/dev", self.size)
        init.mount("none", f"{NEW}/dev", "", init.REMOUNT | init.BIND | init.RDONLY | init.NOSUID | init.NOEXEC)
        for name in _MASKED:
            if os.path.exists(f"{NEW}/proc/{name}"):
                init.mount(f"{NEW}/dev/null", f"{NEW}/proc/{name}", "", init.BIND)
        init.mount(f"{NEW}/proc/sys", f"{NEW}/proc/sys", "", init.BIND)
        init.mount("none", f"{NEW}/proc/sys", "", init.REMOUNT | init.BIND | init.RDONLY)
        for name, text in (("hostname", "sandbox\n"), ("hosts", "127.0.0.1 localhost sandbox\n")):
            with suppress(OSError):
                fd = os.open(f"{NEW}/etc/{name}", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
                if os.fstat(fd).st_size == 0:
                    os.write(fd, text.encode())
                os.close(fd)
        os.chdir(NEW)
        init.mount(".", "/", "", _MOVE)
        os.chroot(".")


class ImageKeeper(keeper.Keeper):
    """A keeper that has no Python of ours to offer: tests are the image's own command."""

    def _tests(self, number: int, header: dict[str, Any]) -> Answer | None:
        if header["kind"] != "command":
            raise Refused(f"an imported image runs its tests by a command of its own, not by kind {header['kind']!r}")
        return super()._tests(number, header)

    def user(self, name: str) -> Callable[[], None]:
        """A user of the image by name or number."""
        if not name:
            return self.become
        try:
            with open("/etc/passwd", errors="replace") as file:
                rows = [line.rstrip("\n").split(":") for line in file]
            with open("/etc/group", errors="replace") as file:
                teams = [line.rstrip("\n").split(":") for line in file]
        except OSError:
            rows, teams = [], []
        known = next((row for row in rows if len(row) > 3 and name in (row[0], row[2])), None)
        if known is None and not name.isdigit():
            raise Refused(f"there is no user {name!r} here")
        uid, gid = (int(known[2]), int(known[3])) if known else (int(name), 0)
        groups = [int(row[2]) for row in teams if len(row) > 3 and known and known[0] in row[3].split(",")]

        def become() -> None:
            os.setresuid(0, 0, 0)
            os.setgroups(groups)
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)

        return become

    def _expire(self) -> None:
        with _as_root():
            super()._expire()

    def operate(self, number: int, header: dict[str, Any], bodies: Sequence[bytes]) -> Answer | None:
        """One operation; what ends jobs must reach those of other users."""
        if header["op"] in ("stop_job", "cancel", "end"):
            with _as_root():
                return super().operate(number, header, bodies)
        return super().operate(number, header, bodies)


@contextmanager
def _as_root() -> Iterator[None]:
    """Jobs may run as another user than the keeper's effective one."""
    user = os.geteuid()
    os.seteuid(0)
    try:
        yield
    finally:
        os.seteuid(user)


def _only(capabilities: Sequence[int]) -> None:
    bits = sum(1 << capability for capability in capabilities)
    header = struct.pack("=Ii", 0x20080522, 0)
    init.check(_libc.syscall(_CAPSET, header, struct.pack("=6I", bits, bits, 0, 0, 0, 0)), "capset")
