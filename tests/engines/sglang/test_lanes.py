"""Production and training on one server (a double): who goes first, whose requests are there, how it is given back."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.actors.environment.actor import Environment
from headrace.actors.rollout.actor import Rollout
from headrace.actors.rollout.server import ServerReports
from headrace.actors.scavenger.actor import LENT, OWN
from headrace.config import Config, Production
from headrace.engines.base import SampleRequest
from headrace.engines.server.backend import Load, Requests
from headrace.engines.server.engine import OneServer
from headrace.engines.server.load import Admission
from headrace.engines.sglang.metrics import by_priority, outside
from headrace.messages.codec import decode
from headrace.messages.product import CapacityLease, Traffic
from headrace.messages.rollout import Lane
from headrace.messages.sandbox import ANY_RUN
from headrace.messages.subjects import EVENT, FAIL, TRAFFIC
from headrace.weights import tensor_state
from tests.actors.rollout.test_actor import event, waiting
from tests.actors.rollout.test_policies import end_of, issue
from tests.conftest import Connect
from tests.engines.sglang.test_rollout import POLICY, config, section
from tests.support import tiny
from tests.support.actors import living
from tests.support.engines import Record, Versions, request
from tests.support.sglang.double import Double
from tests.support.sglang.record import asked, raw
from tests.support.sglang.requests import attached
from tests.support.staged import prepare, stage

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    return Versions(tiny.config(), tmp_path_factory.mktemp("versions"), exact=False)


def on(lane: Lane, name: str, tokens: int = 8) -> SampleRequest:
    return msgspec.structs.replace(request(name, ids=(len(name), 2, 3), tokens=tokens), lane=lane)


PAGE = """# HELP sglang:num_requests_total Number of requests processed.
# TYPE sglang:num_requests_total counter
sglang:num_requests_total{is_streaming="false",model_name="a b",priority="1"} 4.0
sglang:num_requests_total{is_streaming="true",model_name="a b",priority="1"} 1.0
sglang:num_requests_total{is_streaming="false",model_name="a b",priority="0"} 7.0
sglang:num_requests_total{is_streaming="true",model_name="a b",priority="-100"} 90.0
# TYPE sglang:queue_time_seconds histogram
sglang:queue_time_seconds_bucket{le="0.1",priority="0"} 12.0
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="a b",priority="",tp_rank="0"} 8.0
sglang:num_running_reqs{model_name="a b",priority="-100",tp_rank="0"} 5.0
sglang:num_running_reqs{model_name="a b",priority="0",tp_rank="0"} 2.0
sglang:num_running_reqs{model_name="a b",priority="1",tp_rank="0"} 1.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{model_name="a b",priority="",tp_rank="0"} 3.0
sglang:num_queue_reqs{model_name="a b",priority="-100",tp_rank="0"} 2.0
"""


def test_others_are_what_is_left_of_all() -> None:
    assert outside(PAGE) == Requests(running=2, queued=1, done=7)
    assert by_priority(PAGE)["-100"] == Requests(5, 2, 90) and by_priority(PAGE)[""] == Requests(8, 3, 0)
    assert outside("") == Requests()
    before = PAGE.replace('priority="-100",tp_rank="0"} 5', 'priority="-100",tp_rank="0"} 9')
    assert outside(before).running == 0, "gauges of one page may be of two moments"


async def test_production_takes_no_place_from_training_nor_waits_for_one() -> None:
    async def ask() -> Load:
        return Load()

    admission, entered, leave = Admission(2, ask), [], asyncio.Event()

    async def guest(name: str, first: bool) -> None:
        async with admission.place(first):
            entered.append(name)
            await leave.wait()

    async with admission.place(), admission.place():
        works = [asyncio.create_task(guest("train", False))]
        await asyncio.sleep(0)
        works += [asyncio.create_task(guest(f"user{index}", True)) for index in range(3)]
        await asyncio.sleep(0)
        assert entered == ["user0", "user1"], "beside a full server, up to the allowance"
    await asyncio.sleep(0)
    assert entered == ["user0", "user1"] and admission.waiting == 2, "training waits for production that waits"
    leave.set()
    await asyncio.gather(*works)
    assert entered == ["user0", "user1", "user2", "train"] and admission.inside == 0


class Counting(Admission):
    """Counts how often a request looks for a place."""

    looks = 0

    def _may_enter(self, first: bool) -> bool:
        self.looks += 1
        return super()._may_enter(first)


async def nothing() -> Load:
    return Load()


async def test_hundreds_of_requests_enter_in_order_and_wake_one_another_once() -> None:
    """If each entry and exit woke all that wait, n requests would look n x n times for a place."""
    count = 512
    admission, entered = Counting(16, nothing), list[int]()

    async def guest(number: int) -> None:
        async with admission.place():
            entered.append(number)
            await asyncio.sleep(0)

    await asyncio.gather(*map(guest, range(count)))
    assert entered == list(range(count)) and (admission.inside, admission.waiting) == (0, 0)
    assert admission.looks <= 4 * count


async def test_a_place_of_a_request_that_is_cancelled_goes_to_the_next() -> None:
    admission, entered = Admission(1, nothing), list[str]()

    async def guest(name: str, first: bool = False) -> None:
        async with admission.place(first):
            entered.append(name)

    async with admission.place(first=True):
        names = ("user", "user too", "training")
        works = {name: asyncio.create_task(guest(name, first=name != "training")) for name in names}
        await asyncio.sleep(0)
        works["user too"].cancel()  # while it waits
        await asyncio.sleep(0)
    assert admission.inside == 1 and not entered, "the place is the user's, who has not run yet"
    works["user"].cancel()  # after it was admitted
    await works["training"]
    assert works["user"].cancelled() and works["user too"].cancelled()
    assert (entered, admission.inside, admission.waiting) == (["training"], 0, 0)


async def test_a_turn_of_production_takes_the_place_of_one_of_training(versions: Versions, tmp_path: Path) -> None:
    async with attached(versions, tmp_path, running=1) as (engine, double):
        await double.let_go(hold_at=4)
        record = Record(temperature=1.0)
        training = asyncio.create_task(engine.sample(on("train", "learner")))
        await double.until(lambda: any(len(active.out) == 4 for active in double.running))
        user = await engine.sample(on("production", "user", tokens=4))
        assert len(user.ids) == 4 and not training.done(), "it ran while the training turn was held"
        assert [body["priority"] for body in double.bodies("/generate")] == [-100, 1]
        await double.let_go()
        sample = await training
        record.add([7, 2, 3], sample, versions.config)
        assert len(sample.ids) == 8 and engine.counts["retracted"] == 1
        scored = record.score(versions).tolist()
        assert max(abs(a - b) for a, b in zip(scored, record.logprobs, strict=True)) < 1e-4


async def test_a_server_without_priorities_has_no_word_about_others(versions: Versions, tmp_path: Path) -> None:
    async with attached(versions, tmp_path) as (engine, double):
        assert await engine.outside() == Requests()
        double.info = {"enable_priority_scheduling": False}
        await engine.attach()
        assert await engine.outside() is None
        await engine.sample(request())
        assert "priority" not in double.bodies("/generate")[-1], "it would mean nothing there"


async def test_what_others_ask_of_the_server_is_traffic(connect: Connect, versions: Versions, tmp_path: Path) -> None:
    bus, reader = await connect("rollout"), await connect("scavenger")
    heard: asyncio.Queue[Traffic] = asyncio.Queue()
    events: list[str] = []

    async def hear(raw: Any) -> None:
        message = decode(raw.data, raw.headers)
        assert isinstance(message, Traffic)
        heard.put_nowait(message)

    async def event(kind: str, text: str, level: str) -> None:
        events.append(kind)

    figures: dict[str, float] = {}

    async def metric(**values: float) -> None:
        figures.update(values)

    await reader.listen_raw(TRAFFIC.where(), hear)
    async with attached(versions, tmp_path) as (engine, double):
        reports = ServerReports(Config(production=Production(rollouts=("mine",))), bus, "mine", event, metric)
        await double.let_go(hold_at=2)
        theirs = asyncio.create_task(raw(double.url, "/generate", asked([1, 2], 4)))
        ours = asyncio.create_task(engine.sample(on("train", "ours")))
        await double.until(lambda: len([active for active in double.running if len(active.out) == 2]) == 2)
        await reports.publish(engine)
        said = await heard.get()
        assert (said.server, said.active, said.waiting, said.region) == ("mine", 1, 0, "local")
        await double.let_go()
        await asyncio.gather(theirs, ours)
        await reports.publish(engine)
        said = await heard.get()
        assert said.active == 0 and said.requests_per_s > 0
        assert figures["server_sampled"] == 8 and not events
        assert {type(value) for value in figures.values()} == {float}, "a metric holds nothing else"
        await double.die()
        await reports.publish(engine)
        assert heard.empty(), "a server that is gone says nothing"


@pytest.fixture
async def double() -> AsyncIterator[Double]:
    one = Double(POLICY)
    one.info = {"context_length": 8192}
    await one.start()
    yield one
    await one.close()


async def test_a_lent_server_is_given_back_in_the_middle_of_a_turn_and_nothing_is_lost(
    connect: Connect, double: Double, tmp_path: Path
) -> None:
    file = tmp_path / "0.safetensors"
    digest = tensor_state.write(file, tiny.model(POLICY, exact=False, seed=0).state())
    observer, leases = await connect("admin"), await (await connect("scavenger")).kv("HR_LEASE")

    async def lend(lanes: tuple[str, ...]) -> None:
        await leases.put("s7.lent", CapacityLease(rollout="lent", lanes=lanes, reason="test", since=0.0))

    settings = config(tmp_path, section(double, tmp_path))
    await prepare(connect, "s7")
    await stage(observer, "s7", "here", 0, str(file), digest)
    await lend(LENT)
    await double.let_go(hold_at=2)
    async with (
        living(Environment, settings, await connect("environment", node="n1"), ANY_RUN),
        living(Rollout, settings, await connect("rollout", node="here"), "s7", "lent") as actor,
    ):
        for group in ("g1", "g2"):
            await issue(observer, "s7", group)
        await double.until(lambda: len([active for active in double.running if len(active.out) == 2]) == 2)
        await lend(OWN)
        await double.until(lambda: not double.running and not double.queue)
        await event(observer, "s7", "handed_back")
        engine = actor._policies.engine
        assert isinstance(engine, OneServer)
        await double.let_go()
        assert len((await engine.sample(on("production", "user"))).ids) == 8
        while (back := await waiting(observer, "s7")) is None or not back.handovers:
            await asyncio.sleep(0.01)
        await lend(LENT)
        ends = [await end_of(observer, "s7", group) for group in ("g1", "g2")]
    assert all(end.turns and end.attempt == 0 for end in ends)
    assert [r async for r in observer.history("HR_LEDGER", FAIL.where(run="s7"))] == []
    swaps = [r async for r in observer.history("HR_EVENT", EVENT.where(run="s7", type="weights_swapped"))]
    assert len(swaps) == 1, "the weights stayed where they were"
