"""Counts the bytes of JSON between headrace and an SGLang server, by turn, context and part.

    python -m benchmarks.sglang_bytes [--contexts 1024,8192,32768] [--tokens 8192] [--short 256]

Real: headrace's client over HTTP (the request, the stream of events, the reader of replies, the start of routes in a
session). The server is not SGLang: it computes nothing and answers with random tokens, log-probabilities and routes in
the format of replies that were recorded from SGLang 0.5.23, with text. So the bytes depend on no model and no clock.

Each turn is the second one of a session: the context has `--contexts` tokens, 64 of them new. Tokens are counted once
each: an id with its comma, a log-probability with its comma, and the routes of the turn's new positions as the API
sends them, in base64 of int32. Compact tokens have 4 bytes for an id, 4 for a log-probability and one for each expert
of a route, which is what a Trajectory stores.
"""

import argparse
import asyncio
import base64
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import msgspec
import numpy as np
from aiohttp import web

from benchmarks.conditions import Figures, at_most, finish
from headrace.engines.base import SampleRequest
from headrace.engines.sglang.generation import Session, Turn
from headrace.engines.sglang.http import Wire
from headrace.engines.sglang.reply import body, read
from headrace.engines.sglang.weights.lock import VersionFile
from headrace.messages.rollout import PolicyRef, Sampling
from headrace.policy.config import PolicyConfig
from tests.support.loopback import serving

LABEL, NEW, FIRST = "12-b8ad7b54c5b369b8", 64, 16
"""Label of the served weights, new tokens of a turn's context, and tokens of the first turn."""
LETTERS = 4
"""Bytes of text of a token, about those of English; the server sends the text beside the ids."""
_MOE = PolicyConfig(
    dim=2048,
    layers=48,
    heads=32,
    kv_heads=4,
    head_dim=128,
    experts=128,
    top_k=8,
    expert_dim=768,
    vocab=151_936,
    max_positions=1 << 17,
)
SHAPES = {"dense": msgspec.structs.replace(_MOE, experts=0, top_k=0), "moe": _MOE}
"""moe: Qwen3-30B-A3B. Only the vocabulary and the shape of routes matter."""


class FormatServer:
    """Answers /generate in the format of SGLang 0.5.23 and counts bytes by part."""

    def __init__(self, config: PolicyConfig, seed: int = 0) -> None:
        self.config = config
        self.bytes: Counter[str] = Counter()
        """Of the requests and replies since the last `clear`, by part."""
        self.once: Counter[str] = Counter()
        """Of the tokens, each counted once."""
        self._rng = np.random.default_rng(seed)

    def app(self) -> web.Application:
        """The application that answers."""
        app = web.Application(client_max_size=1 << 28)
        app.add_routes([web.post("/generate", self._generate)])
        return app

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        asked = msgspec.json.decode(raw)
        ids = len(msgspec.json.encode(asked["input_ids"]))
        self.bytes += Counter({"request_ids": ids, "request_rest": len(raw) - ids})
        count = asked["sampling_params"]["max_new_tokens"]
        sampled = [int(token) for token in self._rng.integers(0, self.config.vocab, count)]
        # An API's log-probabilities are float32 that JSON writes as float64: some 17 digits each.
        logprobs = [float(value) for value in -self._rng.exponential(2.0, count).astype(np.float32)]
        routes = ""
        if asked.get("return_routed_experts"):
            rows = len(asked["input_ids"]) + count - 1 - asked["routed_experts_start_len"]
            shape = (rows, self.config.layers, self.config.top_k)
            experts = self._rng.integers(0, self.config.experts, shape).astype("<i4")
            routes = base64.b64encode(experts.tobytes()).decode()
            self.once["compact"] += experts.size
        self.once += Counter(
            ids=sum(len(str(token)) + 1 for token in sampled),
            logprobs=sum(len(json.dumps(value)) + 1 for value in logprobs),
            routes=len(routes),
            compact=8 * count,
        )
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for end in dict.fromkeys((1, count)):  # one event for the first token and one for all: `stream_interval`
            finished = end == count
            reply = self._reply(asked, sampled[:end], logprobs[:end], routes if finished else "", finished)
            await response.write(b"data: " + self._counted(reply) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        self.bytes["reply_rest"] += len(b"data: [DONE]\n\n")
        return response

    def _counted(self, reply: dict[str, Any]) -> bytes:
        """An event's JSON, its bytes counted by part."""
        data, meta = msgspec.json.encode(reply), reply["meta_info"]
        parts = Counter(
            reply_ids=len(msgspec.json.encode(reply["output_ids"])),
            reply_logprobs=len(msgspec.json.encode(meta["output_token_logprobs"])),
            reply_routes=len(meta.get("routed_experts", "")),
            reply_text=len(reply["text"]),
        )
        framing = len(b"data: \n\n")
        self.bytes += parts + Counter(reply_rest=len(data) + framing - parts.total())
        return data

    def _reply(
        self, asked: dict[str, Any], ids: Sequence[int], logprobs: Sequence[float], routes: str, finished: bool
    ) -> dict[str, Any]:
        """Keys and forms of a recorded reply (tests/support/sglang/golden)."""
        now = 1795308850.3051436  # of the recorded reply, so that the bytes are the same every time
        meta: dict[str, Any] = {
            "id": asked["rid"],
            "finish_reason": {"type": "length", "length": len(ids)} if finished else None,
            "prompt_tokens": len(asked["input_ids"]),
            "weight_version": LABEL,
            "num_retractions": 0,
            "storage_prefetch_wait": 0.0,
            "storage_staging_wait": 0.0,
            "forward_entry_time": now,
            "prefill_finished_time": now,
            "queue_time": 0.0003233999996155035,
            "input_token_logprobs": [],
            # The id is repeated beside its log-probability; null stands for the text of the token.
            "output_token_logprobs": [[value, token, None] for value, token in zip(logprobs, ids, strict=True)],
            "output_token_logprobs_length": len(ids),
            "reasoning_tokens": 0,
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_versions": [{"version": LABEL, "start": 0, "end": len(ids)}],
            "cached_tokens_details": {"device": 0, "host": 0},
            "dp_rank": None,
            "e2e_latency": 0.19405645900042146,
            "request_received_ts": now,
            "first_token_latency": 0.007716636000623112,
            "api_server_dispatch_finish_ts": now,
            "response_sent_to_client_ts": now,
        }
        if routes:
            meta["routed_experts"] = routes
        return {"text": "x" * (LETTERS * len(ids)), "output_ids": ids, "meta_info": meta}


async def sampled(wire: Wire, config: PolicyConfig, ids: tuple[int, ...], tokens: int, session: Session | None) -> Turn:
    """One turn as the engine makes it: the request, its reply read and checked, and the turn with it."""
    request = SampleRequest(
        session="s/0",
        ids=ids,
        policy=PolicyRef(),
        sampling=Sampling(max_turn_tokens=tokens),
        stop_ids=(config.vocab - 1, config.vocab - 2),
        seed=7,
        routed=len(session.ids) - 1 if session is not None else 0,
    )
    turn = Turn(request, session, config)
    weights = VersionFile(12, "", "b8ad7b54c5b369b8")
    start = turn.start(weights.label)
    routes = turn.routes(start)
    asked = body(
        request,
        turn.ids,
        turn.left,
        rid=uuid4().hex,
        start=routes,
        salt=weights.label,
        sparse=bool(config.experts),
        seeded=True,
        priority=-100,
    )
    reply = await wire.generate(asked, lambda event: None)
    turn.add(read(reply, prompt=len(turn.ids), start=routes, config=config, stops=()), start, weights, {LABEL: 12})
    return turn


async def measure(config: PolicyConfig, context: int, tokens: int) -> Figures:
    """The bytes of the second turn of a session: `context` tokens, `tokens` sampled."""
    server, rng = FormatServer(config), np.random.default_rng(1)
    async with serving(server.app()) as url:
        wire = Wire(url)
        try:
            begin = tuple(int(token) for token in rng.integers(0, config.vocab, context - NEW - FIRST))
            first = await sampled(wire, config, begin, FIRST, None)
            server.bytes.clear()
            server.once.clear()
            ids = (*first.ids, *(int(token) for token in rng.integers(0, config.vocab, NEW)))
            turn = await sampled(wire, config, ids, tokens, first.session())
            made = turn.sample("length")
        finally:
            await wire.close()
    assert len(ids) == context and len(made.ids) == tokens
    parts, once = server.bytes, server.once
    request = parts["request_ids"] + parts["request_rest"]
    reply = sum(count for name, count in parts.items() if name.startswith("reply_"))
    each_once = once["ids"] + once["logprobs"] + once["routes"]
    return {
        "request_bytes": request,
        "reply_bytes": reply,
        **{name: parts[name] for name in sorted(parts)},
        "tokens_once": {name: once[name] for name in ("ids", "logprobs", "routes")},
        "compact_bytes": once["compact"],
        "request_bytes_per_context_token": round(parts["request_ids"] / context, 2),
        "reply_over_tokens": round(reply / each_once, 3),
        "turn_over_tokens": round((request + reply) / each_once, 3),
        "turn_over_compact": round((request + reply) / once["compact"], 3),
    }


async def run(contexts: Sequence[int], short: int, tokens: int) -> Figures:
    """Every shape, context and length of a turn."""
    figures: Figures = {}
    for shape, config in SHAPES.items():
        for length in (short, tokens):
            for context in contexts:
                figures[f"{shape}_context_{context}_tokens_{length}"] = await measure(config, context, length)
        replies = [figures[f"{shape}_context_{context}_tokens_{short}"]["reply_bytes"] for context in contexts]
        figures[f"{shape}_reply_growth"] = round(max(replies) / min(replies), 4)
    return figures


def main() -> None:
    """Count, end with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", default="1024,8192,32768")
    parser.add_argument("--short", type=int, default=256, help="tokens of a turn, with which contexts are compared")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a long turn")
    args = parser.parse_args()
    contexts = [int(context) for context in args.contexts.split(",")]
    figures = asyncio.run(run(contexts, args.short, args.tokens))
    targets = {f"{shape}_reply_growth": at_most(figures[f"{shape}_reply_growth"], 1.01) for shape in SHAPES}
    for shape in SHAPES:
        for context in contexts:
            name = f"{shape}_context_{context}_tokens_{args.tokens}"
            targets[f"{name}_turn_over_tokens"] = at_most(figures[name]["turn_over_tokens"], 2.0)
    finish(figures, targets, "aiohttp")


if __name__ == "__main__":
    main()
