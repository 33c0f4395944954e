"""The refusals of a backend that lacks a capability, the same for every backend."""

from typing import NoReturn

from headrace.vmhost.backend import Machine, MakeMachine
from headrace.vmhost.errors import VmhostError


def lacks(backend: str, capability: str) -> NoReturn:
    """VmhostError that names the backend and the capability."""
    raise VmhostError(
        f"the {backend} backend lacks the capability {capability}; use a backend that has it, such as qemu"
    )


class WithoutCopies:
    """The part of a `Backend` whose machines cannot be copied."""

    name: str

    async def fork(self, machine: Machine) -> MakeMachine:
        """VmhostError."""
        lacks(self.name, "fork")
