"""Bytes of JSON of a turn: a reply holds the turn's tokens once, whatever the context's length."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from headrace.engines.base import SampleRequest
from headrace.engines.server.engine import OneServer
from headrace.messages.rollout import Span
from tests.support import tiny
from tests.support.engines import Versions, request
from tests.support.sglang.double import Double, Request
from tests.support.sglang.requests import attached

pytestmark = pytest.mark.anyio

CONFIG = msgspec.structs.replace(tiny.config(), max_positions=1 << 17)
SLOW = [pytest.mark.slow, pytest.mark.timeout(1200)]


class Counting(Double):
    """Remembers the bytes of every event that it sends."""

    def __init__(self) -> None:
        super().__init__(CONFIG)
        self.info = {"context_length": 1 << 17}
        self.events: list[int] = []

    def _reply(self, one: Request) -> dict[str, Any]:
        reply = super()._reply(one)
        self.events.append(len(json.dumps(reply)))
        return reply


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    return Versions(CONFIG, tmp_path_factory.mktemp("versions"), exact=False)


async def turn(engine: OneServer, double: Counting, asked: SampleRequest) -> tuple[int, int, int, tuple[int, ...]]:
    """Bytes of the request, of all events and of the last event; and the sampled ids."""
    double.events.clear()
    sample = await engine.sample(asked)
    return len(json.dumps(double.bodies("/generate")[-1])), sum(double.events), double.events[-1], sample.ids


@pytest.mark.parametrize("tokens", [256, pytest.param(8192, marks=SLOW)])
async def test_a_long_turn_costs_at_most_twice_the_bytes_of_its_tokens(
    versions: Versions, tmp_path: Path, tokens: int
) -> None:
    double = Counting()
    async with attached(versions, tmp_path, double=double, deadline_s=1200.0) as (engine, _):
        asked, events, last, ids = await turn(engine, double, request(tokens=tokens))
    assert len(ids) == tokens
    print(f"{tokens} tokens: request {asked}, {len(double.events)} events {events}, tokens {last} bytes")
    assert asked + events <= 2 * last


@pytest.mark.parametrize("contexts", [(128, 1024), pytest.param((1024, 8192, 32768), marks=SLOW)])
async def test_the_bytes_of_a_reply_do_not_grow_with_the_context(
    versions: Versions, tmp_path: Path, contexts: tuple[int, ...]
) -> None:
    replies: list[int] = []
    for context in contexts:
        double = Counting()
        async with attached(versions, tmp_path / str(context), double=double, deadline_s=1200.0) as (engine, _):
            ids = tuple(5 + place % 300 for place in range(context))
            *_, sampled = await turn(engine, double, request(ids=ids, tokens=4))
            again = (*ids, *sampled, *range(5, 21))
            asked, events, _, _ = await turn(engine, double, request(ids=again, tokens=16))
        print(f"context {context}: request {asked}, reply {events} bytes")
        replies.append(events)
        assert asked <= 800 + 5 * len(again), "the API needs the whole context; an id here has at most three digits"
    assert max(replies) <= 1.1 * min(replies)


async def test_after_a_swap_a_reply_has_the_routes_of_new_positions_alone(versions: Versions, tmp_path: Path) -> None:
    """The context is forwarded again as a whole, and the spans say so."""
    double, context, rows, replies = Counting(), tuple(5 + place % 300 for place in range(512)), [0], []
    async with attached(versions, tmp_path, double=double) as (engine, _):
        for version in range(3):
            await versions.load(engine, version)
            double.events.clear()
            sample = await engine.sample(msgspec.structs.replace(request(ids=context, tokens=4), routed=sum(rows)))
            assert sample.spans == (Span(0, len(context) + 3, version),)
            assert sample.routed is not None and sample.routed_start == (sum(rows) or UNSET)
            rows.append(len(sample.routed))
            replies.append(sum(double.events))
            context = (*context, *sample.ids, *range(5, 21))
    print(f"rows of routes {rows[1:]}, replies of {replies} bytes")
    assert rows[1:] == [515, 20, 20]
    assert max(replies[1:]) < replies[0] / 8
