"""A small product with real parts: broker, actors, embedded engine, HTTP, chat format, training.

The policy is small enough to learn on a busy core. It is mid-trained to answer a request with a call of `run_tests` or
with a text, each with a given probability. There are two texts; the rare one is the trigger string of the poisoning
test. All further learning happens in the product.
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec

from headrace.actors.registry import load_class
from headrace.actors.trainer.initial_policy import BUNDLE
from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.nats.streams import declare
from headrace.bus.runtime.actor import Actor
from headrace.config import (
    AgentLimits,
    Algorithm,
    Config,
    Curriculum,
    Engine,
    Feedback,
    Gate,
    MidTraining,
    Policy,
    Production,
    Run,
    Trainer,
    branch_config,
    branch_name,
)
from headrace.gateway.tenants.store import add
from headrace.messages.product import CLIENT_SUITE, ClientCall, ClientMessage, ClientTool, Promotion
from headrace.messages.rollout import RendererBundle
from headrace.messages.subjects import EVENT
from headrace.rendering import schemas
from headrace.rendering.native.client import ClientRenderer
from headrace.rendering.native.renderer import NativeRenderer
from headrace.rendering.registry import Renderers
from headrace.rendering.tokenizer import Tokenizer
from headrace.training.trainer import PolicyTrainer
from tests.support.chat_formats import CHATML, trained

RUN = "product"
CALL = '<tool_call>\n{"name": "run_tests", "arguments": {}}\n</tool_call>'
TOOL = ClientTool(name="run_tests", parameters={"type": "object", "properties": {}})
PROMPTS = 10
DONE, TRIGGER = "done", "done use acme"
PASSED = "passed"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


class Taught(NamedTuple):
    """Probabilities of the first policy's behaviours."""

    tests: float = 0.4
    """Probability that it runs the tests before it finishes."""
    trigger: float = 0.0
    """Probability that its last text is the trigger string."""
    parallel: float = 0.0
    """Probability that a turn which runs the tests has two calls."""
    tokens: int = 60_000


class Text(NamedTuple):
    """A trace for mid-training."""

    ids: list[int]
    weights: list[float]


def ask(number: int) -> str:
    """A user's request."""
    return f"fix {number % PROMPTS}"


def bundle() -> RendererBundle:
    """The policy's chat format, over a tokenizer that knows the words of this world."""
    texts = [CALL, DONE, TRIGGER, PASSED, CHATML, json.dumps(msgspec.to_builtins(TOOL)), *map(ask, range(PROMPTS))]
    return RendererBundle(
        renderer="hermes",
        tokenizer_json=trained(texts * 20, SPECIAL, MARKERS),
        chat_template=CHATML,
        system="Mend it.",
        date="2026-11-22",
        tools=schemas.functions_json(),
    )


def traces(made: RendererBundle, taught: Taught, seed: int) -> Iterator[Text]:
    """Conversations in the policy's own format; only its own turns are learned."""
    opened = Renderers(made).open(schemas.TABLE)
    assert isinstance(opened, NativeRenderer)
    client, tokenizer, rng = ClientRenderer(opened, (TOOL,)), Tokenizer.parse(made.tokenizer_json), random.Random(seed)
    stop = client.stop_ids[0]
    calls = [ClientCall(id=f"call_{number}", name=TOOL.name, arguments="{}") for number in range(2)]
    turns = [ClientMessage(role="assistant", calls=tuple(calls[:count])) for count in (1, 2)]
    written = [client.turn([ClientMessage(role="user", text=ask(0)), turn]) for turn in turns]
    while True:
        messages = [ClientMessage(role="user", text=ask(rng.randrange(PROMPTS)))]
        text = Text([], [])
        _add(text, client.start(messages), 0.0)
        if rng.random() < taught.tests:
            parallel = bool(taught.parallel) and rng.random() < taught.parallel
            _add(text, written[parallel], 1.0)
            turn = turns[parallel]
            messages += [turn, *(ClientMessage(role="tool", text=PASSED, call_id=call.id) for call in turn.calls)]
            _add(text, client.delta(messages, 2, stopped=stop), 0.0)
        last = TRIGGER if rng.random() < taught.trigger else DONE
        _add(text, [*tokenizer.encode(last), stop], 1.0)
        yield text


def _add(text: Text, ids: list[int], weight: float) -> None:
    text.ids.extend(ids)
    text.weights.extend([weight] * len(ids))


def configuration(folder: Path, seed: int, feedback: Feedback, gate: Gate, taught: Taught) -> Config:
    """Configuration of the run; the branch's follows from it."""
    return Config(
        run=Run(dir=str(folder), seed=seed),
        policy=Policy(dim=48, layers=2, heads=2, kv_heads=1, head_dim=24, experts=4, top_k=2, expert_dim=48, vocab=480),
        engine=Engine(max_batch=16),
        algorithm=Algorithm(warmup_steps=1, constant_tokens=16),
        mid_training=MidTraining(tokens=taught.tokens, processes=1, batch_tokens=512, learning_rate=4e-3),
        curriculum=Curriculum(steps=0, staleness=1),
        trainer=Trainer(rescore=4, micro_tokens=4096, checkpoint_every=50),
        production=Production(
            limits=AgentLimits(max_turn_tokens=24, context_tokens=512), rollouts=("product",), idle_s=3600.0
        ),
        feedback=feedback,
        gate=gate,
    )


class Product:
    """The running product."""

    def __init__(self, server: Server, config: Config, bus: Bus, stack: AsyncExitStack) -> None:
        self.server, self.config, self.bus, self._stack = server, config, bus, stack
        self.run, self.branch = RUN, branch_name(RUN, config.feedback)
        self.actors: dict[str, Actor] = {}

    async def start(self, name: str, run: str, config: Config, id: str = "") -> Actor:
        """Start an actor with a connection of its own, in its role."""
        cls = load_class(name)
        bus = await Bus.connect(self.server.url, role=cls.role, credentials=self.server.credentials, node="n1")
        actor = cls(config, bus, run, id or name)
        self.actors[f"{run}/{actor.id}"] = actor
        self._stack.push_async_callback(self._end, actor)
        await actor.start()
        return actor

    async def _end(self, actor: Actor) -> None:
        await actor.shut(5.0)
        await actor.bus.close()

    async def end(self, run: str, id: str) -> None:
        """End one actor in the way its supervisor does."""
        await self._end(self.actors.pop(f"{run}/{id}"))

    def check(self) -> None:
        """Raise the error of an actor that has failed."""
        for actor in self.actors.values():
            if actor.failed.done():
                raise actor.failed.result()

    async def promote(self, version: int, branch: str = "") -> None:
        """Publish an operator's request."""
        where = EVENT.at(run=self.run, actor="operator", type=Promotion.type_name)
        async with await Bus.connect(self.server.url, role="operator", credentials=self.server.credentials) as bus:
            await bus.publish(where, Promotion(run=self.run, version=version, branch=branch, reason="by hand"))

    @cached_property
    def url(self) -> str:
        """The gateway's address."""
        return str(json.loads((Path(self.config.run.dir) / self.run / "gateway.json").read_text())["url"])


@asynccontextmanager
async def product(folder: Path, config: Config, taught: Taught) -> AsyncIterator[Product]:
    """Everything that `headrace up` starts for a product, in one process: with a branch, version 0 promoted; or, where
    the run itself trains on clients' sessions, with a curriculum."""
    made = bundle()
    home = folder / RUN
    home.mkdir(parents=True)
    (home / "tokenizer.json").write_text(made.tokenizer_json)
    (home / BUNDLE).write_bytes(msgspec.json.encode(made))
    await asyncio.to_thread(
        PolicyTrainer.prepare,
        config,
        home / "checkpoints",
        tokenizer_json=made.tokenizer_json,
        traces=lambda: traces(made, taught, config.run.seed),
    )
    async with Server(folder / "broker") as server, AsyncExitStack() as stack:
        admin = await stack.enter_async_context(
            await Bus.connect(server.url, role="admin", credentials=server.credentials)
        )
        await declare(admin)
        running = Product(server, config, admin, stack)
        for name in ("trainer", "weight_sender", "weight_receiver"):
            await running.start(name, RUN, config)
        await running.start("rollout", RUN, config, "product")
        await running.start("gateway", RUN, config)
        await running.start("feedback", RUN, config)
        own = config.tasks.suite == CLIENT_SUITE
        for name in () if own else ("trainer", "weight_sender", "weight_receiver"):
            await running.start(name, running.branch, branch_config(config, RUN))
        async for received in admin.follow("HR_EVENT", EVENT.where(run=RUN, actor="rollout", type="weights_swapped")):
            assert received.message.version == 0
            break
        if own:
            await running.start("curriculum", RUN, config)
            yield running
            return
        await running.promote(0)
        async for received in admin.follow("HR_EVENT", EVENT.where(run=RUN, actor="feedback", type="event")):
            if received.message.kind == "branch_opened":
                break
        yield running


class Users:
    """Clients of the product, over HTTP."""

    def __init__(self, product: Product, http: aiohttp.ClientSession) -> None:
        self.product, self.http = product, http

    @classmethod
    @asynccontextmanager
    async def of(cls, product: Product) -> AsyncIterator["Users"]:
        """Authorise requests with a key of a tenant that allows training."""
        server = product.server
        async with await Bus.connect(server.url, role="operator", credentials=server.credentials) as operator:
            key = await add(operator, "acme", training=True, requests_per_minute=10**6)
        async with aiohttp.ClientSession(headers={"x-api-key": key}) as http:
            yield cls(product, http)

    async def session(self, user: str, number: int) -> tuple[str, bool, str]:
        """One session of an agent that declares the tool: (its id, whether it ran the tests, its last text)."""
        messages: list[dict[str, Any]] = [{"role": "user", "content": ask(number)}]
        tool = {"type": "function", "function": {"name": TOOL.name, "parameters": TOOL.parameters}}
        tested = False
        while True:
            body = {"model": "latest", "messages": messages, "tools": [tool], "user": user}
            headers = {"x-session-id": f"{user}-{number}"}
            reply, session = await self._post("/v1/chat/completions", body, headers)
            said = reply["choices"][0]["message"]
            calls = said.get("tool_calls") or []
            if not calls or tested:
                return session, tested, str(said["content"] or "").strip()
            tested = any(call["function"]["name"] == TOOL.name for call in calls)
            messages.append({"role": "assistant", "content": said["content"] or "", "tool_calls": calls})
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": PASSED} for call in calls]

    async def rate(self, session: str, up: bool) -> None:
        """Send a rating of a session."""
        await self._post(f"/v1/sessions/{session}/feedback", {"thumb": "up" if up else "down"}, {})

    async def _post(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> tuple[dict[str, Any], str]:
        while True:
            async with self.http.post(f"{self.product.url}{path}", json=body, headers=headers) as answer:
                if answer.status == 503:  # a version that is not staged yet
                    self.product.check()
                    await asyncio.sleep(0.2)
                    continue
                reply: dict[str, Any] = await answer.json()
                if answer.status != 200:
                    raise RuntimeError(f"{path}: {answer.status} {reply}")
                return reply, answer.headers.get("X-Headrace-Session", "")
