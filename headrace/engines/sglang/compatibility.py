"""Checks the reply of a server's /server_info before the server is used, and refuses an incompatible server.

SGLang changes its endpoints between releases. This client was measured with the releases in `VERSIONS` and refuses
others, because a difference in them would show as a wrong number much later.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.engines.base import UnusableEngine
from headrace.engines.sglang.versions import VERSIONS
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
    fingerprint: str
    """Never equal to the trainer's, because another program computes the model."""


def terms(info: Mapping[str, Any], config: PolicyConfig) -> Terms:
    """The settings in a reply of GET /server_info. IncompatibleServer when this client cannot use the server."""
    version = str(info.get("version", "unknown"))
    if version not in VERSIONS:
        raise IncompatibleServer(
            f"the server is SGLang {version}, expected {' or '.join(VERSIONS)}: install that one "
            "(deploy/sglang/requirements.txt), or run `make test-sglang` on yours and add it to VERSIONS"
        )
    if info.get("frontend") != "python":
        raise IncompatibleServer(
            f"the server's front end is {info.get('frontend')!r}, which has neither pauses nor routed experts; start "
            "it without SGLANG_RUST_SERVER"
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
    said = "\0".join(f"{key}={info.get(key)}" for key in ARITHMETIC)
    return Terms(
        version=version,
        device=device,
        dtype=config.dtype if dtype == "auto" else {"half": "float16", "float": "float32"}.get(dtype, dtype),
        tp_size=int(info.get("tp_size") or 1),
        ep_size=int(info.get("ep_size") or 1),
        context=int(info.get("context_length") or 0),
        deterministic=bool(info.get("enable_deterministic_inference")),
        priorities=bool(info.get("enable_priority_scheduling")) and info.get("default_priority_value") == 0,
        loader=LOADER in (info.get("custom_weight_loader") or ()),
        fingerprint=f"sglang-{hashlib.blake2b(said.encode(), digest_size=8).hexdigest()}",
    )
