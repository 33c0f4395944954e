"""The turn log on a real broker: a successor reads all turns, and only one of two holders can write."""

import pytest

from headrace.actors.rollout.publication import message_id, publish
from headrace.actors.rollout.turn_log import ResumeState, TurnLog
from headrace.bus.errors import WrongSequence
from headrace.messages.base import Array
from headrace.messages.codec import encode
from headrace.messages.rollout import PolicyRef, Sampling, ToolCall, ToolResult, Trajectory, Turn
from headrace.messages.sandbox import Snapshot
from headrace.messages.subjects import TRAJ
from headrace.messages.tasks import TaskRef
from tests.conftest import Connect

pytestmark = pytest.mark.anyio


def turn(index: int) -> Turn:
    return Turn(
        index=index,
        segment=0,
        prompt_ids=Array.of([1, 2], "<i4"),
        ids=Array.of([3], "<i4"),
        logprobs=Array.of([-0.5], "<f4"),
        calls=(ToolCall(id=f"{index}.0", name="run_tests"),),
    )


def trajectory(group: str, slot: int) -> Trajectory:
    return Trajectory(
        run="r1",
        lane="train",
        group=group,
        slot=slot,
        attempt=0,
        id=f"{group}-{slot}-0",
        task=TaskRef("toy", "1"),
        family="toy",
        seed=1,
        policy=PolicyRef(),
        sampling=Sampling(),
        outcome="finished",
        turns=(turn(0),),
        diff={},
    )


RESULTS = (ToolResult(call_id="0.0", ok=True, output="fine"),)


async def test_a_fresh_attempt_has_no_past(connect: Connect) -> None:
    log = TurnLog(await connect("rollout"), "r1", "g0", "g0-0-0")
    assert await log.read() == ResumeState()


async def test_a_successor_reads_every_turn_and_goes_on_writing(connect: Connect) -> None:
    bus = await connect("rollout")
    first = TurnLog(bus, "r1", "g1", "g1-0-0")
    await first.sampled(turn(0), "node", "box", "fp")
    step = Snapshot(diff={"a": b"1"}, deleted=("b",))
    await first.done(0, RESULTS, step)
    await first.sampled(turn(1), "node", "box", "fp")

    second = TurnLog(bus, "r1", "g1", "g1-0-0")
    resume = await second.read()
    assert [t.index for t in resume.turns] == [0, 1]
    assert resume.turns[0].results == RESULTS and resume.turns[1].results == ()
    assert (resume.node, resume.sandbox, resume.finished, resume.steps) == ("node", "box", False, (step,))
    await second.done(1, RESULTS)
    await second.flush()
    assert (await TurnLog(bus, "r1", "g1", "g1-0-0").read()).turns[1].results == RESULTS


async def test_of_two_holders_one_is_refused(connect: Connect) -> None:
    bus = await connect("rollout")
    old, new = TurnLog(bus, "r1", "g2", "g2-0-0"), TurnLog(bus, "r1", "g2", "g2-0-0")
    await old.sampled(turn(0), "node", "box", "fp")
    await new.read()
    await new.done(0, RESULTS)
    await new.sampled(turn(1), "node", "box", "fp")
    await old.done(0, RESULTS)
    with pytest.raises(WrongSequence):
        await old.flush()
    with pytest.raises(WrongSequence):
        await TurnLog(bus, "r1", "g2", "g2-0-0").sampled(turn(0), "node", "box", "fp")
    assert [t.index for t in (await TurnLog(bus, "r1", "g2", "g2-0-0").read()).turns] == [0, 1]


async def test_a_published_trajectory_ends_the_attempt(connect: Connect) -> None:
    bus = await connect("rollout")
    log = TurnLog(bus, "r1", "g3", "g3-1-0")
    await log.sampled(turn(0), "node", "box", "fp")
    await publish(bus, trajectory("g3", slot=1))
    assert (await TurnLog(bus, "r1", "g3", "g3-1-0").read()).finished
    other = TurnLog(bus, "r1", "g3", "g3-0-0")
    await other.sampled(turn(0), "node", "box", "fp")
    assert not (await TurnLog(bus, "r1", "g3", "g3-0-0").read()).finished


async def test_a_resumption_decodes_no_trajectory_of_its_group(connect: Connect) -> None:
    """A group of n slots that is handed back would decode n x n trajectories. A record that nobody can decode shows
    that none is: a reader that decodes counts it as skipped."""
    bus = await connect("rollout")
    subject = TRAJ.at(run="r1", group="g4")
    _, headers = encode(trajectory("g4", 0))
    for slot in range(2):
        await bus.publish_raw(subject, b"no trajectory", headers, msg_id=message_id("r1", f"g4-{slot}-0"))
    for slot in (1, 2):
        await TurnLog(bus, "r1", "g4", f"g4-{slot}-0").sampled(turn(0), "node", "box", "fp")
    assert (await TurnLog(bus, "r1", "g4", "g4-1-0").read()).finished
    assert not (await TurnLog(bus, "r1", "g4", "g4-2-0").read()).finished
    assert bus.skipped_count == 0
