"""vLLM as a `server.backend.Backend`: its command line, endpoints, requests and checksums.

Idea: the token endpoint (/inference/v1/generate) takes and returns ids, log-probabilities, routed experts and the
version that sampled each token; the development endpoints pause the scheduler with its requests kept, load a folder in
place, and hash every parameter. Both have to be switched on, which `command` does and `describe` checks.

Traps: an id outside the vocabulary ends the server, unless it loads a tokenizer. It knows a request by another id than
it is given (`PREFIX`). It ignores an unknown key. A log-probability that is not finite is sent as -9999. On a CPU the
weights of linear layers are packed and their parameters left empty, so that their checksums say nothing.
"""

import asyncio
import base64
import contextlib
import hashlib
import io
import logging
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.engines.base import EngineError
from headrace.engines.server.backend import (
    UPDATE_S,
    Ask,
    Attempt,
    Command,
    IncompatibleServer,
    Load,
    Requests,
    Stretch,
    Terms,
    Way,
)
from headrace.engines.server.http import LARGE, ServerError, Wire
from headrace.engines.server.options import ServerOptions
from headrace.engines.server.reply import checked, garbled
from headrace.engines.server.weights.checksums import Digest, sha256
from headrace.engines.server.weights.checksums import label as rank_label
from headrace.engines.server.weights.staging import ADAPTER
from headrace.messages.rollout import Lane
from headrace.policy.config import PolicyConfig

MEASURED = ("0.32.0",)
"""The tests of the real server ran with these releases."""
GENERATE = "/inference/v1/generate"
PREFIX = "generate-tokens-"
"""The server's prefix of a request's id."""
NEEDED = {
    GENERATE: "--enable-scale-out",
    **dict.fromkeys(
        ("/pause", "/resume", "/abort_requests", "/collective_rpc", "/update_weight_version", "/weight_info"),
        "VLLM_SERVER_DEV_MODE=1",
    ),
}
"""The endpoints of a usable server, and what switches them on."""
LOADS = dict.fromkeys(
    ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
)
"""Those for a policy with adapters."""
PRIORITY: Mapping[Lane, int] = {"production": -1, "eval": 100, "train": 100}
"""Lane to priority, the lowest first. Requests of other clients have 0."""
LOWEST = -9999.0
"""The server's figure for a log-probability that is not finite."""
EMPTY = hashlib.sha256().hexdigest()
"""The checksum of a parameter that was packed away."""
ALWAYS = (
    *("--enable-scale-out", "--enable-prefix-caching", "--logprobs-mode", "processed_logprobs"),
    *("--generation-config", "vllm", "--scheduling-policy", "priority"),
    *("--served-model-name", "policy"),
)
"""The log-probabilities are those of the sampled distribution, and nothing of the model's folder changes it."""
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
CPU = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
"""Where this process has none of them, the server takes one thread and 1 GiB for keys and values on a CPU. Other builds
do not read them, except that the number of threads."""
_GAUGE = re.compile(r"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc)\{[^}]*\} (\S+)$", re.M)
_log = logging.getLogger("headrace.engines.vllm")


class Vllm:
    """One vLLM server."""

    name = "vLLM"
    ways: Sequence[Way] = ()

    def __init__(self, config: PolicyConfig, options: ServerOptions, wire: Wire, most: int | None = None) -> None:
        """most: largest number of requests of a server that is started."""
        self._config, self._options, self.wire, self._most = config, options, wire, most
        self._priorities = False
        self._model = "policy"
        """The name of requests' model: the checkpoint, or the adapter that was loaded last."""

    def command(self, folder: Path, label: str, port: int) -> Command:
        """The start of a server with a checkpoint folder. It cannot be told the version's label, so the first version
        is loaded once more."""
        argv = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--host", "127.0.0.1"]
        argv += ["--port", str(port), *ALWAYS, "--dtype", self._config.dtype]
        argv += [] if (folder / "tokenizer.json").exists() else ["--skip-tokenizer-init"]  # grammars read it
        argv += ["--max-num-seqs", str(self._most)] if self._most else []
        argv += ["--enable-return-routed-experts"] if self._config.experts else []
        forced = {"VLLM_SERVER_DEV_MODE": "1"}
        if self._config.adapter:
            argv += ["--enable-lora", "--max-lora-rank", str(rank_above(self._config.adapter.rank))]
            forced["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        return Command([*argv, *self._options.args], ENVIRONMENT | CPU, forced)

    async def describe(self) -> Terms:
        """The settings in the replies of /version, /server_info and /openapi.json."""
        await self.wire.get("/health", 10.0)  # refused while a server ends whose scheduler died
        version = str((await self.wire.get("/version", 10.0)).get("version", "unknown"))
        described = await self.wire.get("/openapi.json", 60.0)
        needed = NEEDED | (LOADS if self._config.adapter else {})
        lost = {by: path for path, by in needed.items() if path not in (described.get("paths") or {})}
        for by, path in lost.items():
            raise IncompatibleServer(f"the server (vLLM {version}) has no {path}: start it with {by}")
        info = (await self.wire.get("/server_info?config_format=json", 60.0)).get("vllm_config")
        if not isinstance(info, Mapping):
            raise IncompatibleServer(f"the server (vLLM {version}) does not report its settings")
        if version not in MEASURED:
            _log.warning("vLLM %s was not run here (measured: %s)", version, ", ".join(MEASURED))
        return self._terms(version, info)

    def _terms(self, version: str, info: Mapping[str, Any]) -> Terms:
        """IncompatibleServer when this client cannot use the server."""
        model, parallel = info["model_config"], info["parallel_config"]
        wrong = {
            "--logprobs-mode processed_logprobs": model.get("logprobs_mode") != "processed_logprobs",
            "--generation-config vllm": model.get("generation_config") != "vllm",
            "--data-parallel-size 1, one server per rank": int(parallel.get("data_parallel_size") or 1) > 1,
            "no speculative decoding, which changed what is sampled where it was measured": info.get(
                "speculative_config"
            ),
            "--enable-return-routed-experts, which a mixture needs": bool(self._config.experts)
            and not (info.get("aux_output_config") or {}).get("enable_return_routed_experts"),
        }
        for fix, holds in wrong.items():
            if holds:
                raise IncompatibleServer(f"start the server with {fix}")
        self._priorities = (info.get("scheduler_config") or {}).get("policy") == "priority"
        device = str((info.get("device_config") or {}).get("device_type") or "cpu").partition(":")[0]
        dtype = str(model.get("dtype", "")).removeprefix("torch.")
        said = (version, device, dtype, parallel.get("tensor_parallel_size"), model.get("quantization"))
        return Terms(
            version=version,
            device=device,
            dtype=dtype,
            tp_size=int(parallel.get("tensor_parallel_size") or 1),
            context=int(model.get("max_model_len") or 0),
            fingerprint=f"vllm-{hashlib.blake2b(repr(said).encode(), digest_size=8).hexdigest()}",
        )

    async def ping(self, timeout_s: float) -> None:
        """/version asks nobody; /health asks the scheduler's process."""
        await self.wire.get("/version", timeout_s)

    async def load(self, timeout_s: float) -> Load:
        """The scheduler answers /is_paused; the HTTP process has the figures."""
        await self.wire.get("/is_paused", timeout_s)
        sums: dict[str, float] = {}
        for name, value in _GAUGE.findall(await self.wire.text("/metrics", timeout_s)):
            sums[name] = sums.get(name, 0.0) + float(value)
        return Load(
            running=int(sums.get("num_requests_running", 0)),
            waiting=int(sums.get("num_requests_waiting", 0)),
            usage=sums.get("kv_cache_usage_perc", 0.0),
        )

    async def outside(self) -> Requests | None:
        """Its gauges do not tell clients apart."""
        return None

    def body(self, ask: Ask) -> dict[str, Any]:
        """The JSON of a request."""
        sampling: dict[str, Any] = {
            "max_tokens": ask.left,
            "temperature": ask.temperature,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "stop_token_ids": list(ask.stops),
            "ignore_eos": True,
            "detokenize": False,
            "logprobs": 0,
            "seed": ask.seed % (1 << 31),
        }
        if ask.answer:
            sampling["structured_outputs"] = {"json": ask.answer}
        if self._config.experts:
            sampling["routed_experts_prompt_start"] = ask.start
        asked = {"request_id": ask.rid, "token_ids": list(ask.ids), "sampling_params": sampling}
        priority = {"priority": PRIORITY[ask.lane]} if self._priorities else {}
        return {**asked, **priority, "model": self._model, "cache_salt": ask.salt, "stream": True}

    async def generate(self, ask: Ask, heard: Callable[[Sequence[int]], None]) -> Attempt:
        """Each event has the tokens since the one before; the last one has versions and routes."""
        ids: list[Any] = []
        logprobs: list[Any] = []
        last: Mapping[str, Any] = {}
        async for event in self._events(self.body(ask)):
            try:
                for choice in event["choices"]:
                    new, scored = choice["token_ids"] or (), (choice["logprobs"] or {}).get("content") or ()
                    if [score["token_id"] for score in scored] != list(new):
                        raise garbled(
                            f"the {len(scored)} log-probabilities name other ids than the {len(new)} sampled ones"
                        )
                    ids += new
                    logprobs += [score["logprob"] for score in scored]
                    last = choice
            except (KeyError, TypeError, AttributeError) as error:
                raise garbled(f"the reply lacks {error}") from None
            heard(ids)
        if len(last.get("routed_experts") or "") >= LARGE:
            return await asyncio.to_thread(self.read, ask, ids, logprobs, last)
        return self.read(ask, ids, logprobs, last)

    async def _events(self, asked: Mapping[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
        """The events of a turn. A status of 500 means that the scheduler died: the HTTP process answers so until it
        ends."""
        try:
            async for event in self.wire.events(GENERATE, asked):
                yield event
        except ServerError as error:
            if error.status == 500:
                raise ServerError("gone", str(error)) from None
            raise

    def read(self, ask: Ask, ids: Sequence[Any], logprobs: Sequence[Any], last: Mapping[str, Any]) -> Attempt:
        """The attempt of all events. last: the last one's choice. ServerError `garbled`."""
        try:
            spans = [Stretch(str(s["version"]), s["start"], s["end"]) for s in last.get("weight_versions") or ()]
            finish = last["finish_reason"]
        except (KeyError, TypeError) as error:
            raise garbled(f"the reply lacks {error}") from None
        if any(value == LOWEST for value in logprobs):
            raise garbled("a log-probability is not finite: the weights give logits that are not finite")
        coded = last.get("routed_experts") if self._config.experts and ids else None
        rows = _rows(coded) if coded else None
        return checked(ask, self._config, ids=ids, logprobs=logprobs, stretches=spans, finish=finish, rows=rows)

    async def abort(self, rid: str, timeout_s: float) -> Any:
        """End a request."""
        return await self.wire.post("/abort_requests", {"request_ids": [PREFIX + rid]}, timeout_s)

    async def pause(self) -> None:
        """Freeze the requests inside; their keys and values stay."""
        await self.wire.post("/pause?mode=keep", {})

    async def resume(self) -> None:
        """Continue."""
        await self.wire.post("/resume", {})

    async def served(self) -> str:
        """The weight version."""
        return str((await self.wire.get("/weight_info")).get("weight_version"))

    async def load_folder(self, folder: Path, label: str) -> None:
        """Load in place, then name it: until then the server reports a version that nobody asks for. Of a policy with
        adapters a version's is loaded, under its label."""
        await self.wire.post("/update_weight_version", {"new_version": f"{label}.part"})
        if self._config.adapter:
            for old in (self._model, label):  # a server that was started again has neither
                with contextlib.suppress(ServerError):
                    await self.wire.post("/v1/unload_lora_adapter", {"lora_name": old})
            named = {"lora_name": label, "lora_path": str(folder / ADAPTER)}
            await self.wire.post("/v1/load_lora_adapter", named, UPDATE_S)
            self._model = label
        else:
            asked = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            await self.wire.post("/collective_rpc", asked, UPDATE_S)
        await self.wire.post("/update_weight_version", {"new_version": label})

    def digest(self, device: str, largest: int) -> Digest | None:
        """SHA-256 over the bits, on every device."""
        return sha256

    async def checksums(self, ranks: int) -> dict[str, str]:
        """The checksums in an answer of /weight_checker."""
        answer = await self.wire.post("/weight_checker", {"action": "checksum"}, UPDATE_S)
        out: dict[str, str] = {}
        for name, value in (answer.get("checksums") or {}).items():
            place, _, tensor = name.rpartition(":")
            rank = re.search(r"tp(\d+)$", place)
            if rank is None:
                raise EngineError(f"/weight_checker names {name}, expected its tensor-parallel rank")
            out[rank_label(tensor, int(rank[1]), ranks)] = "" if value == EMPTY else value
        if not any(out.values()):
            raise EngineError("/weight_checker answered without the server's checksums")
        return out


def rank_above(rank: int) -> int:
    """The smallest rank of adapters that the server has buffers for, and that is not below `rank`."""
    return next((size for size in (1, 8, 16, 32, 64, 128, 256, 320, 512) if size >= rank), rank)


def _rows(coded: str) -> NDArray[np.signedinteger]:
    """Routes from base64 of a .npy file [positions, layers, top_k]."""
    try:
        rows: NDArray[np.signedinteger] = np.load(
            io.BytesIO(base64.b64decode(coded, validate=True)), allow_pickle=False
        ).astype(np.int32)
        return rows
    except (ValueError, TypeError, EOFError, OSError) as error:
        raise garbled(f"routed_experts are no array: {error}") from None
