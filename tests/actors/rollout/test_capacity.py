"""Capacity that a handed-back attempt still holds, and the lanes that a rollout actor pulls."""

import asyncio
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from headrace.actors.environment.actor import Environment
from headrace.actors.rollout import episode
from headrace.actors.rollout.actor import Rollout
from headrace.config import Environment as Section
from headrace.config import Rollout as Credit
from headrace.messages.rollout import SlotFailed, Trajectory, TurnSampled
from headrace.messages.sandbox import ANY_RUN, Acquire
from headrace.messages.subjects import EVENT, FAIL, TASK, TRAJ, TURN
from headrace.sandboxes.client import Sandboxes
from tests.actors.rollout.test_actor import GATED, config, everything, first, gated_suite, issue, request
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.anyio


async def test_a_request_that_waits_for_room_lets_the_holder_of_that_room_pass(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode, "CAPACITY_WAIT_S", 0.3)
    gated_suite(tmp_path)
    observer = await connect("admin")
    narrow = msgspec.structs.replace(
        config(tmp_path),
        environment=Section(backend="process", lease_s=100.0, max_vms=1, judge_share=0, slots_per_vm=1),
        rollout=Credit(credit=1),
    )
    async with living(Environment, narrow, await connect("environment", node="n1"), ANY_RUN):
        async with living(Rollout, narrow, await connect("rollout"), "capacity", "leaving"):
            await issue(observer, request("capacity", "g1", suite=GATED))
            await first(observer, "HR_TURN", TURN.at(run="capacity", trajectory="g1-0-0"), TurnSampled)
            await issue(observer, request("capacity", "g2", policy="idle"))
        # g1 was handed back behind g2, and still holds the only machine.
        (tmp_path / "gate").touch()
        async with living(Rollout, narrow, await connect("rollout"), "capacity", "heir"):
            async with asyncio.timeout(PATIENCE_S):
                end = await first(observer, "HR_TRAJ", TRAJ.at(run="capacity", group="g1"), Trajectory)
                await first(observer, "HR_TRAJ", TRAJ.at(run="capacity", group="g2"), Trajectory)
    assert end.rollout == "heir" and end.outcome == "finished"
    assert await everything(observer, "HR_LEDGER", FAIL.where(run="capacity")) == []


async def test_a_request_without_room_goes_round_the_queue_ever_more_slowly(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_s, seen = 0.1, 6
    monkeypatch.setattr(episode, "CAPACITY_WAIT_S", wait_s)
    observer = await connect("admin")
    narrow = msgspec.structs.replace(
        config(tmp_path),
        environment=Section(backend="process", lease_s=100.0, max_vms=1, judge_share=0, slots_per_vm=1),
    )
    async with living(Environment, narrow, await connect("environment", node="n1"), ANY_RUN):
        holder = Sandboxes(await connect("rollout"), 100.0)
        taken = await holder.acquire(
            Acquire(
                run="round",
                lane="train",
                role="rollout",
                group="other",
                slot=0,
                attempt=0,
                isolation="episode",
                files={},
                lease_s=100.0,
            )
        )
        times: list[float] = []
        async with living(Rollout, narrow, await connect("rollout"), "round", "r1"):
            await issue(observer, request("round", "g1", policy="idle"))
            async with asyncio.timeout(PATIENCE_S):
                async for received in observer.follow("HR_EVENT", EVENT.where(run="round", actor="rollout")):
                    if getattr(received.message, "kind", "") == "handed_back":
                        times.append(received.time)
                    if len(times) == seen:
                        break
                gaps = [later - earlier for earlier, later in pairwise(times)]
                for handovers, gap in enumerate(gaps, 1):
                    assert gap > 0.9 * wait_s * 2 ** min(handovers, episode.DOUBLED), gaps
                await holder.release(taken)
                await first(observer, "HR_TRAJ", TRAJ.at(run="round", group="g1"), Trajectory)
    assert await everything(observer, "HR_LEDGER", FAIL.where(run="round")) == []


@pytest.mark.parametrize("node", [False, True])
async def test_a_request_that_never_gets_a_sandbox_fails_with_what_to_do(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: bool
) -> None:
    """Waits add up over hand-overs. A full node does not count as a missing node, so only the longer wait ends the
    attempt."""
    monkeypatch.setattr(episode, "CAPACITY_WAIT_S", 0.1)
    run = f"never{int(node)}"
    observer = await connect("admin")
    section = Section(backend="process", lease_s=100.0, max_vms=1, judge_share=0, slots_per_vm=1)
    waits = Credit(node_wait_s=1.5, wait_s=5.0 if node else 1e6)  # a try may take two seconds
    narrow = msgspec.structs.replace(config(tmp_path), environment=section, rollout=waits)
    async with AsyncExitStack() as actors:
        if node:
            await actors.enter_async_context(
                living(Environment, narrow, await connect("environment", node="n1"), ANY_RUN)
            )
            await Sandboxes(await connect("rollout"), 100.0).acquire(
                Acquire(
                    run=run,
                    lane="train",
                    role="rollout",
                    group="other",
                    slot=0,
                    attempt=0,
                    isolation="episode",
                    files={},
                    lease_s=100.0,
                )
            )
        await actors.enter_async_context(living(Rollout, narrow, await connect("rollout"), run, "r1"))
        await issue(observer, request(run, "g1", policy="idle"))
        failed = await first(observer, "HR_LEDGER", FAIL.at(run=run, group="g1"), SlotFailed)
    assert failed.reason == ("no_capacity" if node else "no_environment")
    assert (
        "[environment] max_vms" if node else f"headrace actor environment --config TOML --run {run}"
    ) in failed.detail
    backs = [m for m in await everything(observer, "HR_EVENT", EVENT.where(run=run)) if m.kind == "handed_back"]
    assert backs, "it ended without a hand-over"


async def test_a_short_silence_of_all_nodes_fails_no_request_that_waited_long_for_capacity(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes that start again answer nothing for seconds; the time that a request waited before does not count."""
    monkeypatch.setattr(episode, "CAPACITY_WAIT_S", 0.1)
    observer = await connect("admin")
    settings = msgspec.structs.replace(
        config(tmp_path), environment=Section(backend="process", lease_s=100.0), rollout=Credit(node_wait_s=60.0)
    )
    async with living(Rollout, settings, await connect("rollout"), "short", "r1"):
        waited = msgspec.structs.replace(request("short", "g1", policy="idle"), waited_s=100.0)
        await issue(observer, waited)
        async with asyncio.timeout(PATIENCE_S):
            async for received in observer.follow("HR_EVENT", EVENT.where(run="short", actor="rollout")):
                if getattr(received.message, "kind", "") == "handed_back":
                    break
        async with living(Environment, settings, await connect("environment", node="n1"), ANY_RUN):
            async with asyncio.timeout(PATIENCE_S):
                await first(observer, "HR_TRAJ", TRAJ.at(run="short", group="g1"), Trajectory)
    assert await everything(observer, "HR_LEDGER", FAIL.where(run="short")) == []


async def test_a_rollout_pulls_the_configured_lanes_and_leaves_the_others(connect: Connect, tmp_path: Path) -> None:
    """`headrace eval` of a finished run does not run a user's request that was left in the queue."""
    observer = await connect("admin")
    evaluating = msgspec.structs.replace(config(tmp_path), rollout=Credit(lanes=("eval",)))
    async with (
        living(Environment, evaluating, await connect("environment", node="n1"), ANY_RUN),
        living(Rollout, evaluating, await connect("rollout"), "lanes", "r1"),
    ):
        await issue(observer, request("lanes", "u1.left", policy="idle", lane="production"))
        await issue(observer, request("lanes", "g1", policy="idle", lane="train"))
        await issue(observer, request("lanes", "e1", policy="idle", lane="eval"))
        async with asyncio.timeout(PATIENCE_S):
            await first(observer, "HR_TRAJ", TRAJ.at(run="lanes", group="e1"), Trajectory)
        for lane in ("production", "train"):
            assert await observer.last("HR_TASK", TASK.where(run="lanes", lane=lane)) is not None, lane
        assert await everything(observer, "HR_TURN", TURN.where(run="lanes", trajectory="u1.*")) == []
