"""The `process` backend: the guest's own keeper in a local process. Not isolated; only for who asks for it by name.

A warm process per host forks a keeper for every sandbox (`guest/local.py`), so a sandbox costs a fork. Folders lie
under one temporary folder that carries the host's pid; those of dead hosts are swept when the next one starts.
"""

import asyncio
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.messages.sandbox import SandboxLost
from headrace.vmhost.channel import Channel
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.guest.frames import LIMIT

if TYPE_CHECKING:
    from headrace.vmhost.snapshot import Snapshot
    from headrace.vmhost.template import Template

_START = "import sys; sys.path.insert(0, sys.argv[2]); from guest import local; local.main(int(sys.argv[1]))"


class ProcessMachine:
    """A folder per slot; each slot is a keeper of its own."""

    def __init__(self, backend: "ProcessBackend", slots: int) -> None:
        self.slots = slots
        self.limit_bytes = LIMIT
        self._backend = backend
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._channels: list[Channel] = []

    @property
    def lost(self) -> "asyncio.Future[str]":
        """Done once the machine was killed or the backend's process ended."""
        return self._lost

    async def open(self, slot: int) -> Channel:
        """Fork a keeper over a new folder."""
        channel = await self._backend.fork(f"process slot {slot}")
        self._channels.append(channel)
        return channel

    async def ready(self) -> None:
        """It is."""

    async def name(self, slot: int, hostname: str) -> None:
        """It is the host's."""
        raise VmhostError("the process backend has no host names of its own: use backend = qemu")

    async def inspect(self, thorough: bool) -> tuple[str, ...]:
        """There is no machine of its own."""
        raise VmhostError("the process backend can't tell what was touched: use backend = qemu")

    def leave(self, channel: Channel) -> None:
        """The keeper ends with its channel, and takes everything along."""
        channel.close("released")

    def kill(self) -> None:
        """Close the channels: keepers end, kill what they started, and remove their folders."""
        for channel in self._channels:
            channel.close("released")
        if not self._lost.done():
            self._lost.set_result("released")


class ProcessBackend:
    """Local keepers behind the Backend protocol."""

    name = "process"

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._count = 0
        sweep()
        self._folder = tempfile.mkdtemp(prefix=f"headrace-{os.getpid()}-")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", _START, str(theirs.fileno()), str(Path(__file__).parent)],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )
        self._control = ours

    async def fork(self, name: str) -> Channel:
        """A keeper's channel."""
        self._count += 1
        root = f"{self._folder}/{self._count}"
        os.mkdir(root)
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b'{"root": "%s"}' % root.encode()], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise SandboxLost(f"{name}: the process backend is gone: {error}") from None
        return await Channel.connect(ours, name)

    async def machine(self, template: str) -> ProcessMachine:
        """A set of slots; nothing runs until one is opened."""
        if self._process.poll() is not None:
            raise VmhostError(f"the process backend ended with code {self._process.returncode}; start the actor again")
        return ProcessMachine(self, self.slots)

    def slots_of(self, template: str) -> int:
        """Every machine has the same."""
        return self.slots

    async def template(self, name: str) -> "Template":
        """There are none."""
        raise VmhostError("the process backend has no templates: use backend = qemu")

    async def again(self, template: "Template", begin: "Snapshot") -> ProcessMachine:
        """Processes can't be stopped and copied."""
        raise VmhostError("the process backend can't go on from a snapshot: use backend = qemu")

    def short_of(self, template: str) -> str:
        """Processes are small: max_vms alone decides."""
        return ""

    def busy(self) -> str:
        """Nor do they say what they use."""
        return ""

    def facts(self) -> dict[str, Any]:
        """What this backend is."""
        return {"backend": self.name, "isolated": False, "python": sys.version.split()[0]}

    def cpu_ms(self) -> float:
        """Unknown: the keepers are not this process's children."""
        return 0.0

    async def settle(self) -> None:
        """Nothing to wait for: keepers end with their channels."""

    async def close(self) -> None:
        """End the warm process; keepers end with their channels."""
        self._control.close()
        await asyncio.to_thread(self._process.wait)
        shutil.rmtree(self._folder, ignore_errors=True)


def sweep() -> None:
    """Remove folders of hosts that no longer run."""
    for folder in Path(tempfile.gettempdir()).glob("headrace-*-*"):
        owner = re.fullmatch(r"headrace-(\d+)-\w+", folder.name)
        if owner and not os.path.exists(f"/proc/{owner[1]}"):
            shutil.rmtree(folder, ignore_errors=True)
