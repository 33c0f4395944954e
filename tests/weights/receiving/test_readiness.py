"""The readiness ledger, as curriculum, trainer and operator read it from the stream."""

from secrets import token_hex

import pytest

from headrace.cli import status
from headrace.messages.base import Message
from headrace.messages.operations import Heartbeat
from headrace.messages.subjects import EVENT
from headrace.messages.weights import WeightHead, WeightsStaged, WeightsSwapped
from headrace.weights.receiving import readiness
from headrace.weights.receiving.readiness import ReadinessLedger
from tests.conftest import Connect

pytestmark = pytest.mark.anyio


def staged(version: int, node: str = "n1", region: str = "eu", *, run: str = "r", state: str = "") -> WeightsStaged:
    return WeightsStaged(
        run=run, node=node, region=region, version=version, path="/x", state_hash=state or f"h{version}", stage_s=0.5
    )


def swapped(version: int, rollout: str = "a", node: str = "n1", *, run: str = "r") -> WeightsSwapped:
    return WeightsSwapped(run=run, rollout=rollout, node=node, version=version, state_hash=f"h{version}", pause_ms=2.0)


def test_a_replica_has_its_nodes_region_and_the_time_of_its_swap() -> None:
    ledger = ReadinessLedger()
    assert ledger.oldest() is None and not ledger.copies
    assert ledger.hear(staged(3), 10.0)
    assert ledger.hear(swapped(3), 11.0)
    assert ledger.hear(swapped(2, "b", "n9"), 12.0)
    first, second = sorted(ledger.replicas(), key=lambda replica: replica.replica)
    assert (first.region, first.version, first.since) == ("eu", 3, 11.0)
    assert (second.region, second.version) == ("", 2)
    assert (ledger.oldest(), ledger.oldest({"a"})) == (2, 3)
    assert ledger.regions() == ["", "eu"]


def test_the_same_news_twice_keeps_the_first_time() -> None:
    """A restarted receiver announces again what it finds; a restarted engine loads the same version."""
    ledger = ReadinessLedger()
    ledger.hear(staged(3), 10.0)
    ledger.hear(swapped(3), 11.0)
    assert not ledger.hear(staged(3), 20.0)
    assert not ledger.hear(swapped(3), 21.0)
    assert (ledger.copies["n1"].since, ledger.replicas()[0].since) == (10.0, 11.0)
    assert ledger.hear(staged(3, state="other bits"), 30.0), "a new incarnation of the number"


def test_an_old_version_staged_for_an_evaluation_is_not_a_step_back() -> None:
    ledger = ReadinessLedger()
    ledger.hear(staged(5), 10.0)
    assert not ledger.hear(staged(1), 11.0)
    assert ledger.copies["n1"].version == 5
    ledger.hear(staged(4, "n2"), 12.0)
    assert {node: copy.version for node, copy in ledger.copies.items()} == {"n1": 5, "n2": 4}


def test_a_laggard_is_told_once_until_it_has_caught_up() -> None:
    ledger, laggards = ReadinessLedger(), readiness.Laggards(30.0)
    ledger.hear(swapped(4, "a"), 0.0)
    ledger.hear(swapped(3, "b"), 0.0)
    ledger.hear(swapped(2, "dead"), 0.0)
    alive = {"a", "b"}
    assert laggards.overdue(ledger, alive, 3, 0.0) == []
    assert laggards.overdue(ledger, alive, 4, 100.0) == [], "since now"
    assert [late.replica for late in laggards.overdue(ledger, alive, 4, 130.0)] == ["b"]
    assert laggards.overdue(ledger, alive, 4, 200.0) == []
    assert [late.replica for late in laggards.overdue(ledger, alive | {"dead"}, 4, 201.0)] == []
    ledger.hear(swapped(4, "b"), 202.0)
    assert laggards.overdue(ledger, alive, 4, 203.0) == []
    assert laggards.overdue(ledger, alive, 5, 300.0) == []
    assert [late.replica for late in laggards.overdue(ledger, alive, 5, 330.0)] == ["a", "b"]


async def test_curriculum_and_trainer_see_it_and_an_operator_gets_a_table(
    connect: Connect,
) -> None:
    run = f"r{token_hex(4)}"
    receiver, rollout = await connect("weight_sync"), await connect("rollout")

    async def say(message: Message) -> None:
        bus = receiver if isinstance(message, WeightsStaged) else rollout
        await bus.publish(EVENT.at(run=run, actor=bus.role, type=message.type_name), message)

    await say(staged(0, run=run))
    await say(staged(1, "n2", "us", run=run))
    await say(swapped(0, "rollout-a", run=run))
    await say(swapped(1, "rollout-b", "n2", run=run))
    for role in ("curriculum", "trainer"):
        ledger = await readiness.read(await connect(role), run)
        assert {(r.region, r.replica): r.version for r in ledger.replicas()} == {
            ("eu", "rollout-a"): 0,
            ("us", "rollout-b"): 1,
        }
        seen = 0
        async for ledger in readiness.follow(await connect(role), run):
            seen += 1
            if ledger.oldest() == 0 and len(ledger.replicas()) == 2:
                break
        assert seen == 4
    head = WeightHead(run=run, version=1, manifest_seq=1, state_hash="h1", full_version=0)
    await receiver.publish(f"hr.weights.{run}.head", head)
    beat = Heartbeat(actor="rollout", id="rollout-a", node="n1", pid=1, state="running")
    await (await rollout.kv("HR_PRESENCE")).put("rollout.rollout-a", beat)
    operator = await connect("operator")
    report = await status.look(operator, run)
    assert (report.newest, report.ledger.regions(), report.alive) == (1, ["eu", "us"], {"rollout-a"})
    assert [[copy.version for copy in report.nodes(region)] for region in ("eu", "us")] == [[0], [1]]
    lines = status.table(report).splitlines()
    assert lines[0].endswith("newest version 1")
    assert [line.split()[:4] for line in lines[2:4]] == [["eu", "n1", "(holds)", "0"], ["eu", "n1", "rollout-a", "0"]]
    assert "rollout-b (gone)" in lines[5]
    assert status.summary(report) == [
        "version 1 in eu: held by 0 of 1 nodes, served by 0 of 1 replicas, the oldest served is 0",
        "version 1 in us: held by 1 of 1 nodes",
    ]
    assert "no node has staged" in status.table(await status.look(operator, "none"))
