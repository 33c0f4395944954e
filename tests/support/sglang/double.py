"""A server that behaves like SGLang 0.5.23 where that was measured, over headrace's own model. It is not SGLang, and
nothing that was tested against it is called so; the real server has the marker `sglang`.

Copied: streamed replies that repeat everything, spans over output tokens, held requests and 503 while paused, the
update that answers 400 and has happened, aborts by prefix of the id, three error shapes, unknown top-level keys that
are ignored, death by an id outside the vocabulary, routes overwritten by a retraction, prefixes that survive a swap
unless salted, running requests that give way to others of higher priority.

KV is real: a request keeps its keys and values over a swap, and the prefix cache hands them on.
"""

import asyncio
import base64
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from aiohttp import web
from numpy.typing import NDArray

from headrace.engines.server.weights.checksums import fused
from headrace.engines.sglang.backend import digest
from headrace.kernels.block_attention import BLOCK
from headrace.policy.cache import KVCache
from headrace.policy.config import PolicyConfig
from headrace.policy.layout import checkpoint
from tests.support import tiny
from tests.support.sglang import pages, updates
from tests.support.sglang.forward import forwarded
from tests.support.sglang.priority import admit

SAMPLING = {
    "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos",
    "repetition_penalty", "frequency_penalty", "presence_penalty", "no_stop_trim", "skip_special_tokens",
    "spaces_between_special_tokens", "stream_interval", "sampling_seed",
}  # fmt: skip
Rows = NDArray[np.int32]


@dataclass(eq=False)
class Request:
    """One request inside."""

    rid: str
    ids: list[int]
    params: Mapping[str, Any]
    salt: str
    start: int
    routes: bool
    priority: int = 0
    out: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cache: KVCache | None = None
    forwarded: int = 0
    rows: Rows | None = None
    changes: list[tuple[str, int]] = field(default_factory=list)
    cached: int = 0
    retractions: int = 0
    finish: dict[str, Any] | None = None

    @property
    def context(self) -> list[int]:
        return [*self.ids, *self.out]

    def retract(self) -> None:
        """Give up its KV: it is forwarded again, and its routes are recorded again."""
        self.cache, self.rows, self.forwarded = None, None, 0
        self.retractions += 1


class Double:
    """One such server. `start`, then `url`; `close` at the end."""

    def __init__(self, config: PolicyConfig, *, max_running: int = 8, seed: int = 5) -> None:
        self.config, self.max_running = config, max_running
        self.model = tiny.model(config, exact=False, seed=99)
        self.version = self.told = "default"
        """The weights that compute, and those that /model_info reports: an update with answer 400 changes the first."""
        self.model_path = "/nowhere"
        self.paused = self.sick_when_paused = False
        self.running: list[Request] = []
        self.queue: list[Request] = []
        self.prefixes: dict[str, list[Request]] = {}
        self.priorities: set[str] = set()
        self.done: Counter[str] = Counter()
        """Requests that ended, by priority."""
        self.hold_at: int | None = None
        """Requests with so many tokens wait for it to change."""
        self.info: dict[str, Any] = {}
        """Overrides of /server_info."""
        self.fail_updates: list[str] = []
        """How the next updates fail: `refuse` (nothing changed), `half` (some tensors did), `lie` (it says done)."""
        self.fail_tensors = ""
        """How updates by tensors fail, as in `fail_updates`; `die` ends the server."""
        self.session = False  # whether an update session is open
        self.openapi: dict[str, Any] = updates.openapi()
        self.drop_routes = False
        self.more_posts: dict[str, Any] = {}
        self.silent: set[str] = set()  # paths that are accepted and not answered
        self.seen: list[tuple[str, Any]] = []
        """Path and body of every request so far."""
        self.news = asyncio.Condition()
        self.port = 0
        self._generator = torch.Generator().manual_seed(seed)
        self._runner: web.AppRunner | None = None
        self._loop: asyncio.Task[None] | None = None
        self._open: set[asyncio.Transport] = set()

    # Life.

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=1 << 28, middlewares=[self._note])
        post = {
            "/generate": self._generate, "/abort_request": self._abort, "/pause_generation": self._pause,
            "/continue_generation": self._continue, "/update_weights_from_disk": self._update,
            "/weights_checker": self._check, "/flush_cache": self._flush, **updates.posts(self), **self.more_posts,
        }  # fmt: skip
        get = {
            "/server_info": self._server_info, "/model_info": self._model_info, "/v1/loads": self._loads,
            **pages.gets(self),
        }  # fmt: skip
        app.add_routes([web.post(path, handler) for path, handler in post.items()])
        app.add_routes([web.get(path, handler) for path, handler in get.items()])
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port or self.port)
        await site.start()
        assert site._server is not None
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        self._loop = asyncio.create_task(self._work())

    async def die(self) -> None:
        """As by kill -9: connections break, all requests, weights and prefixes are gone."""
        for transport in list(self._open):
            transport.abort()
        if self._loop is not None:
            self._loop.cancel()
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()
        self.running, self.queue, self.prefixes, self.paused, self.session = [], [], {}, False, False
        self.model, self.version = tiny.model(self.config, exact=False, seed=99), "default"
        self.told = self.version

    close = die

    async def until(self, wanted: Callable[[], bool]) -> None:
        """Wait for a state of the server."""
        async with self.news:
            await self.news.wait_for(wanted)

    async def let_go(self, hold_at: int | None = None) -> None:
        """Let requests decode on."""
        async with self.news:
            self.hold_at = hold_at
            self.news.notify_all()

    def bodies(self, path: str) -> list[Any]:
        """The bodies of a path so far, without those of the client's probe turns."""
        return [
            body for seen, body in self.seen if seen == path and not str((body or {}).get("rid")).startswith("probe")
        ]

    # Scheduling.

    async def _work(self) -> None:
        while True:
            async with self.news:
                await self.news.wait_for(lambda: not self.paused and (self.queue or any(map(self._may, self.running))))
                admit(self)
                for one in [one for one in self.running if self._may(one)]:
                    try:
                        self._step(one)
                    except IndexError:
                        self._dying = asyncio.create_task(self.die())
                        return
                self.news.notify_all()
            await asyncio.sleep(0)

    def _may(self, one: Request) -> bool:
        return self.hold_at is None or len(one.out) < self.hold_at

    def _step(self, one: Request) -> None:
        if one.cache is None:
            self._adopt(one)
        context = one.context
        new = context[one.forwarded :]
        if max(new) >= self.config.vocab or max(one.params.get("stop_token_ids") or [0]) >= self.config.vocab:
            raise IndexError("index out of range in self")
        assert one.cache is not None
        one.cache.reserve(-(-len(context) // BLOCK))
        hidden, routes = forwarded(self.model, new, one.forwarded, one.cache)
        fresh = routes.numpy()
        one.rows = fresh if one.rows is None else np.concatenate((one.rows, fresh))
        one.forwarded = len(context)
        heat = float(one.params.get("temperature", 1.0))
        with torch.no_grad():
            spread = torch.log_softmax(self.model.logits(hidden[-1:]).float()[0] / (heat or 1.0), 0)
        token = int(spread.argmax() if not heat else torch.multinomial(spread.exp(), 1, generator=self._generator))
        one.out.append(token)
        one.logprobs.append(float(spread[token]))
        if token in (one.params.get("stop_token_ids") or ()):
            self._end(one, {"type": "stop", "matched": token})
        elif len(one.out) >= int(one.params.get("max_new_tokens", 128)):
            self._end(one, {"type": "length", "length": len(one.out)})

    def _adopt(self, one: Request) -> None:
        """Take over the longest cached prefix under the same salt; the last position is always forwarded."""
        one.cache = KVCache(self.config)
        best, at = None, 0
        for other in self.prefixes.get(one.salt, ()):
            same = 0
            for a, b in zip(other.context[: other.forwarded], one.context[:-1], strict=False):
                if a != b:
                    break
                same += 1
            if same > at:
                best, at = other, same
        if best is not None and best.cache is not None and best.rows is not None:
            one.cache.reserve(best.cache.blocks)
            one.cache.keys = [keys.clone() for keys in best.cache.keys]
            one.cache.values = [values.clone() for values in best.cache.values]
            one.forwarded = one.cached = at
            one.rows = best.rows[:at].copy()

    def _end(self, one: Request, finish: dict[str, Any]) -> None:
        one.finish = finish
        self.done[str(one.priority)] += 1
        if one in self.running:
            self.running.remove(one)
            self.prefixes.setdefault(one.salt, []).append(one)
        if one in self.queue:
            self.queue.remove(one)

    def retract(self) -> None:
        """Give up the KV of all that run: they are forwarded again, and their routes with them."""
        for one in self.running:
            one.retract()

    # Endpoints.

    @web.middleware
    async def _note(self, request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
        transport = request.transport
        if transport is not None:
            self._open.add(transport)
        text = await request.text()
        self.seen.append((request.path, await request.json() if text.startswith("{") else None))
        await self.until(lambda: request.path not in self.silent)
        try:
            answer: web.StreamResponse = await handler(request)
            return answer
        finally:
            self._open.discard(transport)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        params = body.get("sampling_params") or {}
        ids = body["input_ids"]
        if unknown := set(params) - SAMPLING:
            return web.json_response({"error": f"unknown field {sorted(unknown)[0]}"}, status=400)
        if body.get("routed_experts_start_len", 0) > len(ids):
            text = "routed_experts_start_len must be in [0, prompt_tokens]"
            return web.json_response({"object": "error", "message": text, "code": 400}, status=400)
        if any(one.rid == body["rid"] for one in (*self.running, *self.queue)):
            return web.json_response({"error": {"message": f"Duplicate request ID {body['rid']}"}}, status=400)
        one = Request(
            body["rid"], ids, params, body.get("cache_salt") or "", body.get("routed_experts_start_len", 0),
            bool(body.get("return_routed_experts")) and not self.drop_routes, body.get("priority", 0),
        )  # fmt: skip
        self.priorities.add(str(one.priority))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await self.until(lambda: not self.paused)  # held, not refused
        async with self.news:
            self.queue.append(one)
            self.news.notify_all()
        sent = 0
        interval = int(params.get("stream_interval") or 1)
        while one.finish is None:
            due = sent + (interval if sent else 1)
            await self.until(lambda due=due: one.finish is not None or len(one.out) >= due)  # type: ignore[misc]
            sent = len(one.out)
            await response.write(b"data: " + web.json_response(self._reply(one)).body + b"\n\n")  # type: ignore[operator]
        await response.write(b"data: [DONE]\n\n")
        return response

    def _reply(self, one: Request) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": one.rid, "finish_reason": one.finish, "prompt_tokens": len(one.ids), "weight_version": self.version,
            "completion_tokens": len(one.out), "cached_tokens": one.cached, "num_retractions": one.retractions,
            "output_token_logprobs": [[lp, id, None] for lp, id in zip(one.logprobs, one.out, strict=True)],
        }  # fmt: skip
        if one.finish is not None:
            meta["weight_versions"] = self._spans(one)
            if one.routes and one.rows is not None and one.out:
                rows = one.rows[one.start : len(one.context) - 1]
                meta["routed_experts"] = base64.b64encode(np.ascontiguousarray(rows, "<i4").tobytes()).decode()
        return {"text": "", "output_ids": one.out, "meta_info": meta}

    def _spans(self, one: Request) -> list[dict[str, Any]]:
        spans: list[dict[str, Any]] = []
        start = 0
        for version, end in [*one.changes, (self.version, len(one.out))]:
            if end > start or not spans:
                spans.append({"version": version, "start": start, "end": end})
            start = end
        return spans

    async def _abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        async with self.news:
            inside = [*self.running, *self.queue]
            is_inside = any(one.rid == body.get("rid") for one in inside)  # of an unknown id nothing is aborted
            for one in inside:
                if body.get("abort_all") or (is_inside and one.rid.startswith(body["rid"])):
                    queued = "Abort in waiting queue" if one in self.queue else "Abort"
                    self._end(one, {"type": "abort", "message": queued, "status_code": None})
            self.news.notify_all()
        return web.Response()

    async def _pause(self, request: web.Request) -> web.Response:
        mode = (await request.json()).get("mode", "abort")
        async with self.news:
            self.paused = True
            if mode == "abort":
                for one in [*self.running, *self.queue]:
                    self._end(one, {"type": "abort", "message": "Abort"})
            elif mode == "retract":
                self.retract()
            self.news.notify_all()
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        async with self.news:
            self.paused = False
            self.news.notify_all()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _update(self, request: web.Request) -> web.Response:
        body = await request.json()
        how = self.fail_updates.pop(0) if self.fail_updates else ""
        if how == "refuse":
            return web.json_response({"success": False, "message": "no such file"}, status=400)
        _, tensors = checkpoint.load(body["model_path"])
        names = sorted(tensors)
        names = names[::2] if how else names
        await self.take({name: tensors[name] for name in names}, body.get("weight_version"))
        if how == "half":
            return web.json_response({"success": False, "message": "partially updated"}, status=400)
        if body.get("flush_cache", True):
            if self.running or self.queue:
                text = "Weights were updated, but the cache was not flushed: requests are still running or queued."
                return web.json_response({"success": False, "message": text}, status=400)
            self.prefixes.clear()
        self.model_path, self.told = body["model_path"], self.version
        return web.json_response({"success": True, "message": "Succeeded", "num_paused_requests": 0})

    async def take(self, tensors: Mapping[str, torch.Tensor], version: str | None) -> None:
        """Compute with these tensors, and the others as before."""
        async with self.news:
            self.model.load_state(self.model.state() | dict(tensors))
            if version is None or version == self.version:
                return
            for one in self.running:
                if one.out:
                    one.changes.append((self.version, len(one.out)))
            self.version = version

    async def _check(self, request: web.Request) -> web.Response:
        sums = {name: digest(tensor) for name, tensor in fused(self.model.state(), self.config).items()}
        return web.json_response({"success": True, "message": "", "ranks": [{"checksums": sums}]})

    async def _flush(self, request: web.Request) -> web.Response:
        if self.running or self.queue:
            return web.Response(text="Cache not flushed because there are pending requests.", status=400)
        self.prefixes.clear()
        return web.Response(text="Cache flushed.")

    async def _server_info(self, request: web.Request) -> web.Response:
        said = {
            "version": "0.5.23", "frontend": "python", "device": "cpu", "dtype": self.config.dtype, "tp_size": 1,
            "dp_size": 1, "context_length": 2048, "enable_return_routed_experts": True,
            "enable_deterministic_inference": False, "enable_priority_scheduling": True, "default_priority_value": 0,
        }  # fmt: skip
        return web.json_response(said | self.info)

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": self.model_path, "weight_version": self.told})

    async def _loads(self, request: web.Request) -> web.Response:
        load = {"num_running_reqs": len(self.running), "num_waiting_reqs": len(self.queue), "token_usage": 0.1}
        return web.json_response({"version": "0.5.23", "loads": [load]})
