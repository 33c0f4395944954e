"""The `container` backend: a container of a stored image for every sandbox, under the kernel that the host shares.

One warm process per host forks the containers (process.py). A container has a control group that bounds its memory and
its number of processes; its files are in memory and count. It has no kernel of its own: its programs can exploit a
defect of the host's kernel, so it is never used for the production lane.
"""

import asyncio
import json
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from headrace.config import Environment
from headrace.harnesses.bundles import Bundle
from headrace.messages.sandbox import SandboxLost
from headrace.messages.tasks import SandboxLimits
from headrace.python_modules import module_command
from headrace.vmhost import agent_files, cgroups
from headrace.vmhost.backend import Capabilities, OnEvent, Requirement
from headrace.vmhost.backends.lacking import WithoutCopies, lacks
from headrace.vmhost.cgroups import Group
from headrace.vmhost.channel import ENDED, Channel
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.guest.changes import UNCHANGED
from headrace.vmhost.guest.frames import LIMIT
from headrace.vmhost.images import imported, mounting, store
from headrace.vmhost.images.imported import Image
from headrace.vmhost.node import capacity
from headrace.vmhost.qemu.drives import Disk, disk_short

START_S = 60.0
CHANGES_S = 30.0
BLAME_S = 0.2
"""How long after a container's end the process that made it is looked at: its own end takes all containers along."""
PROCESSES = 512
"""Processes that a container may have at one time, its agent included."""
OVERHEAD_MB = 64
"""Memory of a container besides its image's: the agent, and what its processes hold in the kernel."""


class ContainerMachine:
    """One container, which is one slot."""

    slots = 1
    limit_bytes = LIMIT

    def __init__(
        self,
        backend: "ContainerBackend",
        image: Image,
        memory_mb: int,
        group: Group,
        control: Channel,
        slot: Channel,
        disk: Disk | None,
    ) -> None:
        self.image, self.memory_mb, self.group, self.disk = image, memory_mb, group, disk
        self._backend, self._control, self._slot = backend, control, slot
        self.made_of = agent_files.digest(image.digest)
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._ended_here = False
        """Whether the host ended it."""
        for channel in (control, slot):
            channel.lost.add_done_callback(lambda lost: self._end(str(lost.result())))

    @property
    def lost(self) -> "asyncio.Future[str]":
        """Done, with the reason, once the container has ended."""
        return self._lost

    async def open(self, slot: int) -> Channel:
        """The channel of the slot. SandboxLost."""
        if self._lost.done():
            raise SandboxLost(self._lost.result())
        return self._slot

    async def ready(self) -> None:
        """Containers use the host's clock and entropy."""

    async def name(self, slot: int, hostname: str) -> None:
        """VmhostError."""
        lacks("container", "hostname")

    async def check_integrity(self, thorough: bool) -> tuple[str, ...]:
        """There is no machine besides the host. VmhostError."""
        lacks("container", "inspect")

    async def changes(self, limit: int, originals: int) -> tuple[dict[str, Any], list[bytes], str]:
        """The changes of its programs, read outside the slot (guest/changes.py). SandboxLost."""
        header = {"op": "changes", "drives": self.image.drives, "skip": UNCHANGED}
        answer = await self._control.call(header | {"limit": limit, "originals": originals}, (), CHANGES_S)
        return *answer, self.image.workdir

    async def blame(self, channel: Channel, alone: bool) -> str:
        """A container ends by what runs in it, as long as the process that made it runs and the host did not end it."""
        await asyncio.sleep(BLAME_S)
        return ENDED if not self._ended_here and self._backend.serving else ""

    def leave(self, channel: Channel) -> None:
        """Its only slot was released."""
        self._ended_here = self._ended_here or not self._lost.done()
        self._end("released")

    def cpu_ms(self) -> float:
        """Not measured."""
        return 0.0

    def kill(self) -> None:
        """End it: the agent ends with its channel, and every other process with the agent."""
        self._ended_here = self._ended_here or not self._lost.done()
        self._end("it was ended")

    def _end(self, reason: str) -> None:
        if self._lost.done():
            return
        self._lost.set_result(reason)
        self._control.close(reason)
        self._slot.close(reason)
        self._backend.ended(self)


class ContainerBackend(WithoutCopies):
    """Containers behind the Backend protocol."""

    name = "container"
    capabilities: ClassVar[Capabilities] = Capabilities(
        harness=True, upper_diff=True, bounded=True, limit_vcpus=True, limit_memory=True, limit_disk=True
    )
    slots = 1

    @classmethod
    def requirements(cls, environment: Environment) -> Iterator[Requirement]:
        """The rights and kernel features that a container needs."""
        text = "backend = container: sandboxes share this machine's kernel"
        why = unavailable()
        yield Requirement("", not why, f"{text}, and cannot be made: {why}" if why else text)

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._cache = Path(environment.cache_dir).absolute()
        self._alive: set[ContainerMachine] = set()
        self._reserved = 0
        self._leaving: set[asyncio.Task[None]] = set()
        self._folder = tempfile.mkdtemp(prefix=f"headrace-container-{os.getpid()}-")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                module_command("headrace.vmhost.backends.container.process", str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )
        self._requests = ours

    @classmethod
    async def open(cls, environment: Environment, on_event: OnEvent) -> "ContainerBackend":
        """Start the warm process. VmhostError where containers cannot be made."""
        if why := unavailable():
            raise VmhostError(f"the container backend cannot work here: {why}")
        return cls(environment)

    @property
    def serving(self) -> bool:
        """Whether the process that makes containers runs."""
        return self._process.poll() is None

    def _image(self, template: str) -> Image:
        image = imported.find(self._cache, template)
        if image is None:
            images = ", ".join(imported.names(self._cache)) or "none"
            raise VmhostError(
                f"the container backend runs images of the store, and {template!r} is none; known are {images}: "
                "import one (`headrace images`), or use backend = qemu for templates"
            )
        return image

    def _memory_mb(self, image: Image, limits: SandboxLimits) -> int:
        return limits.memory_mib or max(image.memory_mb, self._environment.memory_mb)

    async def machine(self, template: str, limits: SandboxLimits) -> ContainerMachine:
        """A fresh container. SandboxLost, VmhostError."""
        self._reserved = max(0, self._reserved - 1)
        image = self._image(template)
        if self._process.poll() is not None:
            raise VmhostError(
                f"the container backend ended with code {self._process.returncode}; start the actor again"
            )
        if why := cgroups.lacks(limits):
            raise VmhostError(f"the container backend cannot enforce the task's limits on this machine: {why}")
        memory = self._memory_mb(image, limits)
        disk = None
        if capacity.on_disk(memory, limits):
            disk = await asyncio.to_thread(Disk, self._cache, limits.disk_mib)
        name = f"container-{secrets.token_hex(4)}"
        group = cgroups.create(name, processes=PROCESSES, memory_mb=memory + OVERHEAD_MB, vcpus=limits.vcpus)
        if group is None:
            raise VmhostError("the container backend cannot work here: there are no control groups")
        if group.refused:
            group.close()
            raise VmhostError(f"the kernel refuses the container's limits: {'; '.join(group.refused)}")
        root = f"{self._folder}/{name}"
        os.mkdir(root)
        settings = {"uid": image.uid, "gid": image.gid, "groups": image.groups, "env": image.env}
        request = {
            "root": root,
            "join": group.join,
            "image": settings | {"workdir": image.workdir},
            "size": capacity.upper_mib(memory, limits),
            "disk": disk is not None,
        }
        pairs = [socket.socketpair() for _ in range(2)]
        blobs = store.open_blobs(image.segments())
        try:
            fds = [theirs.fileno() for _, theirs in pairs]
            behind = [disk.fd] if disk is not None else []
            socket.send_fds(self._requests, [json.dumps(request).encode()], [*fds, *blobs, *behind])
        except OSError as error:
            raise SandboxLost(f"the container backend's process has ended: {error}") from None
        finally:
            for _, theirs in pairs:
                theirs.close()
            for blob in blobs:
                os.close(blob)
        control, slot = [await Channel.connect(ours, f"{name} of {image.name}") for ours, _ in pairs]
        made = ContainerMachine(self, image, memory, group, control, slot, disk)
        self._alive.add(made)
        try:
            await control.call({"op": "hello"}, (), START_S)
        except SandboxLost as lost:
            made.kill()
            raise SandboxLost(f"a container did not start: {lost}; its process wrote why to standard error") from None
        return made

    def ended(self, machine: ContainerMachine) -> None:
        """A container was ended: kill its remaining processes and remove its control group."""
        self._alive.discard(machine)
        machine.disk = None
        task = asyncio.get_running_loop().create_task(machine.group.end())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def slots_of(self, template: str) -> int:
        """An image has its container for itself. VmhostError."""
        self._image(template)
        return 1

    def with_harness(self, template: str, bundle: Bundle) -> tuple[str, str]:
        """As a read-only layer below the image."""
        return mounting.mounted(self._cache, template, bundle)

    def shortage(self, template: str, limits: SandboxLimits) -> str:
        """Why another container could not grow to its full size; empty when it can."""
        wanted = self._memory_mb(self._image(template), limits)
        if capacity.on_disk(wanted, limits):
            disks = [machine.disk for machine in self._alive]
            if short := disk_short(self._cache, limits.disk_mib, disks, self._reserved):
                return short
        others = sum(machine.memory_mb for machine in self._alive)
        return capacity.memory_short(wanted, others + self._reserved * wanted)

    def reserve(self, template: str, limits: SandboxLimits) -> None:
        """Count one container as present until `machine` starts it."""
        self._reserved += 1

    def free_idle(self, template: str, limits: SandboxLimits) -> None:
        """Nothing waits unused."""

    def busy(self) -> str:
        """Their processor time is not measured."""
        return ""

    def facts(self) -> dict[str, Any]:
        """Description for reports."""
        return {"backend": self.name, "isolation": "shared kernel", "processes": PROCESSES}

    def cpu_ms(self) -> float:
        """Not measured."""
        return 0.0

    async def settle(self) -> None:
        """Wait until every container that was ended is gone."""
        while self._leaving:
            await asyncio.wait(self._leaving)

    async def close(self) -> None:
        """End every container, and the warm process."""
        for machine in list(self._alive):
            machine.kill()
        await self.settle()
        self._requests.close()
        await asyncio.to_thread(self._process.wait)
        shutil.rmtree(self._folder, ignore_errors=True)


def unavailable() -> str:
    """Why containers cannot be made on this machine; empty when they can."""
    if os.geteuid() != 0:
        return "it mounts images, which needs root"
    places = cgroups.places()
    if places is None or not {"memory", "pids"} <= set(places.limits):
        return "it needs control groups for memory and processes (`headrace check` says what is missing)"
    supported = Path("/proc/filesystems").read_text().split()
    missing = [name for name in ("erofs", "overlay", "ext4") if name not in supported]
    if missing:
        return f"the kernel lacks {', '.join(missing)} (load it: modprobe {missing[0]})"
    if not os.path.exists("/dev/loop-control"):
        return "the kernel has no loop devices (load them: modprobe loop)"
    return ""
