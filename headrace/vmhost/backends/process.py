"""The `process` backend: the slot agent of the guests in a local process. It is not isolated and must be asked for.

One warm process per host forks an agent for every sandbox (`guest/local.py`), so a sandbox costs one fork. Sandboxes
lie in one temporary folder of their host (scratch.py).
"""

import asyncio
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, ClassVar

from headrace.config import Environment
from headrace.harnesses.bundles import Bundle
from headrace.messages.sandbox import SandboxLost
from headrace.messages.tasks import SandboxLimits
from headrace.vmhost import agent_files, cgroups
from headrace.vmhost.backend import Capabilities, OnEvent, Requirement
from headrace.vmhost.backends.lacking import WithoutCopies, lacks
from headrace.vmhost.backends.scratch import Scratch
from headrace.vmhost.cgroups import Group
from headrace.vmhost.channel import ENDED, Channel
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.guest import walks
from headrace.vmhost.guest.frames import LIMIT
from headrace.vmhost.guest.local import PROCESSES

_group_numbers = itertools.count(1)
"""Two backends of one process have the same folder of groups, and the group of a closed one
stays there while a process is in it."""
AGENT_END_S = 3.0
"""How long an agent whose channel closed may take to end its processes and remove its folder."""
_START = "import sys; sys.path.insert(0, sys.argv[2]); from guest import local; local.main(int(sys.argv[1]))"


class ProcessMachine:
    """Slots that are folders, each with an agent of its own."""

    def __init__(self, backend: "ProcessBackend", slots: int, limits: SandboxLimits) -> None:
        self.slots, self.limits = slots, limits
        self.made_of = agent_files.digest(sys.version)
        self.limit_bytes = LIMIT
        self._backend = backend
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._channels: list[Channel] = []

    @property
    def lost(self) -> "asyncio.Future[str]":
        """Done once the machine was killed."""
        return self._lost

    async def open(self, slot: int) -> Channel:
        """Fork an agent over a new folder. SandboxLost."""
        channel = await self._backend.fork_agent(f"process slot {slot}", self.limits)
        self._channels.append(channel)
        return channel

    async def ready(self) -> None:
        """Processes use the host's clock and entropy."""

    async def name(self, slot: int, hostname: str) -> None:
        """Processes share the host's name. VmhostError."""
        lacks("process", "hostname")

    async def check_integrity(self, thorough: bool) -> tuple[str, ...]:
        """There is no machine besides the host. VmhostError."""
        lacks("process", "inspect")

    async def changes(self, limit: int, originals: int) -> tuple[dict[str, Any], list[bytes], str]:
        """There is no image below the workspace. VmhostError."""
        lacks("process", "upper_diff")

    async def blame(self, channel: Channel, alone: bool) -> str:
        """Agents are ended by what they started, as long as the warm process and the folder of the sandboxes live."""
        return "" if self._lost.done() or not self._backend.serving else ENDED

    def leave(self, channel: Channel) -> None:
        """Close the channel: the agent ends and kills everything that it started."""
        channel.close("released")

    def cpu_ms(self) -> float:
        """Not measured."""
        return 0.0

    def kill(self) -> None:
        """Close the channels: agents end, kill everything that they started, and remove their folders."""
        for channel in self._channels:
            channel.close("released")
        if not self._lost.done():
            self._lost.set_result("released")


class ProcessBackend(WithoutCopies):
    """Local agents behind the Backend protocol."""

    name = "process"
    capabilities: ClassVar[Capabilities] = Capabilities(
        harness=True, network_list=True, limit_vcpus=True, limit_memory=True
    )

    @classmethod
    def requirements(cls, environment: Environment) -> Iterator[Requirement]:
        """No requirement; the text warns that this backend isolates nothing."""
        text = f"backend = {environment.backend}: sandboxes are plain processes and NOT isolated"
        if not cls.capabilities.isolated:
            yield Requirement("", True, text)

    def __init__(self, slots: int) -> None:
        """slots: sandboxes of a machine in group isolation."""
        self.slots = slots
        self._count = 0
        self._leaving: set[asyncio.Task[None]] = set()
        self._scratch = Scratch()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", _START, str(theirs.fileno()), str(agent_files.FOLDER.parent)],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )
        self._control = ours

    @classmethod
    async def open(cls, environment: Environment, on_event: OnEvent) -> "ProcessBackend":
        """Start the warm process."""
        return cls(environment.slots_per_vm)

    @property
    def serving(self) -> bool:
        """Whether sandboxes can be made: the warm process runs and their folder exists."""
        return self._process.poll() is None and self._scratch.exists()

    async def fork_agent(self, name: str, limits: SandboxLimits) -> Channel:
        """The channel of a new agent, which runs in a folder and a control group of its own. SandboxLost."""
        self._count += 1
        root = f"{self._scratch.path}/{self._count}"
        try:
            os.mkdir(root)
        except FileNotFoundError:
            raise SandboxLost(f"{name}: {self._scratch.path} was removed while this host uses it") from None
        group = cgroups.create(
            f"sandbox-{next(_group_numbers)}", processes=PROCESSES, memory_mb=limits.memory_mib, vcpus=limits.vcpus
        )
        if group is not None and group.refused and (limits.memory_mib or limits.vcpus):
            group.close()
            raise SandboxLost(f"{name}: the kernel refuses the task's limits: {'; '.join(group.refused)}")
        request = {"root": root, "join": group.join if group else []}
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [json.dumps(request).encode()], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise SandboxLost(f"{name}: the process backend's process has ended: {error}") from None
        channel = await Channel.connect(ours, name)
        channel.ended.add_done_callback(lambda _: self._ended(root, group))
        return channel

    def _ended(self, root: str, group: Group | None) -> None:
        """The channel of an agent ended. An agent that was killed or stopped leaves its processes and its folder."""
        task = asyncio.get_running_loop().create_task(self._clear(root, group))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _clear(self, root: str, group: Group | None) -> None:
        deadline = time.monotonic() + AGENT_END_S
        while os.path.lexists(root) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        if group is not None:
            await group.end()
        for folder in (f"{root}.home", root):
            if os.path.lexists(folder):
                await asyncio.to_thread(walks.remove, folder)

    async def machine(self, template: str, limits: SandboxLimits) -> ProcessMachine:
        """A set of slots; nothing runs until one is opened. VmhostError when the warm process has ended."""
        if self._process.poll() is not None:
            raise VmhostError(f"the process backend ended with code {self._process.returncode}; start the actor again")
        if not self._scratch.exists():
            raise VmhostError(f"{self._scratch.path} was removed while this host uses it; start the actor again")
        if why := cgroups.lacks(limits):
            raise VmhostError(f"the process backend cannot enforce the task's limits on this machine: {why}")
        return ProcessMachine(self, self.slots, limits)

    def slots_of(self, template: str) -> int:
        """Every machine has the same number."""
        return self.slots

    def with_harness(self, template: str, bundle: Bundle) -> tuple[str, str]:
        """The node's own folder: a process sees the host's files."""
        return template, str(bundle.folder)

    def shortage(self, template: str, limits: SandboxLimits) -> str:
        """Processes are small: max_vms alone bounds them."""
        return ""

    def reserve(self, template: str, limits: SandboxLimits) -> None:
        """Nothing is counted."""

    def free_idle(self, template: str, limits: SandboxLimits) -> None:
        """Nothing waits unused."""

    def busy(self) -> str:
        """Their processor time is not measured."""
        return ""

    def facts(self) -> dict[str, Any]:
        """Description for reports."""
        limited = cgroups.places() is not None or os.geteuid() != 0
        processes = PROCESSES if limited else "without limit"
        return {
            "backend": self.name,
            "isolated": False,
            "processes": processes,
            "python": sys.version.split()[0],
        }

    def cpu_ms(self) -> float:
        """Unknown: agents are not children of this process."""
        return 0.0

    async def settle(self) -> None:
        """Wait until nothing is left of sandboxes whose channels ended."""
        while self._leaving:
            await asyncio.wait(self._leaving)

    async def close(self) -> None:
        """End the warm process and remove folders and control groups; agents end with their channels."""
        self._control.close()
        await asyncio.to_thread(self._process.wait)
        await self.settle()
        self._scratch.remove()
