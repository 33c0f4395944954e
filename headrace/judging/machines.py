"""The sources of the judge's sandboxes: the actors of the bus, or a host in this process."""

from typing import Protocol, TypeVar

from headrace.messages.plugins import Plugin
from headrace.messages.sandbox import Acquire, Sandbox


class Examined(Sandbox, Protocol):
    """A sandbox that names its backend where that comes from outside of headrace."""

    @property
    def backend(self) -> str:
        """The backend's name."""

    @property
    def machine(self) -> str:
        """Content address of what its machine was made of; empty where the backend cannot tell."""

    @property
    def plugins(self) -> tuple[Plugin, ...]:
        """That backend; empty for headrace's own."""


S = TypeVar("S", bound=Examined)


class Machines(Protocol[S]):
    """A source of fresh sandboxes; `sandboxes.client.Sandboxes` is one."""

    async def acquire(self, request: Acquire, /) -> S:
        """A fresh sandbox. SandboxLost, NoCapacity."""

    def give_back(self, sandbox: S, /) -> None:
        """Release it; returns at once."""


class Named(Examined, Protocol):
    """A sandbox of a host."""

    @property
    def id(self) -> str:
        """Its name on the host."""


class Host(Protocol):
    """The part of `vmhost.node.host.Host` that `HostMachines` needs."""

    async def acquire(self, request: Acquire, /) -> Named:
        """A fresh sandbox. SandboxLost, NoCapacity."""

    def release(self, id: str, /) -> None:
        """End it."""


class HostMachines:
    """A host of this process as a source of sandboxes: for re-judging, and for scripts without a bus."""

    def __init__(self, host: Host) -> None:
        self._host = host

    async def acquire(self, request: Acquire, /) -> Named:
        """A fresh sandbox."""
        return await self._host.acquire(request)

    def give_back(self, sandbox: Named, /) -> None:
        """Release it."""
        self._host.release(sandbox.id)
