"""Nodes that serve other bytes than they should, over a real broker and real HTTP: no byte of them is used, an event
names each, and the version comes from another node."""

import gzip
from collections.abc import Mapping

import pytest
from aiohttp import web

from headrace.actors.weight_receiver import WeightReceiver
from headrace.weights import snapshot
from tests.actors.weights.test_peers import events, published, run
from tests.conftest import Connect
from tests.support.patience import PATIENCE_S
from tests.support.peer_double import Answer, peer
from tests.support.weight_runs import WeightRun, within

__all__ = ["run"]
pytestmark = pytest.mark.anyio


async def page(request: web.Request, body: bytes) -> web.StreamResponse:
    return web.Response(status=200, body=b"<html>" + body, content_type="text/html")


async def page_as_range(request: web.Request, body: bytes) -> web.StreamResponse:
    return web.Response(status=206, body=(b"<html>sign in</html>" * len(body))[: len(body)], content_type="text/html")


async def packed(request: web.Request, body: bytes) -> web.StreamResponse:
    return web.Response(status=206, body=gzip.compress(body, 1), headers={"Content-Encoding": "gzip"})


async def bomb(request: web.Request, body: bytes) -> web.StreamResponse:
    zeros = gzip.compress(bytes(1 << 26), 9) * 64
    return web.Response(status=206, body=zeros, headers={"Content-Encoding": "gzip"})


async def another_range(request: web.Request, body: bytes) -> web.StreamResponse:
    return web.Response(status=206, body=body[1:] + body[:1])


async def endless(request: web.Request, body: bytes) -> web.StreamResponse:
    response = web.StreamResponse(status=206)
    await response.prepare(request)
    while request.transport is not None and not request.transport.is_closing():
        await response.write(bytes(1 << 20))
    return response


async def nothing(request: web.Request, body: bytes) -> web.StreamResponse:
    return web.Response(status=206, body=b"")


ANSWERS: Mapping[str, Answer] = {
    each.__name__: each for each in (page, page_as_range, packed, bomb, another_range, endless, nothing)
}


@pytest.mark.parametrize(
    "way", [each if each in ("page", "packed") else pytest.param(each, marks=pytest.mark.slow) for each in ANSWERS]
)
async def test_what_it_sends_is_not_used(run: WeightRun, connect: Connect, way: str) -> None:
    path, held = await published(run)
    bus = await connect("weight_sync")
    async with (
        peer(bus, run.id, path, held, node="hostile") as hostile,
        peer(bus, run.id, path, held, node="far", region="elsewhere"),
    ):
        hostile.instead = ANSWERS[way]
        await run.actor(WeightReceiver)
        staged = await within(PATIENCE_S, run.staged(0))
    assert snapshot.file_hash(staged.path) == run.hashes[0]
    assert "node hostile" in (await events(run, "source_failed"))[0]
