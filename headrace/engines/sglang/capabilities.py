"""Decides from a server's own description whether this client can use it, and names each capability that is missing.

Idea: SGLang changes its interface between releases, and it ignores unknown keys of a request. So a version number says
little, and an error would appear late. The server describes itself in /openapi.json: its paths and the fields of their
requests. This module compares them with the requests that the client sends. The same list is compared with the source
of released packages (`source`), which gives the range of releases in `versions`.

A description does not contain replies. The first turn after a server's start is a probe for them (`server.lifecycle`).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec


class Need(NamedTuple):
    """A path and the fields of its request that one capability needs."""

    capability: str
    path: str
    fields: tuple[str, ...] = ()


REQUIRED = (
    Need(
        "turns by token ids",
        "/generate",
        ("rid", "input_ids", "sampling_params", "return_logprob", "logprob_start_len", "stream"),
    ),
    Need("prefix caches by version", "/generate", ("cache_salt",)),
    Need("aborts", "/abort_request", ("rid",)),
    Need("pauses in place", "/pause_generation", ("mode",)),
    Need("pauses in place", "/continue_generation", ("torch_empty_cache",)),
    Need(
        "weights from disk",
        "/update_weights_from_disk",
        ("model_path", "weight_version", "flush_cache", "abort_all_requests", "torch_empty_cache"),
    ),
    Need("checksums", "/weights_checker", ("action",)),
    Need("the served version", "/model_info"),
    Need("load figures", "/v1/loads"),
    Need("liveness", "/ping"),
)
"""Without one of these a server is refused."""
REPLAY = (Need("router replay", "/generate", ("return_routed_experts", "routed_experts_start_len")),)
"""Without it a server is refused for a mixture."""
PRIORITIES = (Need("priorities", "/generate", ("priority",)),)
TENSORS = (
    Need(
        "weights as tensors",
        "/update_weights_from_tensor",
        ("serialized_named_tensors", "load_format", "flush_cache", "weight_version"),
    ),
)
SESSION = (Need("update sessions", "/begin_weight_update"), Need("update sessions", "/end_weight_update"))
"""The second version of the weights interface: an update by tensors is refused outside a session."""

Fields = Callable[[str], frozenset[str] | None]
"""The fields of a path's request; None when there is no such path."""


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """The optional capabilities of a server that has the required ones."""

    priorities: bool = True
    tensors: bool = True
    session: bool = True


def described(openapi: Mapping[str, Any]) -> Fields:
    """The fields by path in a reply of GET /openapi.json."""
    paths: Mapping[str, Any] = openapi.get("paths") or {}
    schemas: Mapping[str, Any] = (openapi.get("components") or {}).get("schemas") or {}

    def properties(schema: Mapping[str, Any]) -> frozenset[str]:
        name = str(schema.get("$ref", "")).rpartition("/")[2]
        inner = schemas.get(name, {}) if name else schema
        below = [part for key in ("anyOf", "allOf", "oneOf") for part in inner.get(key, ())]
        return frozenset(inner.get("properties", ())).union(*(properties(part) for part in below))

    def fields(path: str) -> frozenset[str] | None:
        if path not in paths:
            return None
        kinds = [kind for kind in paths[path].values() if isinstance(kind, Mapping)]
        bodies = [kind.get("requestBody", {}).get("content", {}).get("application/json", {}) for kind in kinds]
        return frozenset().union(*(properties(body.get("schema", {})) for body in bodies))

    return fields


def missing(needs: tuple[Need, ...], fields: Fields) -> list[str]:
    """A text for each need that is not met, such as "router replay needs routed_experts_start_len of /generate"."""
    out = []
    for need in needs:
        present = fields(need.path)
        if present is None:
            out.append(f"{need.capability} needs {need.path}")
        elif lost := [field for field in need.fields if field not in present]:
            out.append(f"{need.capability} needs {', '.join(lost)} of {need.path}")
    return out


def decide(fields: Fields, *, mixture: bool) -> tuple[Capabilities, list[str]]:
    """The optional capabilities, and the reasons for which the server cannot be used (empty for a usable one)."""
    lost = missing(REQUIRED + (REPLAY if mixture else ()), fields)
    tensors = not missing(TENSORS, fields)
    return Capabilities(
        priorities=not missing(PRIORITIES, fields),
        tensors=tensors,
        session=not missing(SESSION, fields),
    ), lost
