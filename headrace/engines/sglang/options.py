"""The `[engine.options]` of the SGLang engine. Imports no torch."""

from typing import Literal

from headrace.engines.server.options import ServerOptions


class SglangOptions(ServerOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`ServerOptions`, and how a version comes into a server."""

    weights: Literal["disk", "tensor", "auto"] = "disk"
    """disk: as the staged file, which is also the fallback of tensor. tensor: in shared memory of this machine. auto:
    tensor for a server on a CPU that headrace starts, otherwise disk."""
