"""The `swerex` backend: sandboxes beside a SWE-ReX server, over HTTP. The server's machine or container is the image.

It shows that a remote service fits the seam: commercial ones differ in how they run a command and move a file. The slot
agent and a bridge are uploaded once, and each sandbox is an agent with a folder of its own (bridge.py). Sandboxes of
one server share its file system, users and network, so nothing is isolated, nothing is limited, and templates mean
nothing: start a server of the task's own image for each kind of task. The server needs Python 3.11 as ``python3``, and
tests by name need pytest there.
"""

import asyncio
from collections.abc import Iterator
from typing import Any, ClassVar

from headrace.config import Environment
from headrace.messages.sandbox import SandboxLost
from headrace.messages.tasks import SandboxLimits
from headrace.secret_files import SecretError, token
from headrace.vmhost.backend import Capabilities, OnEvent, Requirement
from headrace.vmhost.backends.lacking import WithoutCopies, lacks
from headrace.vmhost.backends.swerex.link import Link
from headrace.vmhost.channel import ENDED, Channel
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.guest.frames import LIMIT


class RemoteMachine:
    """Slots that are folders beside the server, each with an agent of its own."""

    limit_bytes = LIMIT

    def __init__(self, link: Link, slots: int) -> None:
        self.slots = slots
        self._link = link
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._channels: list[Channel] = []
        link.lost.add_done_callback(lambda lost: self._end(str(lost.result())))

    @property
    def lost(self) -> "asyncio.Future[str]":
        """Done once the machine was killed or the server was lost."""
        return self._lost

    def _end(self, reason: str) -> None:
        for channel in self._channels:
            channel.close(reason)
        if not self._lost.done():
            self._lost.set_result(reason)

    async def open(self, slot: int) -> Channel:
        """A new agent over a new folder. SandboxLost."""
        channel = await self._link.sandbox(f"swerex slot {slot}")
        self._channels.append(channel)
        return channel

    async def ready(self) -> None:
        """Agents use the server's clock and entropy."""

    async def name(self, slot: int, hostname: str) -> None:
        """Sandboxes share the server's name. VmhostError."""
        lacks("swerex", "hostname")

    async def check_integrity(self, thorough: bool) -> tuple[str, ...]:
        """Nobody looks at the server from outside. VmhostError."""
        lacks("swerex", "inspect")

    async def changes(self, limit: int, originals: int) -> tuple[dict[str, Any], list[bytes], str]:
        """There is no layer below the workspace. VmhostError."""
        lacks("swerex", "upper_diff")

    async def blame(self, channel: Channel, alone: bool) -> str:
        """An agent that ended while its server goes on was ended by what runs there. A late answer may be late on its
        way."""
        return "" if self._lost.done() or not channel.hung_up else ENDED

    def leave(self, channel: Channel) -> None:
        """Close the channel: the agent ends and kills everything that it started."""
        channel.close("released")

    def cpu_ms(self) -> float:
        """Not measured."""
        return 0.0

    def kill(self) -> None:
        """Close the channels."""
        self._end("released")


class SwerexBackend(WithoutCopies):
    """A SWE-ReX server behind the Backend protocol."""

    name = "swerex"
    capabilities: ClassVar[Capabilities] = Capabilities()

    @classmethod
    def requirements(cls, environment: Environment) -> Iterator[Requirement]:
        """An address and, where the server asks for one, a token."""
        why = _unset(environment)
        text = "backend = swerex: sandboxes of a server share it and are NOT isolated"
        yield Requirement("url" if not environment.url else "key_file", not why, why or text)

    def __init__(self, environment: Environment, link: Link) -> None:
        self.slots = environment.slots_per_vm
        self._environment, self._link = environment, link
        self._opening = asyncio.Lock()

    @classmethod
    async def open(cls, environment: Environment, on_event: OnEvent) -> "SwerexBackend":
        """Upload the agent and start the bridge. VmhostError."""
        if why := _unset(environment):
            raise VmhostError(why)
        return cls(environment, await Link.open(environment.url, _token(environment)))

    async def machine(self, template: str, limits: SandboxLimits) -> RemoteMachine:
        """A set of slots; a server that was lost is tried again. SandboxLost."""
        async with self._opening:
            if self._link.lost.done():
                await self._link.close()
                try:
                    self._link = await Link.open(self._environment.url, _token(self._environment))
                except VmhostError as error:
                    raise SandboxLost(str(error)) from None
        return RemoteMachine(self._link, self.slots)

    def slots_of(self, template: str) -> int:
        """Every machine has the same number."""
        return self.slots

    def shortage(self, template: str, limits: SandboxLimits) -> str:
        """The server's capacity is unknown here: max_vms alone bounds sandboxes."""
        return ""

    def reserve(self, template: str, limits: SandboxLimits) -> None:
        """Nothing is counted."""

    def free_idle(self, template: str, limits: SandboxLimits) -> None:
        """Nothing waits unused."""

    def busy(self) -> str:
        """The server's processor time is not measured."""
        return ""

    def facts(self) -> dict[str, Any]:
        """Description for reports."""
        return {"backend": self.name, "isolated": False, "url": self._environment.url, **self._link.found}

    def cpu_ms(self) -> float:
        """Not measured."""
        return 0.0

    async def settle(self) -> None:
        """Agents end with their channels."""

    async def close(self) -> None:
        """End the bridge and every agent."""
        await self._link.close()


def _unset(environment: Environment) -> str:
    """The text names what the configuration lacks; it is empty when it lacks nothing."""
    if not environment.url:
        return "backend = swerex expects the address of a SWE-ReX server in [environment] url"
    try:
        _token(environment)
    except VmhostError as error:
        return str(error)
    return ""


def _token(environment: Environment) -> str:
    """The server's --auth-token; empty where none is configured. VmhostError."""
    try:
        return token(environment.key_file, "[environment] key_file") if environment.key_file else ""
    except SecretError as error:
        raise VmhostError(str(error)) from None
