"""Asks a real server for every quirk that the double copies and the client relies on, and keeps its words.

With HEADRACE_RECORD=1 they are written to tests/engines/golden/sglang-VERSION.json, which the ordinary suite reads.
"""

import asyncio
import json
import os
import uuid
from pathlib import Path
from typing import Any

import aiohttp

from headrace.engines.server.http import Wire
from headrace.engines.sglang import capabilities
from headrace.engines.sglang.backend import ARITHMETIC
from headrace.engines.sglang.metrics import _WANTED
from headrace.policy.config import PolicyConfig
from tests.support.sglang.opening import generate

GOLDEN = Path(__file__).parent / "golden"
KEPT = (*ARITHMETIC, "frontend", "dp_size", "context_length", "enable_return_routed_experts", "speculative_algorithm",
        "incremental_streaming_output", "enable_priority_scheduling", "default_priority_value")  # fmt: skip


async def raw(url: str, path: str, body: Any = None) -> dict[str, Any]:
    """Status and body, as they come."""
    async with (
        aiohttp.ClientSession() as session,
        session.request("POST" if body else "GET", url + path, json=body) as got,
    ):
        text = await got.text()
    try:
        return {"status": got.status, "body": json.loads(text)}
    except ValueError:
        return {"status": got.status, "body": text}


def needed(openapi: dict[str, Any]) -> dict[str, Any]:
    """The parts of a description that the client reads: its paths, their bodies, and the names of their fields."""
    needs = (*capabilities.REQUIRED, *capabilities.REPLAY, *capabilities.PRIORITIES, *capabilities.TENSORS,
             *capabilities.SESSION)  # fmt: skip
    paths = {need.path: openapi["paths"][need.path] for need in needs if need.path in openapi["paths"]}
    paths = {
        path: {
            method: {"requestBody": said["requestBody"]} if "requestBody" in said else {}
            for method, said in methods.items()
        }
        for path, methods in paths.items()
    }
    text = json.dumps(paths)
    schemas: dict[str, Any] = {
        name: {"properties": {field: {} for field in schema.get("properties", ())}}
        for name, schema in openapi["components"]["schemas"].items()
        if f'/{name}"' in text
    }
    return {"paths": paths, "components": {"schemas": schemas}}


def asked(ids: list[int], tokens: int, **changes: Any) -> dict[str, Any]:
    """A body of /generate as the client sends it."""
    sampling = {"max_new_tokens": tokens, "temperature": 1.0, "stop_token_ids": [], "no_stop_trim": True,
                "stream_interval": 64}  # fmt: skip
    return {
        "rid": uuid.uuid4().hex, "input_ids": ids, "sampling_params": sampling, "return_logprob": True,
        "logprob_start_len": -1, "return_routed_experts": True, "routed_experts_start_len": 0, "cache_salt": "golden",
    } | changes  # fmt: skip


async def record_golden(wire: Wire, config: PolicyConfig, folder: Path) -> dict[str, Any]:
    """Name -> what was asked and what came."""
    exchanges: dict[str, Any] = {}

    async def streamed(name: str, body: dict[str, Any], after_first: Any = None) -> None:
        events: list[int] = []
        first = asyncio.Event()

        def heard(event: dict[str, Any]) -> None:
            events.append(len(event["output_ids"]))
            first.set()

        work = asyncio.create_task(generate(wire, body, heard))
        if after_first is not None:
            await first.wait()
            await after_first()
        exchanges[name] = {"request": body, "reply": await work, "tokens_by_event": events}

    info = await wire.get("/server_info")
    exchanges["server_info"] = {key: info.get(key) for key in KEPT}
    exchanges["model_info"] = (await raw(wire.url, "/model_info"))["body"]
    exchanges["model_info"].pop("model_path", None)
    exchanges["model_info"].pop("tokenizer_path", None)
    exchanges["loads"] = (await raw(wire.url, "/v1/loads?include=core"))["body"]
    exchanges["metrics"] = "\n".join(_WANTED.findall(await wire.text("/metrics"))) + "\n"
    exchanges["weights_checker"] = (await raw(wire.url, "/weights_checker", {"action": "checksum"}))["body"]
    await streamed("length", asked([1, 2, 3, 4, 5], 70))
    stops = list(range(0, config.vocab, 2))
    body = asked([1, 2, 3], 64, routed_experts_start_len=1)
    body["sampling_params"]["stop_token_ids"] = stops
    await streamed("stop", body)
    body = asked([7, 8, 9], 1500)

    async def abort() -> None:
        await raw(wire.url, "/abort_request", {"rid": body["rid"]})

    await streamed("abort_running", body, abort)
    body = asked([1, 2, 3], 1500)

    async def busy() -> None:
        exchanges["duplicate_rid"] = await raw(wire.url, "/generate", body)
        await raw(wire.url, "/pause_generation", {"mode": "in_place"})
        exchanges["ready_when_paused"] = await raw(wire.url, "/ready")
        update = {"model_path": str(folder), "weight_version": "golden", "flush_cache": True}
        exchanges["updated_but_400"] = await raw(wire.url, "/update_weights_from_disk", update)
        exchanges["version_after"] = (await raw(wire.url, "/model_info"))["body"]["weight_version"]
        await raw(wire.url, "/continue_generation", {"torch_empty_cache": False})
        await raw(wire.url, "/abort_request", {"rid": body["rid"]})

    await streamed("swapped", body, busy)
    wrong = asked([1, 2], 4)
    wrong["sampling_params"]["tempreature"] = 1
    exchanges["unknown_field"] = await raw(wire.url, "/generate", wrong)
    exchanges["start_too_far"] = await raw(wire.url, "/generate", asked([1, 2], 4, routed_experts_start_len=3))
    exchanges["missing_routes"] = await raw(wire.url, "/generate", asked([1, 2], 4, return_routed_experts=False))
    exchanges["unknown_rid"] = await raw(wire.url, "/abort_request", {"rid": "0" * 32})
    exchanges["get_load"] = await raw(wire.url, "/get_load")
    if os.environ.get("HEADRACE_RECORD"):
        GOLDEN.mkdir(exist_ok=True)
        file = GOLDEN / f"sglang-{info['version']}.json"
        file.write_text(json.dumps(exchanges, indent=1).replace(str(folder), "/stage") + "\n", encoding="utf-8")
        described = needed(await wire.get("/openapi.json", 60.0))
        file = GOLDEN / f"openapi-{info['version']}.json"
        file.write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
    return exchanges
