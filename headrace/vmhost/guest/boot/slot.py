"""One slot of a machine: PID, mount, IPC, network and UTS namespaces with a workspace, /tmp, /dev and /proc of its own.

The rest of the root is read-only. The slot's first process is its agent (guest/agent.py); it drops every capability,
installs the seccomp filter and joins a control group of its own (see confine) before it reads its first frame.
"""

import os
import resource
import signal
from contextlib import suppress

from .. import agent
from . import confine, syscalls
from .syscalls import BIND, NODEV, NOEXEC, NOSUID, PRIVATE, RDONLY, REC, REMOUNT, mount

TOOL_UID, AGENT_UID = 20100, 20200
"""User ids of slot 0's tools and agent; slot n has the n-th after them."""
ROOT, NEW = "/workspace", "/tmp/root"
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
    "HOME": "/tmp",
    "USER": "agent",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
}
_NAMESPACES = syscalls.NEWNS | syscalls.NEWUTS | syscalls.NEWIPC | syscalls.NEWPID | syscalls.NEWNET


def say(text: str) -> None:
    """Write a line to the kernel log, which the template's build reads on the serial port; in a container, which has no
    kernel log, to standard error."""
    try:
        with open("/dev/kmsg", "w") as log:
            log.write(f"<3>headrace: {text}\n")
    except OSError:
        with suppress(OSError):
            os.write(2, f"headrace: {text}\n".encode())


def set_oom_score(score: int) -> None:
    """Set this process's oom_score_adj."""
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(score))


class Slot:
    """Creates one slot; everything after `unshare` happens in the slot's first process."""

    processes = 128
    tools: confine.Tools | None = None
    """The control group of the slot's tools, once the slot is open."""

    def __init__(self, number: int, port: int, size_mb: int) -> None:
        """port: descriptor of the slot's channel; size_mb: capacity of the workspace, and the most that /tmp gets."""
        self.port = port
        self.tool, self.agent = TOOL_UID + number, AGENT_UID + number
        self.size = size_mb
        self.memory = 1 << 62
        """Limit of the slot's control group in bytes; files in the slot's tmpfs count."""

    @property
    def tmp_mb(self) -> int:
        """Capacity of /tmp in MiB: the part of the tools' memory that a full workspace and a running command leave.

        The memory that is free when the slots are opened differs by a few hundred kilobytes from one template to the
        next. With a fixed capacity, two full file systems took all the memory of some templates, and no command ran.
        """
        free = self.memory - confine.AGENT - confine.WORKING - (self.size << 20)
        return max(1, min(self.size, free >> 20))

    def open(self, others: list[int]) -> int:
        """Start the slot and return the pid of its first process in the root namespace.

        others: descriptors of the other slots' ports, which the slot must not keep.
        """
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            self.tools = confine.join(f"slot{self.tool}", self.memory, self.processes)
            syscalls.check(syscalls.libc.unshare(_NAMESPACES), "unshare")
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
        syscalls.loopback_up()
        syscalls.set_hostname(b"sandbox")
        set_oom_score(-500)
        for limit, value in (
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_NPROC, self.processes),
            (resource.RLIMIT_NOFILE, 1024),
        ):
            resource.setrlimit(limit, (value, value))
        for capability in range(64):
            syscalls.prctl(syscalls.CAPBSET_DROP, capability)
        os.setgroups([])
        os.setresgid(self.tool, self.tool, self.tool)
        os.setresuid(self.agent, self.tool, self.agent)
        syscalls.check(syscalls.prctl(syscalls.NO_NEW_PRIVS, 1), "no_new_privs")
        confine.seccomp()
        os.umask(0o022)
        os.chdir(ROOT)
        slot_agent = agent.SlotAgent(self.port, ROOT, ENVIRONMENT, self._become_tool, self.tools)
        slot_agent.worker.prepare()
        slot_agent.serve()

    def _become_tool(self) -> None:
        if self.tools is not None:
            self.tools.enter()
        # The kernel's out-of-memory killer should choose tools before the agent. The file that says so belongs to root
        # in a process that is not dumpable, so it is dumpable for this write; until the user changes below, no tool can
        # trace the process.
        syscalls.prctl(syscalls.DUMPABLE, 1)
        with suppress(OSError):
            set_oom_score(500)
        syscalls.prctl(syscalls.DUMPABLE, 0)
        os.setresuid(self.tool, self.tool, self.tool)

    def _mounts(self) -> None:
        mount("none", "/", "", REC | PRIVATE)
        confine.hide()
        # An overlay has inodes of its own: a lock, lease or watch on a file of the root is not seen by other slots.
        mount("layers", "/tmp", "tmpfs", NOSUID | NODEV, "size=64k")
        for folder in ("/tmp/none", NEW):
            os.mkdir(folder)
        mount("root", NEW, "overlay", RDONLY | NOSUID, "lowerdir=/:/tmp/none")
        owner = f"uid={self.tool},gid={self.tool}"
        mount("workspace", NEW + ROOT, "tmpfs", NOSUID | NODEV, f"size={self.size}m,mode=755,{owner}")
        mount("tmp", f"{NEW}/tmp", "tmpfs", NOSUID | NODEV, f"size={self.tmp_mb}m,mode=1777")
        mount("proc", f"{NEW}/proc", "proc", NOSUID | NODEV | NOEXEC)
        mount("sys", f"{NEW}/sys", "sysfs", RDONLY | NOSUID | NODEV | NOEXEC)
        mount_devices(f"{NEW}/dev", self.size)
        mount("none", f"{NEW}/dev", "", REMOUNT | BIND | RDONLY | NOSUID | NOEXEC)
        syscalls.become_root(NEW)


def mount_devices(path: str, size_mb: int) -> None:
    """Mount a /dev that holds what ordinary programs expect and nothing else. size_mb: capacity of /dev/shm."""
    mount("dev", path, "tmpfs", NOSUID | NOEXEC, "size=1m,mode=755")
    for name, minor in (("null", 3), ("zero", 5), ("full", 7), ("random", 8), ("urandom", 9)):
        os.mknod(f"{path}/{name}", 0o20666, os.makedev(1, minor))
        os.chmod(f"{path}/{name}", 0o666)
    os.mkdir(f"{path}/shm")
    mount("shm", f"{path}/shm", "tmpfs", NOSUID | NODEV, f"size={size_mb}m,mode=1777")
    os.mkdir(f"{path}/pts")
    mount("devpts", f"{path}/pts", "devpts", NOSUID | NOEXEC, "newinstance,ptmxmode=0666,mode=620")
    links = {"fd": "/proc/self/fd", "ptmx": "pts/ptmx"} | {
        name: f"/proc/self/fd/{fd}" for fd, name in enumerate(("stdin", "stdout", "stderr"))
    }
    for name, target in links.items():
        os.symlink(target, f"{path}/{name}")
