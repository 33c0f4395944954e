"""Checks what a server says about itself before the server is used, and refuses an incompatible server.

/server_info has its settings, /openapi.json its paths and the fields of their requests (`probes.capabilities`). SGLang
changes them between releases, and a difference would show as a wrong number much later. The version number decides
nothing; a release that was not measured is named in the log.
"""

import hashlib
import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.engines.base import UnusableEngine
from headrace.engines.sglang.probes import capabilities, versions
from headrace.engines.sglang.weights.sparse import LOADER
from headrace.policy.config import PolicyConfig

ARITHMETIC = (
    "version",
    "device",
    "dtype",
    "attention_backend",
    "sampling_backend",
    "moe_runner_backend",
    "kv_cache_dtype",
    "quantization",
    "enable_fp32_lm_head",
    "tp_size",
    "ep_size",
    "enable_deterministic_inference",
    "rl_on_policy_target",
)
"""The reported settings that determine the bits of the server's results."""


_log = logging.getLogger("headrace.engines.sglang")


class IncompatibleServer(UnusableEngine):
    """A server that this client cannot use; the text says what to change."""


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that a server reports."""

    version: str
    device: str
    dtype: str
    tp_size: int
    ep_size: int
    context: int
    """Largest number of positions of prompt and reply together; 0 when the server does not report it."""
    deterministic: bool
    priorities: bool
    """Requests are scheduled and counted by priority."""
    loader: bool
    """Whether the server has headrace's loader; a request for an unknown loader would end the server."""
    tensors: bool
    """The server takes weights as tensors."""
    session: bool
    """Such an update needs a session around it."""
    fingerprint: str
    """Never equal to the trainer's, because another program computes the model."""


def terms(info: Mapping[str, Any], openapi: Mapping[str, Any], config: PolicyConfig) -> Terms:
    """The settings in the replies of GET /server_info and GET /openapi.json. IncompatibleServer when this client cannot
    use the server."""
    version = str(info.get("version", "unknown"))
    if info.get("frontend") != "python":
        raise IncompatibleServer(
            f"the server's front end is {info.get('frontend')!r}, which has neither pauses nor routed experts; start "
            "it without SGLANG_RUST_SERVER"
        )
    able, lost = capabilities.decide(capabilities.described(openapi), mixture=bool(config.experts))
    if lost:
        raise IncompatibleServer(
            f"the server (SGLang {version}) cannot be used: {'; '.join(lost)}; install SGLang {versions.VERIFIED[-1]} "
            "(deploy/sglang/requirements.txt)"
        )
    if config.experts and not info.get("enable_return_routed_experts"):
        raise IncompatibleServer("a mixture needs routed experts: start the server with --enable-return-routed-experts")
    if info.get("incremental_streaming_output"):
        raise IncompatibleServer(
            "start the server without --incremental-streaming-output: each event must hold the whole reply"
        )
    if int(info.get("dp_size") or 1) > 1:
        raise IncompatibleServer(
            "start one server per data-parallel rank (--dp-size 1): pauses and weights are per server"
        )
    if info.get("speculative_algorithm"):
        raise IncompatibleServer(
            "start the server without speculative decoding: its effect on recorded routes was not measured"
        )
    dtype = str(info.get("dtype") or "auto")
    if dtype == "auto" and config.dtype == "float32":
        raise IncompatibleServer(
            "SGLang serves a float32 policy in float16 unless told: start it with --dtype float32 or bfloat16"
        )
    device = str(info.get("device", "unknown"))
    if version not in versions.MEASURED:
        _log.warning("%s; it has what this client asks for, so it is used", versions.said(version))
    said = "\0".join(f"{key}={info.get(key)}" for key in ARITHMETIC)
    return Terms(
        version=version,
        device=device,
        dtype=config.dtype if dtype == "auto" else {"half": "float16", "float": "float32"}.get(dtype, dtype),
        tp_size=int(info.get("tp_size") or 1),
        ep_size=int(info.get("ep_size") or 1),
        context=int(info.get("context_length") or 0),
        deterministic=bool(info.get("enable_deterministic_inference")),
        priorities=able.priorities
        and bool(info.get("enable_priority_scheduling"))
        and info.get("default_priority_value") == 0,
        loader=LOADER in (info.get("custom_weight_loader") or ()),
        tensors=able.tensors,
        session=able.session,
        fingerprint=f"sglang-{hashlib.blake2b(said.encode(), digest_size=8).hexdigest()}",
    )
