"""Streamed turns through the whole path with the embedded engine: tokens as they are sampled, the record as without a
stream, and turns that end with their clients."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.actors.rollout.actor import Rollout
from headrace.actors.rollout.client_turns import _Parts
from headrace.config import AgentLimits, Config
from headrace.engines.embedded.engine import EmbeddedEngine
from headrace.messages.base import Message
from headrace.messages.product import (
    ClientMessage,
    ClientTool,
    ClientTurn,
    ClientTurnDone,
    ClientTurnPart,
    ClientUsage,
)
from headrace.messages.rollout import TurnSampled
from headrace.messages.subjects import RPC, TURN, token
from headrace.rendering.native.live import Settled
from tests.actors.rollout.test_client_turns import TOOL, Client, client_of, config, model, run
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.events import events, streamed, whole
from tests.support.patience import PATIENCE_S

__all__ = ["client", "model", "run"]
pytestmark = pytest.mark.anyio
LONG = 1500
SEED = 1
"""Tokens of a turn that is cut long before its end."""


def long(folder: Path) -> Config:
    made = config(folder)
    return msgspec.structs.replace(
        made,
        production=msgspec.structs.replace(
            made.production, limits=AgentLimits(max_turn_tokens=LONG, context_tokens=2048)
        ),
    )


@pytest.fixture
async def client(connect: Connect, tmp_path: Path, run: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    """Turns are as long as they may be: no token that ends a turn comes early with this seed."""
    monkeypatch.setattr("headrace.gateway.serving.secrets.randbits", lambda bits: SEED)
    async with client_of(long(tmp_path), connect, tmp_path, run) as opened:
        yield opened


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "mean of xs"}],
        "stream_options": {"include_usage": True},
        "tools": [{"type": "function", "function": TOOL}],
    },
    "/v1/messages": {"messages": [{"role": "user", "content": "mean of xs"}], "max_tokens": LONG},
    "/v1/responses": {"input": "mean of xs"},
}


async def test_a_stream_has_the_answer_and_the_record_of_a_turn_without_one(
    connect: Connect, client: Client, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(secrets, "randbits", lambda bits: seeds[-1])
    client.http.headers["session-id"] = "s0"
    async with living(Rollout, config(tmp_path), await connect("rollout", node="n1"), run, "product"):
        for path, body in BODIES.items():
            for seed in range(3):
                seeds.append(seed)
                answers = []
                for stream in (False, True):
                    client.http.headers["session-id"] = secrets.token_hex(4)
                    asked = body | {"model": "latest", "stream": stream}
                    async with client.http.post(client.url + path, json=asked) as answer:
                        assert answer.status == 200
                        data = await answer.read()
                    answers.append(streamed(path, data) if stream else whole(path, json.loads(data)))
                assert answers[0] == answers[1] and answers[0].usage[2] > 0


async def _both(connect: Connect, run: str, folder: Path, count: int) -> None:
    """Ask for turns with and without a stream; compare parts, answers and records."""
    gateway, observer = await connect("gateway"), await connect("admin")
    subject = RPC.at(service="rollout", caller="gateway", method=f"turn-{token(run)}")
    made = config(folder)
    made = msgspec.structs.replace(
        made,
        production=msgspec.structs.replace(
            made.production, limits=AgentLimits(max_turn_tokens=24, context_tokens=2048)
        ),
    )
    async with living(Rollout, made, await connect("rollout", node="n1"), run, "product"):

        async def ask(number: int, stream: bool) -> tuple[ClientTurnDone, list[Message]]:
            parts: list[Message] = []
            turn = ClientTurn(
                run=run,
                group=f"{'a' * 20}.{'s' if stream else 'w'}{number}",
                messages=(ClientMessage(role="user", text=f"mean of xs {number}"),),
                tools=(ClientTool(name="read"),),
                seed=number,
                context_tokens=2048,
                stream=stream,
            )
            done = await gateway.request(subject, turn, timeout=PATIENCE_S, on_part=parts.append)
            assert isinstance(done, ClientTurnDone) and not done.failed
            return done, parts

        for first in range(0, count, 16):
            numbers = range(first, min(first + 16, count))
            both = await asyncio.gather(*(ask(n, stream) for n in numbers for stream in (False, True)))
            for (plain, nothing), (told, parts) in zip(both[::2], both[1::2], strict=True):

                def comparable(done: ClientTurnDone) -> ClientTurnDone:
                    calls = tuple(msgspec.structs.replace(call, id="") for call in done.calls)
                    return msgspec.structs.replace(done, calls=calls)

                assert comparable(plain) == comparable(told) and not nothing and parts
                heard = [part for part in parts if isinstance(part, ClientTurnPart)]
                assert [part.number for part in heard] == list(range(len(parts)))
                assert told.text.startswith("".join(part.text for part in heard))
                assert told.thinking.startswith("".join(part.thinking for part in heard))
    records: dict[str, TurnSampled] = {}
    async for received in observer.history("HR_TURN", TURN.where(run=run, trajectory=">")):
        if isinstance(received.message, TurnSampled):
            records[received.message.trajectory.partition(".")[2]] = received.message
    for number in range(count):
        one, other = records[f"w{number}-0-0"].turn, records[f"s{number}-0-0"].turn
        assert (one.ids, one.logprobs, one.routed, one.spans, one.stop) == (
            other.ids,
            other.logprobs,
            other.routed,
            other.spans,
            other.stop,
        )


async def test_streaming_does_not_change_what_is_sampled(connect: Connect, run: str, tmp_path: Path) -> None:
    await _both(connect, run, tmp_path, 32)


@pytest.mark.slow
async def test_streaming_does_not_change_a_thousand_turns(connect: Connect, run: str, tmp_path: Path) -> None:
    await _both(connect, run, tmp_path, 1000)


@pytest.mark.parametrize("path", BODIES)
async def test_a_token_is_at_the_client_while_the_turn_is_sampled(
    connect: Connect, client: Client, run: str, tmp_path: Path, path: str
) -> None:
    async with living(Rollout, long(tmp_path), await connect("rollout", node="n1"), run, "product") as actor:
        asked = BODIES[path] | {"model": "latest", "stream": True}
        async with client.http.post(client.url + path, json=asked) as answer:
            data = b""
            while b"delta" not in data:
                data += await answer.content.readany()
            engine = actor._policies.engine
            assert isinstance(engine, EmbeddedEngine) and engine.stats()["running"] == 1
            assert list(events(data[: data.rindex(b"\n\n") + 2]))
    # The client has left in the middle of its turn.
    await is_cut(connect, run, actor)


async def is_cut(connect: Connect, run: str, actor: Rollout) -> None:
    observer = await connect("admin")
    async for received in observer.follow("HR_TURN", TURN.where(run=run, trajectory=">")):
        record = received.message
        assert isinstance(record, TurnSampled)
        assert record.turn.stop == "abort" and 0 < len(record.turn.ids) < LONG, len(record.turn.ids)
        assert len(record.turn.logprobs) == len(record.turn.ids)
        break


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_frees_its_place_in_the_engine(
    connect: Connect, client: Client, run: str, tmp_path: Path, stream: bool
) -> None:
    body = {"model": "latest", "messages": client.messages, "stream": stream}
    async with living(Rollout, long(tmp_path), await connect("rollout", node="n1"), run, "product") as actor:
        client.http.headers["session-id"] = "s1"
        turn = asyncio.create_task(client.http.post(f"{client.url}/v1/chat/completions", json=body))
        while not (actor._policies.engine is not None and actor._clients._under_way):
            await asyncio.sleep(0)
        engine = actor._policies.engine
        assert isinstance(engine, EmbeddedEngine)
        while engine.stats()["sampled"] < 3:
            await engine.unpin(-1)  # answered between two steps
        if stream:
            (await turn).close()
        else:
            turn.cancel()
        while engine.stats()["running"]:
            await engine.unpin(-1)
        assert engine.stats()["sampled"] < LONG
        await is_cut(connect, run, actor)
        # The session goes on: the turn that its client does not have is in no context.
        short = body | {"max_tokens": 4, "stream": False}
        async with client.http.post(f"{client.url}/v1/chat/completions", json=short) as answer:
            assert answer.status == 200
        assert not actor._clients._under_way


async def test_an_error_after_the_first_byte_comes_in_the_dialects_own_form(
    connect: Connect, client: Client, run: str, tmp_path: Path
) -> None:
    ends: list[dict[str, Any]] = []
    for path, body in BODIES.items():
        async with living(Rollout, long(tmp_path), await connect("rollout", node="n1"), run, "product") as actor:
            client.http.headers["session-id"] = secrets.token_hex(4)
            async with client.http.post(client.url + path, json=body | {"model": "latest", "stream": True}) as answer:
                assert answer.status == 200
                await answer.content.readany()
                engine = actor._policies.engine
                assert engine is not None
                await engine.stop()
                data = await answer.content.read()
        assert b"HTTP/1.1" not in data
        ends.append(list(events(data))[-1])
    chat, messages, responses = ends
    assert chat["error"]["message"].startswith("the engine could not sample")
    assert messages["type"] == "error" and messages["error"]["type"] == "api_error"
    assert responses["type"] == "response.failed" and responses["response"]["status"] == "failed"


def test_thinking_behind_text_waits_for_the_answer() -> None:
    """A dialect of blocks would have to open a second block of text behind it."""
    turn = ClientTurn(run="r", group="u.s", messages=(), stream=True)
    parts = _Parts(turn, 0, ClientUsage(prompt=1))
    readings = [("Hm.", ""), ("Hm.", "I look"), ("Hm.\nSo.", "I look at"), ("Hm.\nSo.", "I look at it.")]
    made = [parts.next(Settled(thinking=thinking, text=text), 1) for thinking, text in readings]
    assert [(part.thinking, part.text) for part in made if part is not None] == [
        ("Hm.", ""),
        ("", "I look"),
        ("", " at"),
        ("", " it."),
    ]
