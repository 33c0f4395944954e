"""SGLang as a `server.backend.Backend`: its command line, endpoints, requests and checksums.

What a server says about itself is checked before it is used: /server_info has its settings, /openapi.json its paths and
the fields of their requests (`capabilities`). SGLang changes them between releases, and a difference would show as a
wrong number much later. The version number decides nothing; a release that was not measured is named in the log.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from headrace.engines.base import EngineError
from headrace.engines.server.backend import (
    UPDATE_S,
    Ask,
    Attempt,
    Command,
    IncompatibleServer,
    Load,
    Requests,
    Terms,
    Way,
)
from headrace.engines.server.http import LARGE, ServerError, Wire
from headrace.engines.server.weights.checksums import Digest, label, sha256
from headrace.engines.server.weights.staging import ADAPTER
from headrace.engines.sglang import capabilities, cuda_digest, metrics, versions
from headrace.engines.sglang.options import SglangOptions
from headrace.engines.sglang.reply import body, read
from headrace.engines.sglang.transport import Transport
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
ALWAYS = (
    *("--enable-metrics", "--skip-server-warmup", "--decode-log-interval", "10"),
    *("--enable-priority-scheduling", "--default-priority-value", "0", "--retraction-policy", "priority"),
)
"""The server reports its requests by priority every ten steps; where capacity is short, it retracts training requests
first."""
CPU = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-overlap-schedule", "--mem-fraction-static", "0.05", "--max-total-tokens", "65536"),
)
"""Arguments with which the server runs without a GPU (docs/sglang.md)."""
BARE = "without an adapter"
"""The version of a server that has loaded none yet."""
NO_DUMPS = {"SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0", "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0"}
"""By default a server whose scheduler died stays for 65 s to write dumps, while turns wait; this disables the dumps."""


def arguments() -> list[str]:
    """The server's arguments in tests and benchmarks: HEADRACE_SGLANG_ARGS where it is set (on a machine with a GPU),
    else `CPU`."""
    return shlex.split(os.environ["HEADRACE_SGLANG_ARGS"]) if "HEADRACE_SGLANG_ARGS" in os.environ else list(CPU)


_log = logging.getLogger("headrace.engines.sglang")


class Sglang:
    """One SGLang server."""

    name = "SGLang"

    def __init__(
        self, config: PolicyConfig, options: SglangOptions, wire: Wire, folder: Path, most: int | None = None
    ) -> None:
        """folder: of the staged checkpoint. most: largest number of requests of a server that is started."""
        self._config, self._options, self.wire, self._most = config, options, wire, most
        self._transport = Transport(wire, options.weights, folder, started=bool(options.python))
        self.ways: Sequence[Way] = () if config.adapter else (self._transport,)
        self._adapter = ""
        """The name of the adapter that was loaded last."""
        self._seeded = self._priorities = False

    def command(self, folder: Path, label: str, port: int) -> Command:
        """The start of a server with a checkpoint folder."""
        adapter = self._config.adapter
        version = BARE if adapter else label
        argv = ["-m", "sglang.launch_server", "--model-path", str(folder), "--weight-version", version]
        argv += ["--host", "127.0.0.1", "--port", str(port), *ALWAYS, "--dtype", self._config.dtype]
        argv += ["--max-running-requests", str(self._most)] if self._most else []
        argv += ["--enable-return-routed-experts"] if self._config.experts else []
        if adapter:
            argv += [
                "--enable-lora",
                "--max-lora-rank",
                str(adapter.rank),
                "--max-loaded-loras",
                "2",
                "--max-loras-per-batch",
                "2",
            ]
            argv += ["--lora-target-modules", *adapter.targets]
            argv += ["--lora-backend", "torch_native"] if "cpu" in self._options.args else []
        argv += self._options.args
        # One thread by default: on cores that other processes use, threads would spend most of the time spinning.
        cpu = {"OMP_NUM_THREADS": "1"} if "cpu" in self._options.args else {}
        forced = {"DISABLE_OPENAPI_DOC": "0"}  # the client reads the description
        if cpu:
            forced["SGLANG_USE_CPU_ENGINE"] = "1"
        return Command(argv, NO_DUMPS | cpu, forced)

    async def describe(self) -> Terms:
        """The settings in the replies of GET /server_info and GET /openapi.json."""
        info = await self.wire.get("/server_info", 10.0)
        try:
            return self._terms(info, await self.wire.get("/openapi.json", 60.0))
        except ServerError as error:
            if error.status in (404, 405):
                raise IncompatibleServer(
                    f"{self.wire.url} has no /openapi.json: start the server without DISABLE_OPENAPI_DOC"
                ) from None
            raise

    def _terms(self, info: Mapping[str, Any], openapi: Mapping[str, Any]) -> Terms:
        """IncompatibleServer when this client cannot use the server."""
        version = str(info.get("version", "unknown"))
        if info.get("frontend") != "python":
            raise IncompatibleServer(
                f"the server's front end is {info.get('frontend')!r}, which has neither pauses nor routed experts; "
                "start it without SGLANG_RUST_SERVER"
            )
        able, lost = capabilities.decide(capabilities.described(openapi), mixture=bool(self._config.experts))
        if lost:
            raise IncompatibleServer(
                f"the server (SGLang {version}) cannot be used: {'; '.join(lost)}; install SGLang "
                f"{versions.VERIFIED[-1]} (deploy/sglang/requirements.txt)"
            )
        if self._config.experts and not info.get("enable_return_routed_experts"):
            raise IncompatibleServer(
                "a mixture needs routed experts: start the server with --enable-return-routed-experts"
            )
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
        if dtype == "auto" and self._config.dtype == "float32":
            raise IncompatibleServer(
                "SGLang serves a float32 policy in float16 unless told: start it with --dtype float32 or bfloat16"
            )
        device = str(info.get("device", "unknown"))
        if version not in versions.MEASURED:
            _log.warning("%s; it has what this client asks for, so it is used", versions.said(version))
        self._transport.check(able)
        self._seeded = bool(info.get("enable_deterministic_inference"))
        self._priorities = (
            able.priorities and bool(info.get("enable_priority_scheduling")) and info.get("default_priority_value") == 0
        )
        said = "\0".join(f"{key}={info.get(key)}" for key in ARITHMETIC)
        return Terms(
            version=version,
            device=device,
            dtype=self._config.dtype if dtype == "auto" else {"half": "float16", "float": "float32"}.get(dtype, dtype),
            tp_size=int(info.get("tp_size") or 1),
            ep_size=int(info.get("ep_size") or 1),
            context=int(info.get("context_length") or 0),
            fingerprint=f"sglang-{hashlib.blake2b(said.encode(), digest_size=8).hexdigest()}",
        )

    async def ping(self, timeout_s: float) -> None:
        """/health answers 503 while weights change."""
        await self.wire.get("/ping", timeout_s)

    async def load(self, timeout_s: float) -> Load:
        """The figures in the reply of GET /v1/loads."""
        return load_of(await self.wire.get("/v1/loads?include=core", timeout_s))

    async def outside(self) -> Requests | None:
        """None without priority scheduling. ServerError also of a server without --enable-metrics."""
        return metrics.outside(await self.wire.text("/metrics", 5.0)) if self._priorities else None

    async def generate(self, ask: Ask, heard: Callable[[Sequence[int]], None]) -> Attempt:
        """Every event repeats all earlier content, so the last one is the whole reply. It is read in a thread when it
        has many routes, so that the event loop serves other turns meanwhile."""
        priority = metrics.PRIORITY[ask.lane] if self._priorities else None
        asked = body(ask, sparse=bool(self._config.experts), seeded=self._seeded, priority=priority)
        if self._adapter:
            asked["lora_path"] = self._adapter
        last: Mapping[str, Any] = {}
        async for event in self.wire.events("/generate", asked):
            last = event
            heard(event.get("output_ids") or ())
        meta = last.get("meta_info")
        coded = meta.get("routed_experts") if isinstance(meta, Mapping) else None
        if len(coded or "") >= LARGE:
            return await asyncio.to_thread(read, last, ask, self._config)
        return read(last, ask, self._config)

    async def abort(self, rid: str, timeout_s: float) -> Any:
        """End a request."""
        return await self.wire.post("/abort_request", {"rid": rid}, timeout_s)

    async def pause(self) -> None:
        """Pause in place."""
        await self.wire.post("/pause_generation", {"mode": "in_place"})

    async def resume(self) -> None:
        """Continue."""
        await self.wire.post("/continue_generation", {"torch_empty_cache": False})

    async def served(self) -> str:
        """The weight version of /model_info."""
        return str((await self.wire.get("/model_info")).get("weight_version"))

    async def load_folder(self, folder: Path, label: str) -> None:
        """With the default of flush_cache, an update under running requests answers 400 although it happened. Of a
        policy with adapters a version's is loaded, under its label."""
        if self._config.adapter:
            for old in {self._adapter, label} - {""}:  # a server that was started again has neither
                with contextlib.suppress(ServerError):
                    await self.wire.post("/unload_lora_adapter", {"lora_name": old}, UPDATE_S)
            named = {"lora_name": label, "lora_path": str(folder / ADAPTER)}
            answer = await self.wire.post("/load_lora_adapter", named, UPDATE_S)
            if answer.get("success") is not True:
                raise EngineError(f"the server could not load the adapter {label}: {answer.get('error_message')}")
            await self.wire.post("/update_weight_version", {"new_version": label, "abort_all_requests": False})
            self._adapter = label
            return
        asked = {
            "model_path": str(folder),
            "weight_version": label,
            "flush_cache": False,
            "abort_all_requests": False,
            "torch_empty_cache": False,
        }
        answer = await self.wire.post("/update_weights_from_disk", asked, UPDATE_S)
        if answer.get("success") is not True:
            raise EngineError(f"the server could not load {label}: {answer.get('message')}")

    def digest(self, device: str, largest: int) -> Digest | None:
        """The function of 0.5.23, on the CPU or on a GPU that can hash its largest tensor."""
        if device == "cpu":
            return digest
        return cuda_digest.digest if device == "cuda" and largest <= cuda_digest.MOST_BYTES else None

    async def checksums(self, ranks: int) -> dict[str, str]:
        """The checksums in an answer of /weights_checker."""
        answer = await self.wire.post("/weights_checker", {"action": "checksum"}, UPDATE_S)
        out: dict[str, str] = {}
        try:
            for part in answer["ranks"]:
                place = part["parallelism_info"][0]["tp_rank"] if ranks > 1 else 0
                out |= {label(name, place, ranks): value for name, value in part["checksums"].items()}
            if len(answer["ranks"]) != ranks:
                raise ValueError(f"expected {ranks} ranks, got {len(answer['ranks'])}")
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise EngineError(f"/weights_checker answered without the server's checksums: {error}") from None
        return out


def digest(*parts: Tensor) -> str:
    """The checksum of a tensor on the CPU: the first eight bytes of SHA-256 over its bits."""
    return sha256(*parts)[:16]


def load_of(reply: Mapping[str, Any]) -> Load:
    """The figures in the reply of GET /v1/loads."""
    ranks = [rank for rank in reply.get("loads", ()) if isinstance(rank, Mapping)]

    def figures(key: str) -> list[float]:
        return [float(rank.get(key) or 0.0) for rank in ranks] or [0.0]

    return Load(
        running=int(sum(figures("num_running_reqs"))),
        waiting=int(sum(figures("num_waiting_reqs"))),
        usage=max(figures("token_usage")),
        tokens_per_s=sum(figures("gen_throughput")),
        hit_rate=max(figures("cache_hit_rate")),
    )
