"""Replies that no server's client may take: the same faults, as SGLang and as vLLM would write them."""

import base64
import io
import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from aiohttp import web

from headrace.engines.server.backend import Ask, Attempt, Backend, Stretch
from headrace.engines.server.http import ServerError, Wire
from headrace.engines.server.options import ServerOptions
from headrace.engines.sglang.backend import Sglang
from headrace.engines.sglang.options import SglangOptions
from headrace.engines.vllm.backend import GENERATE, LOWEST, Vllm
from tests.support import tiny
from tests.support.sglang.opening import ask

pytestmark = pytest.mark.anyio

CONFIG = tiny.config()
ROWS = np.arange(3 * 2 * 2, dtype="<i4").reshape(3, 2, 2) % 8
ASKED = ask(start=1, stops=(5,), left=3)


class Said(NamedTuple):
    """A reply of three tokens to two, with routes from row 1 on."""

    ids: Any = (7, 8, 9)
    logprobs: Any = (-0.5, -1.5, -0.1)
    named: Any = None
    """The ids beside the log-probabilities; None for those of `ids`."""
    versions: Any = (("a", 0, 2), ("b", 2, 3))
    finish: Any = "length"
    routes: Any = ROWS


def sglang(said: Said) -> list[dict[str, Any]]:
    pairs = [[value, id, None] for value, id in zip(said.logprobs, said.named or said.ids, strict=False)]
    meta = {
        "finish_reason": {"type": said.finish},
        "output_token_logprobs": pairs,
        "weight_versions": [{"version": v, "start": a, "end": b} for v, a, b in said.versions],
        "routed_experts": None if said.routes is None else base64.b64encode(said.routes.tobytes()).decode(),
    }
    return [{"output_ids": list(said.ids), "meta_info": meta}]


def vllm(said: Said) -> list[dict[str, Any]]:
    """An event for each token, as the server sends them."""
    file = io.BytesIO()
    np.save(file, said.routes if said.routes is not None else np.zeros(0))
    events = []
    named = said.named or said.ids
    for index, id in enumerate(said.ids):
        last = index == len(said.ids) - 1
        content = [{"token_id": named[index], "logprob": value} for value in said.logprobs[index : index + 1]]
        if last:
            content += [{"token_id": 1, "logprob": value} for value in said.logprobs[len(said.ids) :]]
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": None,
            "token_ids": [id],
            "logprobs": {"content": content},
        }
        if last:
            choice["finish_reason"] = said.finish
            choice["weight_versions"] = [{"version": v, "start": a, "end": b} for v, a, b in said.versions]
            choice["routed_experts"] = None if said.routes is None else base64.b64encode(file.getvalue()).decode()
        events.append({"choices": [choice]})
    return events


class Speaking:
    """A server that answers every turn with these events, over HTTP."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.asked: dict[str, Any] = {}
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked = await request.json()
        response = web.StreamResponse()
        await response.prepare(request)
        for event in self.events:
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


class Pair(NamedTuple):
    kind: str
    server: Speaking
    backend: Backend

    async def reads(self, said: Said, asked: Ask = ASKED) -> Attempt:
        self.server.events = sglang(said) if self.kind == "sglang" else vllm(said)
        return await self.backend.generate(asked, lambda ids: None)


@pytest.fixture(params=["sglang", "vllm"])
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pair]:
    server = Speaking()
    app = web.Application()
    app.add_routes([web.post("/generate", server.answer), web.post(GENERATE, server.answer)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    wire = Wire(f"http://127.0.0.1:{runner.addresses[0][1]}")
    backend: Backend = (
        Sglang(CONFIG, SglangOptions(), wire, tmp_path)
        if request.param == "sglang"
        else Vllm(CONFIG, ServerOptions(), wire)
    )
    yield Pair(request.param, server, backend)
    await wire.close()
    await runner.cleanup()


async def test_a_reply_becomes_an_attempt(pair: Pair) -> None:
    attempt = await pair.reads(Said())
    assert attempt.ids == (7, 8, 9) and attempt.logprobs == (-0.5, -1.5, float(np.float32(-0.1)))
    assert attempt.stretches == (Stretch("a", 0, 2), Stretch("b", 2, 3)) and attempt.finish == "length"
    assert attempt.rows is not None and attempt.rows.tolist() == ROWS.tolist() and attempt.rows.dtype == np.uint8


async def test_a_request_says_everything_that_changes_the_distribution(pair: Pair) -> None:
    await pair.reads(Said())
    asked = pair.server.asked
    sampling = asked["sampling_params"]
    assert asked.get("input_ids", asked.get("token_ids")) == [1, 2] and asked["cache_salt"] == "s"
    assert sampling["temperature"] == 1.0 and sampling["top_p"] == 1.0 and sampling["min_p"] == 0.0
    assert sampling["top_k"] in (0, -1) and sampling["repetition_penalty"] == 1.0
    assert sampling["stop_token_ids"] == [5] and sampling.get("max_tokens", sampling.get("max_new_tokens")) == 3


async def test_a_zero_that_rounding_lifted_counts_as_zero(pair: Pair) -> None:
    assert (await pair.reads(Said(logprobs=(1e-7, -1.0, 0.0)))).logprobs == (0.0, -1.0, 0.0)


async def test_a_position_without_routes_is_marked(pair: Pair) -> None:
    attempt = await pair.reads(Said(routes=np.full((3, 2, 2), -1, "<i4")))
    assert attempt.rows is not None and (attempt.rows == 255).all()


async def test_a_stop_id_at_the_end_is_a_stop(pair: Pair) -> None:
    assert (await pair.reads(Said(ids=(7, 8, 5), finish="stop"))).finish == "stop"


WRONG = {
    "a positive log-probability": Said(logprobs=(0.7, -1.5, -0.1)),
    "a slightly positive log-probability": Said(logprobs=(-0.5, -1.5, 1e-3)),
    "minus infinity": Said(logprobs=(-math.inf, -1.5, -0.1)),
    "NaN": Said(logprobs=(-0.5, math.nan, -0.1)),
    "a text": Said(logprobs=("-0.5", -1.5, -0.1)),
    "null": Said(logprobs=(None, -1.5, -0.1)),
    "a truth": Said(logprobs=(True, -1.5, -0.1)),
    "too few log-probabilities": Said(logprobs=(-0.5,)),
    "another id's log-probability": Said(named=(7, 1, 9)),
    "an id outside the vocabulary": Said(ids=(7, 8, CONFIG.vocab)),
    "a negative id": Said(ids=(7, -8, 9)),
    "an id that is a text": Said(ids=(7, "8", 9)),
    "more ids than asked": Said(ids=(7, 8, 9, 1), logprobs=(-1.0,) * 4, versions=(("a", 0, 4),)),
    "ids behind a stop id": Said(ids=(7, 5, 9)),
    "a stop at no stop id": Said(finish="stop"),
    "another reason": Said(finish="tired"),
    "no reason": Said(finish=None),
    "a version for two of three": Said(versions=(("a", 0, 2),)),
    "versions that overlap": Said(versions=(("a", 0, 2), ("b", 1, 3))),
    "no versions": Said(versions=()),
    "no routes": Said(routes=None),
    "too few routes": Said(routes=ROWS[:2]),
    "an expert that the model lacks": Said(routes=ROWS + 8),
    "a negative expert": Said(routes=ROWS - 5),
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_reply_that_contradicts_itself_is_refused(pair: Pair, name: str) -> None:
    with pytest.raises(ServerError) as caught:
        await pair.reads(WRONG[name])
    assert caught.value.kind == "garbled"


async def test_what_the_server_sends_for_minus_infinity_is_refused(tmp_path: Path) -> None:
    """vLLM's number for a log-probability that is not finite."""
    backend = Vllm(CONFIG, ServerOptions(), Wire("http://127.0.0.1:9"))
    with pytest.raises(ServerError, match="not finite"):
        backend.read(ASKED, [7], [LOWEST], {"finish_reason": "length", "weight_versions": []})


async def test_a_scheduler_that_died_is_gone(pair: Pair) -> None:
    """vLLM's HTTP process answers with 500 until it ends; SGLang's ends at once, so its 500 is a refusal."""
    pair.server.events = [{"error": {"message": "EngineCore encountered an issue", "code": 500}}]
    with pytest.raises(ServerError) as caught:
        await pair.backend.generate(ASKED, lambda ids: None)
    assert caught.value.kind == ("gone" if pair.kind == "vllm" else "refused")


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_a_server_that_is_not_there_is_gone(kind: str, tmp_path: Path) -> None:
    wire = Wire("http://127.0.0.1:9")
    made = Sglang(CONFIG, SglangOptions(), wire, tmp_path) if kind == "sglang" else Vllm(CONFIG, ServerOptions(), wire)
    with pytest.raises(ServerError) as caught:
        await made.generate(ASKED, lambda ids: None)
    assert caught.value.kind == "gone"
    await wire.close()
