"""What a backend offers the pool: machines with slots. A slot is used once; a machine is killed, never cleaned."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from headrace.vmhost.channel import Channel

if TYPE_CHECKING:
    from headrace.vmhost.snapshot import Snapshot
    from headrace.vmhost.template import Template

OnEvent = Callable[[str, str, dict[str, Any]], None]
"""Hears what an operator should know: kind, sentence, figures."""


class Machine(Protocol):
    """A running place with `slots` separate workspaces."""

    slots: int
    limit_bytes: int
    """What a slot's workspace holds: larger frames are not even sent."""

    @property
    def lost(self) -> "asyncio.Future[str]":
        """Done, with the reason, once the machine is gone."""

    async def open(self, slot: int) -> Channel:
        """The channel of a slot, ready for its open frame."""

    async def ready(self) -> None:
        """Wait until the machine has a clock and entropy of its own: beside the first calls to its slots, which the
        guest does not take earlier. SandboxLost."""

    async def name(self, slot: int, hostname: str) -> None:
        """Let a slot call itself so. VmhostError where that can't be had."""

    async def inspect(self, thorough: bool) -> tuple[str, ...]:
        """What was touched here that nothing honest writes (messages/sandbox.py: Inspect). SandboxLost; VmhostError
        where that can't be told."""

    def leave(self, channel: Channel) -> None:
        """A slot's user is gone while the machine goes on: quiet the slot as cheaply as can be."""

    def kill(self) -> None:
        """End it now. Idempotent."""


class Backend(Protocol):
    """Makes machines."""

    name: str
    slots: int
    """Slots of a machine in group isolation."""

    def slots_of(self, template: str) -> int:
        """Slots of a machine of this template in group isolation. VmhostError for one that is not known."""

    async def machine(self, template: str) -> Machine:
        """A fresh machine from a template, to be asked when it is `ready`. SandboxLost when it did not come up,
        VmhostError when it never will."""

    async def template(self, name: str) -> "Template":
        """A template, made where it is missing. VmhostError."""

    async def again(self, template: "Template", begin: "Snapshot") -> Machine:
        """A machine that begins at a snapshot of another of that template. SandboxLost, VmhostError."""

    def short_of(self, template: str) -> str:
        """Of what the node has too little for another machine now; empty when it has enough. Machines that end may
        change that."""

    def busy(self) -> str:
        """Why no machine should start that can wait; empty when it may."""

    def facts(self) -> dict[str, Any]:
        """What this backend is, for reports."""

    def cpu_ms(self) -> float:
        """CPU time that its machines have used so far, the ended ones included."""

    async def settle(self) -> None:
        """Wait for machines that were ended to be gone."""

    async def close(self) -> None:
        """End every machine and everything beside them."""
