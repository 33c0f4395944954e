"""The seam of sandbox backends: a backend makes machines with slots. A slot is used once; a machine is never cleaned.

A backend declares what it can do. The host refuses a request that demands more, and names what is missing, so no
sandbox is ever weaker than its task expects.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, ClassVar, Protocol, runtime_checkable

import msgspec

from headrace.config import Environment
from headrace.harnesses.bundles import Bundle
from headrace.messages.sandbox import Acquire
from headrace.messages.tasks import SandboxLimits
from headrace.vmhost.channel import Channel

OnEvent = Callable[[str, str, dict[str, Any]], None]
"""Receives events for an operator: kind, sentence, figures."""


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """Capabilities of a backend's sandboxes; docs/sandboxes.md explains each name."""

    isolated: bool = False
    """A sandbox cannot reach the host or a sandbox of another machine; those of its own machine share a kernel and can
    see how busy it is. The production lane demands it, and gives every sandbox a machine of its own."""
    fork: bool = False
    harness: bool = False
    """A bundle with a harness can be mounted."""
    inspect: bool = False
    """The host can check a machine's integrity (`CheckIntegrity`)."""
    hostname: bool = False
    network_list: bool = False
    """Programs can reach listed names through a proxy. Only an isolated backend keeps them from reaching others."""
    upper_diff: bool = False
    """The changes of a sandbox can be read as the upper layer of its root."""
    bounded: bool = False
    """Memory, processes and files of a sandbox have limits, and a program that exceeds them is refused or killed."""
    limit_vcpus: bool = False
    """The processors of a sandbox can be limited (`SandboxLimits`)."""
    limit_memory: bool = False
    limit_disk: bool = False
    kernel_private: bool = False
    """Sandboxes run under kernels of their own: there are machines besides the host."""

    def names(self) -> tuple[str, ...]:
        """The names of those that this backend has."""
        return tuple(name for name in self.__struct_fields__ if getattr(self, name))

    def missing(self, demanded: Iterable[str]) -> list[str]:
        """Demanded names that this backend lacks, unknown ones included, sorted."""
        return sorted(set(demanded) - set(self.names()))


def demands(request: Acquire) -> set[str]:
    """Names of the capabilities that a request needs."""
    wanted = set(request.requires) | request.limits.needs()
    if request.lane == "production":
        wanted.add("isolated")
    if request.hostname:
        wanted.add("hostname")
    if request.network:
        wanted.add("network_list")
    if request.harness:
        wanted.add("harness")
    return wanted


class Machine(Protocol):
    """A running machine with `slots` separate workspaces."""

    slots: int
    limit_bytes: int
    """Capacity of a slot's workspace; larger frames are refused before they are sent."""

    @property
    def lost(self) -> "asyncio.Future[str]":
        """Done, with the reason, once the machine is gone."""

    async def open(self, slot: int) -> Channel:
        """The channel of a slot, ready for its open frame. SandboxLost."""

    async def ready(self) -> None:
        """Wait until the machine has set its clock and entropy. First calls to its slots may be sent meanwhile: the
        guest reads them afterwards. SandboxLost."""

    async def name(self, slot: int, hostname: str) -> None:
        """Set the host name of a slot. SandboxLost; VmhostError where the backend lacks ``hostname``."""

    async def check_integrity(self, thorough: bool) -> tuple[str, ...]:
        """Changes in this machine that no legitimate work makes (see `CheckIntegrity`).
        SandboxLost; VmhostError where it cannot be checked."""

    async def changes(self, limit: int, originals: int) -> tuple[dict[str, Any], list[bytes], str]:
        """The changes of a sandbox in its image (see `PullChanges`): the answer of guest/changes.py, and the image's
        working directory. SandboxLost; VmhostError where there is no image, or the backend lacks ``upper_diff``."""

    async def blame(self, channel: Channel, alone: bool) -> str:
        """A sandbox's channel has ended, and the host did not end it. Why its own programs are the cause, in one
        sentence; empty where it was, or may have been, the host. alone: whether it was the machine's only sandbox."""

    def leave(self, channel: Channel) -> None:
        """A slot was released and the machine continues: end the slot's processes at the lowest cost."""

    def cpu_ms(self) -> float:
        """CPU time that it has used so far; 0 where that is not measured, or once it is gone."""

    def kill(self) -> None:
        """End the machine now. Idempotent."""


@runtime_checkable
class Described(Protocol):
    """A machine that can tell what it was made of. Without it no verdict of one attempt counts for another."""

    made_of: str
    """Content address of all that its programs can read when it starts: the template or image, and the agent."""


MakeMachine = Callable[[], Awaitable[Machine]]


class Requirement(msgspec.Struct, frozen=True):
    """One requirement of a backend, and whether this machine meets it."""

    key: str
    """The key of the [environment] section that states it; empty for the section itself."""
    met: bool
    text: str
    """One sentence. When the requirement is not met: what is wrong, what was expected, what to do."""


@runtime_checkable
class Demanding(Protocol):
    """A backend that declares what it needs of a machine; a backend without this method needs nothing."""

    @classmethod
    def requirements(cls, environment: Environment) -> Iterator[Requirement]:
        """The needs of the backend on this machine; `headrace check` calls this without a backend."""


class Backend(Protocol):
    """Makes machines. Registered under `headrace.sandboxes` (see backends/registry.py)."""

    capabilities: ClassVar[Capabilities]
    name: str
    slots: int
    """Slots of a machine in group isolation."""

    @classmethod
    async def open(cls, environment: Environment, on_event: OnEvent) -> "Backend":
        """A backend that is ready to make machines. VmhostError with one sentence where it cannot work."""

    def slots_of(self, template: str) -> int:
        """Slots of a machine of this template in group isolation. VmhostError for an unknown template."""

    async def machine(self, template: str, limits: SandboxLimits) -> Machine:
        """A fresh machine of a template, within limits whose capabilities the backend declares; it answers once it is
        `ready`. Consumes one reservation. SandboxLost when it did not start, VmhostError when it never will."""

    async def fork(self, machine: Machine) -> MakeMachine:
        """Stop a machine for a moment; the result makes copies that continue from there, each consuming one
        reservation. SandboxLost, VmhostError."""

    def with_harness(self, template: str, bundle: Bundle) -> tuple[str, str]:
        """The template with a harness's bundle mounted, and the folder in which it is. Blocks while the bundle is made
        ready for its first sandbox. VmhostError where it cannot be mounted."""

    def shortage(self, template: str, limits: SandboxLimits) -> str:
        """Why the node cannot hold another such machine now; empty when it can. Changes nothing. VmhostError for limits
        that it can never meet."""

    def reserve(self, template: str, limits: SandboxLimits) -> None:
        """Count one such machine as present until `machine` or a maker starts it."""

    def free_idle(self, template: str, limits: SandboxLimits) -> None:
        """End machines that wait unused, if their memory is needed for this template. It is free a moment later."""

    def busy(self) -> str:
        """Why no machine that can wait should start now; empty when it may."""

    def facts(self) -> dict[str, Any]:
        """Description of this backend for reports."""

    def cpu_ms(self) -> float:
        """CPU time that its machines have used so far, ended ones included."""

    async def settle(self) -> None:
        """Wait until every machine that was ended is gone."""

    async def close(self) -> None:
        """End every machine and release all resources."""
