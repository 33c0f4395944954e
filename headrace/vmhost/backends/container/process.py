"""The containers' side of the `container` backend: a warm process that forks a container for every sandbox.

A container is made of the parts of a machine's guest, run here: the image's segments as loop devices, overlaid by a
tmpfs (guest/boot/drives.py), and a slot with namespaces, capabilities and seccomp filter of its own
(guest/boot/images.py). The agent is Python that was loaded before the root changed, because an image may have none.
That is why no program such as bubblewrap starts it.

A container's first process is outside the slot. It sees the writable layer and reports the changes in it; nothing that
a policy writes reaches this process. The host's file systems are unmounted in its mount namespace (pivot_root).

Sources: loop(4), pivot_root(2), mount_namespaces(7).
"""

import ctypes
import fcntl
import json
import os
import resource
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from typing import Any

from headrace.vmhost.guest.boot import drives, images, syscalls
from headrace.vmhost.guest.boot.syscalls import DETACH, NODEV, NOSUID, PRIVATE, RDONLY, REC, mount
from headrace.vmhost.guest.frames import Reader, send

_CONFIGURE, _GET_FREE = 0x4C0A, 0x4C82
_READ_ONLY, _AUTOCLEAR = 1, 4
_INFO = struct.Struct("=QQQQQIIII64s64s32s2Q")
_PIVOT_ROOT, _PDEATHSIG = 155, 1
_TRIES, _PAUSE_S = 200, 0.01


def loop_device(blob: int, writable: bool = False) -> tuple[str, int]:
    """A loop device over a file, and its descriptor; it goes with its last user. OSError."""
    flags = _AUTOCLEAR if writable else _READ_ONLY | _AUTOCLEAR
    info = _INFO.pack(0, 0, 0, 0, 0, 0, 0, 0, flags, b"", b"", b"", 0, 0)
    config = struct.pack("=II", blob, 0) + info + bytes(64)
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(_TRIES):
            number = fcntl.ioctl(control, _GET_FREE)
            path = f"/dev/loop{number}"
            with suppress(FileExistsError):
                os.mknod(path, 0o60660, os.makedev(7, number))
            device = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
            try:
                fcntl.ioctl(device, _CONFIGURE, config)
                return path, device
            except OSError as error:
                os.close(device)
                if error.errno != 16:  # another process took it first
                    raise
                time.sleep(_PAUSE_S)
    finally:
        os.close(control)
    raise OSError(16, "no loop device is free")


class Container:
    """One container, in the process outside its slot."""

    def __init__(self, request: dict[str, Any], control: int, port: int, blobs: list[int]) -> None:
        """request: ``root`` (an empty folder), ``join`` (files of the control group), ``image``, ``size``, and ``disk``
        (whether the last blob is the writable layer); control and port: the channels of this process and of the
        slot."""
        self.request, self.control, self.port = request, control, port
        self.blobs = blobs

    def serve(self) -> None:
        """Open the slot, then answer until the host closes the channel."""
        for path in self.request["join"]:
            with open(path, "w") as file:
                file.write("0")
        self._make_root()
        slot = images.WaitingSlot(self.port, self.request["size"])
        # Users of containers are users of the host, so a limit per user would count the host's processes too: the
        # control group is the limit.
        slot.processes = resource.getrlimit(resource.RLIMIT_NPROC)[1]
        slot.oom_score = 0  # a root without CAP_SYS_RESOURCE may not lower it
        slot.open([self.control])
        os.close(self.port)
        slot.begin(self.request["image"])
        reader = Reader()
        while data := os.read(self.control, 65536):
            for header, _ in reader.feed(data):
                try:
                    answer, bodies = drives.changes(header) if header["op"] == "changes" else ({}, [])
                except Exception as error:
                    answer, bodies = {"ok": False, "error": f"{type(error).__name__}: {error}"}, []
                send(self.control, {"i": header["i"]} | answer, bodies)

    def _make_root(self) -> None:
        """A separate root in a new mount namespace, with the image mounted where the slot expects it."""
        root = self.request["root"]
        syscalls.check(syscalls.libc.unshare(syscalls.NEWNS), "unshare")
        mount("none", "/", "", REC | PRIVATE)
        disk = self.request["disk"]
        last = len(self.blobs) - 1
        devices = [loop_device(blob, disk and number == last) for number, blob in enumerate(self.blobs)]
        mount("root", root, "tmpfs", NOSUID | NODEV, "size=1m,mode=755")
        paths = [path for path, _ in devices]
        size = f"{self.request['size']}m"
        drives.attach_at(root, paths[:-1] if disk else paths, size, paths[-1] if disk else "")
        for fd in (*(fd for _, fd in devices), *self.blobs):
            os.close(fd)
        os.chdir(root)
        syscalls.check(syscalls.libc.syscall(_PIVOT_ROOT, b".", b"."), "pivot_root")
        syscalls.check(syscalls.libc.umount2(b".", DETACH), "umount2")
        os.chdir("/")
        mount("none", "/", "", syscalls.REMOUNT | syscalls.BIND | NOSUID | NODEV | RDONLY)


def main(descriptor: int) -> None:
    """Serve requests that come over a descriptor (a SOCK_SEQPACKET socket) until the host closes it."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    channel = socket.socket(fileno=descriptor)
    while True:
        data, fds, _, _ = socket.recv_fds(channel, 65536, 8)
        if not data:
            return
        pid = os.fork()
        if pid == 0:
            try:
                channel.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                Container(json.loads(data), fds[0], fds[1], fds[2:]).serve()
            except BaseException as error:
                os.write(2, f"container: {type(error).__name__}: {error}\n".encode())
            finally:
                os._exit(0)
        for fd in fds:
            os.close(fd)


if __name__ == "__main__":
    main(int(sys.argv[1]))
