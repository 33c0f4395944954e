"""The search actor and adapters of the query's vector: it swaps between two requests, after a restart it reads the
current one, and it refuses those that do not fit."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from headrace.actors.search import Search
from headrace.bus.connection import Bus
from headrace.bus.errors import Denied
from headrace.messages.operations import Event
from headrace.messages.search import AdapterFigures, SearchAdapter, SearchAdapterVersion, SearchReply, adapter_key
from headrace.messages.subjects import EVENT
from headrace.search.adapters import versions
from headrace.search.adapters.adapter import Adapter, AdapterError, packed
from headrace.search.client import SearchClient
from headrace.search.models import read
from headrace.search.service import open_indexes
from tests.actors.test_search import FILES, Connect, config, request
from tests.support import embedding_model
from tests.support.actors import living
from tests.support.embedding_model import WIDTH

pytestmark = pytest.mark.anyio
GAIN = AdapterFigures(repositories=5, pairs=60, passes=1, losses=(2.0, 1.0), held_out=(), gain=0.2, low=0.1, high=0.3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedding_model.write(tmp_path_factory.mktemp("model"), [data.decode() for data in FILES.values()])


@pytest.fixture
def model(folder: Path) -> str:
    return open_indexes(read(folder), 32, None).identity


def adapter(model: str, seed: int, width: int = WIDTH, figures: AdapterFigures = GAIN) -> SearchAdapter:
    matrix = np.random.default_rng(seed).normal(size=(width, width)).astype(np.float32)
    return SearchAdapter(model=model, matrix=packed(matrix), figures=figures)


async def put(operator: Bus, run: str, made: SearchAdapter) -> None:
    """Publish without the checks of `versions.publish`."""
    version = SearchAdapterVersion(run=run, hash=made.hash, blob=await operator.put_blob(made))
    await (await operator.kv(versions.BUCKET)).put(adapter_key(run, made.hash), version)


class Events:
    """The events of a run's search actors about adapters, in order."""

    def __init__(self, bus: Bus, run: str) -> None:
        self._source = self._read(bus, run)

    async def _read(self, bus: Bus, run: str) -> AsyncIterator[Event]:
        async for received in bus.follow("HR_EVENT", EVENT.where(run=run, actor="search", type="event")):
            event = received.message
            if isinstance(event, Event) and event.kind.startswith("search_adapter"):
                yield event

    async def next(self) -> Event:
        return await anext(self._source)


async def test_a_swap_is_between_two_requests_and_a_restart_reads_the_current_one(
    connect: Connect, folder: Path, model: str, tmp_path: Path
) -> None:
    run, operator = "r-swap", await connect("operator")
    asker, events = SearchClient(await connect("rollout"), run), Events(await connect("dashboard"), run)
    first, second = adapter(model, 1), adapter(model, 2)
    async with living(Search, config(folder, tmp_path), await connect("search"), run) as actor:
        busy = threading.Event()
        asyncio.get_running_loop().run_in_executor(actor._vectors, busy.wait)
        taken = asyncio.create_task(actor._work.wait())
        under_way = asyncio.create_task(asker.ask(request(run=run)))
        await taken
        await versions.publish(operator, run, first)
        assert (await events.next()).data == {"model": f"{model}+{first.hash}"}
        busy.set()
        plain = await under_way
        assert (plain.mode, plain.model) == ("hybrid", model), "a request under way ends as it began"
        adapted = await asker.ask(request(run=run))
        assert adapted.model == f"{model}+{first.hash}" and adapted.hits != plain.hits
        assert (await asker.ask(request(run=run, model=model))).hits == plain.hits
        assert (await asker.ask(request(run=run, mode="keyword"))).model == model, "words alone use no vector"
        unknown = await asker.ask(request(run=run, model=f"{model}+{second.hash}"))
        assert (unknown.failure, unknown.detail) == ("unknown_model", f"{model}+{second.hash}")
        await versions.publish(operator, run, second)
        await events.next()
        assert (await asker.ask(request(run=run))).model == f"{model}+{second.hash}"
    async with living(Search, config(folder, tmp_path), await connect("search"), run):
        assert (await asker.ask(request(run=run))).model == f"{model}+{second.hash}"
        assert (await events.next()).data == {"model": f"{model}+{second.hash}"}
        for left in (f"{model}+{first.hash}", model):  # an earlier version, then none
            await versions.withdraw(operator, run)
            assert (await events.next()).data == {"model": left}
            reply = await asker.ask(request(run=run))
            assert reply.model == left
    assert isinstance(reply, SearchReply) and reply.hits == plain.hits


async def test_an_adapter_that_does_not_fit_is_refused_with_an_event(
    connect: Connect, folder: Path, model: str, tmp_path: Path
) -> None:
    run, operator = "r-refuse", await connect("operator")
    asker, events = SearchClient(await connect("rollout"), run), Events(await connect("dashboard"), run)
    other = adapter("0123456789abcdef-int8-32", 3)
    bad = {
        "belongs to the model 0123456789abcdef-int8-32": other,
        "is for vectors of 32 numbers, and the model's have 64": adapter(model, 4, WIDTH // 2),
        "the low end is not above 0": adapter(model, 5, figures=msgspec.structs.replace(GAIN, low=0.0)),
    }
    good = adapter(model, 6)
    async with living(Search, config(folder, tmp_path), await connect("search"), run):
        await versions.publish(operator, run, good)
        await events.next()
        for why, made in bad.items():
            await put(operator, run, made)
            refused = await events.next()
            assert (refused.kind, refused.data) == ("search_adapter_refused", {"adapter": made.hash})
            assert why in refused.text
            assert (await asker.ask(request(run=run))).model == f"{model}+{good.hash}"
        with pytest.raises(AdapterError, match="belongs to the model 0123"):
            await versions.publish(operator, run, other)
    async with living(Search, config(folder, tmp_path), await connect("search"), run):
        assert [(await events.next()).kind for _ in range(4)] == ["search_adapter_refused"] * 3 + ["search_adapter"]
        assert (await asker.ask(request(run=run))).model == f"{model}+{good.hash}"


async def test_only_an_operator_publishes(connect: Connect, model: str) -> None:
    with pytest.raises(Denied):
        await versions.publish(await connect("rollout"), "r-denied", adapter(model, 7))


async def test_bytes_that_are_another_adapter_s_are_refused(connect: Connect, model: str) -> None:
    operator, made = await connect("operator"), adapter(model, 8)
    blob = await operator.put_blob(adapter(model, 9))
    with pytest.raises(AdapterError, match="another content under its name"):
        await versions.read(operator, SearchAdapterVersion(run="r", hash=made.hash, blob=blob))
    missing = msgspec.structs.replace(blob, sha256="0" * 64)
    with pytest.raises(AdapterError, match="is not on the bus any more"):
        await versions.read(operator, SearchAdapterVersion(run="r", hash=made.hash, blob=missing))
    with pytest.raises(AdapterError, match="not finite"):
        Adapter(msgspec.structs.replace(made, matrix=packed(np.full((2, 2), np.nan, np.float32))), model)
