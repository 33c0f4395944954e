"""The curriculum over a real broker, with a counterpart that fills slots and takes steps."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from secrets import token_hex

import pytest

from headrace import config as c
from headrace.actors import curriculum
from headrace.actors.curriculum import Curriculum
from headrace.bus.connection import Bus
from headrace.bus.errors import WrongSequence
from headrace.cli import status
from headrace.ledger.training import TaskOrder
from headrace.messages.evaluation import EvalRequest, EvalResult
from headrace.messages.ledger import Admission, BoundAsked, GroupClosed, GroupDropped, SlotIssued, admission_key
from headrace.messages.operations import DeadLetter, Event, Heartbeat
from headrace.messages.subjects import CLOSE, DLQ, EVENT, LEDGER, STEP, TASK
from headrace.messages.training import StepDone
from headrace.messages.weights import WeightsSwapped
from headrace.replay.audit import prove
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.fake_workers import FakeWorkers
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.anyio


def config(steps: int = 3, before: int = 0, after: int = 0, **own: object) -> c.Config:
    fields = {"group_size": 2, "groups_per_step": 2, "staleness": 1, "steps": steps, **own}
    return c.Config(
        curriculum=c.Curriculum(**fields),  # type: ignore[arg-type]
        evaluation=c.Evaluation(heldout_tasks=before or after, unseen_tasks=0, before=bool(before), after=bool(after)),
    )


def new_run() -> str:
    return f"r{token_hex(4)}"


@asynccontextmanager
async def world(connect: Connect, run: str, bound: int = 1) -> AsyncIterator[FakeWorkers]:
    """A counterpart with a queue of requests and a served version 0."""
    other = FakeWorkers(await connect(), run, groups_per_step=2, bound=bound)
    await other.start()
    await other.serve(0)
    yield other
    await other.stop()


async def until_finished(bus: Bus, run: str, steps: int = 0) -> None:
    """Until the run has ended with at least so many steps."""
    async with asyncio.timeout(PATIENCE_S):
        async for received in bus.follow("HR_EVENT", EVENT.where(run=run, actor="curriculum", type="event")):
            if received.message.kind == "run_finished" and received.message.data["steps"] >= steps:
                return


async def ledger(bus: Bus, run: str) -> list[SlotIssued]:
    messages = [received.message async for received in bus.history("HR_LEDGER", LEDGER.where(run=run))]
    return [message for message in messages if isinstance(message, SlotIssued)]


async def closings(bus: Bus, run: str) -> list[GroupClosed | GroupDropped]:
    messages = [received.message async for received in bus.history("HR_SCORE", CLOSE.where(run=run))]
    return [message for message in messages if isinstance(message, GroupClosed | GroupDropped)]


async def test_a_run_from_version_0_to_its_last_step(connect: Connect) -> None:
    run = new_run()
    async with world(connect, run) as other:
        other.answer = other.solve
        other.train = True
        async with living(Curriculum, config(steps=3), await connect("curriculum"), run) as actor:
            await until_finished(other.bus, run)
            assert actor.state.problems == []
        issued = await ledger(other.bus, run)
        ends = await closings(other.bus, run)
    assert len(issued) == 3 * 2 * 2
    assert len({(slot.group, slot.slot) for slot in issued}) == 12
    assert len({slot.seed for slot in issued}) == 12
    assert all(isinstance(end, GroupClosed) and len(end.slots) == 2 for end in ends)
    assert len(ends) == 6
    assert [slot.min_version for slot in issued if slot.slot == 0] == [0, 0, 0, 0, 1, 1]
    tasks = TaskOrder([str(n) for n in range(10)], 1)
    assert sorted(tasks[n] for n in range(10)) == sorted(str(n) for n in range(10))


async def test_a_run_that_ended_goes_on_with_more_steps(connect: Connect) -> None:
    run = new_run()
    async with world(connect, run) as other:
        other.answer = other.solve
        other.train = True
        for steps in (1, 2):
            async with living(Curriculum, config(steps=steps), await connect("curriculum"), run):
                await until_finished(other.bus, run, steps)
        where = EVENT.where(run=run, actor="curriculum", type="event")
        told = [r.message async for r in other.bus.history("HR_EVENT", where)]
    learning, last = "reinforcement learning", "final evaluation"
    phases = [(message.text, message.data.get("steps")) for message in told if message.kind == "phase"]
    assert phases == [(learning, 0), (last, None), (learning, 1), (last, None)]


async def test_requests_wait_for_credit_and_engines_learn_what_to_serve(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curriculum, "LAGGARD_S", 0.0)
    run = new_run()
    async with world(connect, run) as other:
        async with living(Curriculum, config(), await connect("curriculum"), run) as actor:
            asked = [await other.next_request() for _ in range(8)]
            assert {request.group for request in asked} == {f"g{n:06d}" for n in range(4)}
            for request in asked:
                await other.solve(request)
            await other.closed(4)
            assert other.requests.empty(), "no credit before a step"
            await other.step()
            late = [await other.next_request() for _ in range(4)]
            presence = await other.bus.kv("HR_PRESENCE")
            slow = WeightsSwapped(run=run, rollout="slow", node="n1", version=0, state_hash="h", pause_ms=0.1)
            actor._ledger.hear(slow, 0.0)
            assert await actor._oldest_served() == -1, "it does not live"
            await presence.put("rollout.slow", Heartbeat(actor="rollout", id="slow", node="n1", pid=1, state="running"))
            assert await actor._oldest_served() == 0
            await presence.delete("rollout.slow")
        told = [r.message async for r in other.bus.history("HR_EVENT", EVENT.where(run=run, type="event"))]
        behind = [message.text for message in told if message.kind == "replica_behind"]
        assert behind == ["slow on n1 serves version 0, the train lane asks for 1"]
        assert {(request.group, request.min_version) for request in late} == {("g000004", 1), ("g000005", 1)}
        admission = await (await other.bus.kv("HR_ADMISSION")).get(admission_key(run))
    assert admission is not None
    assert isinstance(admission[0], Admission)
    assert admission[0].min_version == 1


async def test_a_failed_slot_comes_again_and_three_failures_drop_the_group(connect: Connect) -> None:
    run = new_run()
    async with world(connect, run) as other:
        async with living(Curriculum, config(), await connect("curriculum"), run):
            asked = [await other.next_request() for _ in range(8)]
            bad = next(request for request in asked if request.group == "g000001" and request.slot == 0)
            for attempt in range(3):
                await other.fail(bad, "sandbox_lost")
                if attempt < 2:
                    bad = await other.next_request()
                    assert (bad.group, bad.slot, bad.attempt) == ("g000001", 0, attempt + 1)
            for request in asked:
                if request.group == "g000001" and request.slot == 1:
                    await other.solve(request)
            fresh = [await other.next_request() for _ in range(2)]
        assert {request.group for request in fresh} == {"g000004"}
        ends = await closings(other.bus, run)
    assert [(end.group, end.reason) for end in ends if isinstance(end, GroupDropped)] == [("g000001", "infra")]


async def test_a_dead_letter_of_a_request_counts_as_a_failure(connect: Connect) -> None:
    run = new_run()
    async with world(connect, run) as other:
        async with living(Curriculum, config(), await connect("curriculum"), run):
            dead = await other.next_request()
            where = TASK.at(run=run, lane="train", suite="generated-train")
            letter = DeadLetter(
                stream="HR_TASK",
                consumer=f"rollout-{run}-train",
                stream_seq=1,
                subject=where,
                type="rollout_request",
                reason="poison",
                deliveries=5,
                headers={"Nats-Msg-Id": f"{run}.{dead.trajectory}"},
                payload=b"?",
            )
            await other.bus.publish(DLQ.at(stream="hr_task", consumer=f"rollout-{run}-train"), letter)
            again = await other.request_for(dead.group, dead.slot, dead.attempt + 1)
    assert again.task == dead.task
    assert again.seed != dead.seed


async def test_a_successor_goes_on_where_the_killed_one_was(connect: Connect) -> None:
    """The curriculum is killed twice without a shutdown; its counterpart continues in between."""
    run = new_run()
    async with world(connect, run) as other:
        other.train = True
        first = Curriculum(config(steps=4), await connect("curriculum"), run, "c-1")
        await first.start()
        held = [await other.next_request() for _ in range(8)]
        kill(first)
        for request in held[:5]:
            await other.solve(request)
        second = Curriculum(config(steps=4), await connect("curriculum"), run, "c-2")
        await second.start()
        await other.solve(held[5])
        await other.closed(2)
        kill(second)
        other.answer = other.solve
        for request in held[6:]:
            await other.solve(request)
        async with living(Curriculum, config(steps=4), await connect("curriculum"), run, "c-3") as third:
            await until_finished(other.bus, run)
            assert third.state.problems == []
        issued = await ledger(other.bus, run)
        ends = await closings(other.bus, run)
        steps = [r.message async for r in other.bus.history("HR_STEP", STEP.at(run=run))]
    assert len(issued) == len({(slot.group, slot.slot, slot.attempt) for slot in issued}) == 16
    assert len(ends) == 8
    assert [step.step for step in steps if isinstance(step, StepDone)] == [0, 1, 2, 3]


def kill(actor: Curriculum) -> None:
    """Like kill -9: the tasks end at once, and nothing is published."""
    for task in list(actor._tasks):
        task.cancel()


async def test_a_zombie_is_refused_at_its_first_write(connect: Connect) -> None:
    run = new_run()
    async with world(connect, run) as other:
        old = Curriculum(config(steps=4), await connect("curriculum"), run, "c-old")
        await old.start()
        asked = [await other.next_request() for _ in range(8)]
        kill(old)  # stopped, not dead: its state is unchanged
        async with living(Curriculum, config(steps=4), await connect("curriculum"), run, "c-new"):
            before = await ledger(other.bus, run)
            again = [issued for issued in before if issued.group == "g000000" and issued.slot == 0]
            stale = type(again[0])(**{f: getattr(again[0], f) for f in again[0].__struct_fields__} | {"attempt": 1})
            with pytest.raises(WrongSequence):
                await old._issue([stale])
            for request in asked[:2]:
                await other.solve(request)
            await other.closed(1)
            with pytest.raises(WrongSequence):
                await old._close(GroupDropped(run=run, group="g000001", reason="cancelled", group_size=2))
            assert await ledger(other.bus, run) == before
        await asyncio.gather(old.shut(1))
        assert [type(end) for end in await closings(other.bus, run)] == [GroupClosed]


async def test_a_zombie_that_wakes_up_stands_down_and_says_so(connect: Connect) -> None:
    run = new_run()
    async with world(connect, run) as other:
        async with living(Curriculum, config(steps=4), await connect("curriculum"), run, "c-old") as old:
            asked = [await other.next_request() for _ in range(8)]
            async with living(Curriculum, config(steps=4), await connect("curriculum"), run, "c-new"):
                # Both read the failure, and both try to issue the slot again.
                await other.fail(asked[0], "sandbox_lost")
                again = await other.request_for(asked[0].group, asked[0].slot, 1)
                assert again.attempt == 1
                async for received in other.bus.follow("HR_EVENT", EVENT.where(run=run, actor="curriculum")):
                    if isinstance(received.message, Event) and received.message.kind == "superseded":
                        assert received.message.id == "c-old"
                        break
                assert old.status == "superseded"
        issued = await ledger(other.bus, run)
    assert len(issued) == 9


async def test_evaluations_are_asked_for_once_and_end_the_run(connect: Connect) -> None:
    run = new_run()
    async with world(connect, run) as other:
        other.answer = other.solve
        other.train = True
        where = EVENT.where(run=run, actor="curriculum", type="eval_request")
        bus = await connect("curriculum")
        async with living(Curriculum, config(steps=1, before=8, after=8), bus, run):
            await other.stepped(1)
            asked: list[EvalRequest] = []
            async for received in other.bus.follow("HR_EVENT", where):
                asked.append(received.message)
                if len(asked) == 3:
                    break
        assert [(ask.reason, ask.policy.version, ask.sampling.temperature) for ask in asked] == [
            ("heldout_before", 0, 1.0),
            ("heldout_after_t1", 1, 1.0),
            ("heldout_after_greedy", 1, 0.0),
        ]
        # Restarted before the answers exist: it does not request again, and ends when they arrive.
        async with living(Curriculum, config(steps=1, before=8, after=8), await connect("curriculum"), run):
            for ask in asked:
                result = EvalResult(
                    id=ask.id,
                    run=run,
                    suite=ask.suite,
                    policy=ask.policy,
                    version=ask.policy.version,
                    tasks=8,
                    passed=4,
                    rate=0.5,
                    infra_failures=0,
                )
                await other.bus.publish(EVENT.at(run=run, actor="evaluator", type="eval_result"), result)
            await until_finished(other.bus, run)
        assert len([r async for r in other.bus.history("HR_EVENT", where)]) == 3


async def test_an_operator_changes_the_bound_and_the_audit_reads_it_from_the_streams(connect: Connect) -> None:
    run, steps = new_run(), 14
    async with world(connect, run) as other:
        operator = await connect("operator")
        first = Curriculum(config(steps), await connect("curriculum"), run, "c-1")
        await first.start()
        held = [await other.next_request() for _ in range(8)]
        await status.change(operator, run, 3)
        held += [await other.next_request() for _ in range(8)]
        kill(first)
        # A successor with another configuration: the streams decide, and no request is carried out twice.
        async with living(Curriculum, config(steps, staleness=0), await connect("curriculum"), run, "c-2"):
            for request in held:
                await other.solve(request)
            other.answer = other.solve
            while other.steps < steps:
                await other.closed(2 * (other.steps + 1))
                await other.step()
                if other.steps == 3:
                    await status.change(operator, run, 0)
            await until_finished(other.bus, run)
        report, wrong = await prove(operator, run)
        said = [r.message async for r in other.bus.history("HR_SCORE", CLOSE.at(run=run, group="bound"))]
        issued = await ledger(other.bus, run)
    assert wrong == []
    assert [record.bound for record in said] == [1, 3, 0]
    assert said[1].first_batch == 0, "no place was taken yet"
    strict = [slot for slot in issued if slot.index >= 2 * said[2].first_batch]
    assert strict and all(slot.min_version == slot.index // 2 for slot in strict)
    assert report.staleness_bound == 3
    assert "stale" not in report.dropped, "a smaller bound waits for what was issued before"


async def test_a_bound_that_makes_no_sense_is_refused_and_said(connect: Connect) -> None:
    run = new_run()
    async with world(connect, run) as other, living(Curriculum, config(), await connect("curriculum"), run):
        await other.next_request()
        operator = await connect("operator")
        await operator.publish(
            EVENT.at(run=run, actor="operator", type="bound_asked"), BoundAsked(run=run, bound=10_000)
        )
        async for received in other.bus.follow("HR_EVENT", EVENT.where(run=run, actor="curriculum", type="event")):
            if received.message.kind == "bound_refused":
                assert "from 0 to 64, got 10000" in received.message.text
                break
        said = [r.message.bound async for r in other.bus.history("HR_SCORE", CLOSE.at(run=run, group="bound"))]
    assert said == [1]


async def test_a_run_ends_only_when_its_last_version_is_on_the_wire(connect: Connect) -> None:
    run = new_run()
    async with world(connect, run) as other:
        other.answer = other.solve
        async with living(Curriculum, config(steps=1), await connect("curriculum"), run):
            await other.closed(2)
            serve, other.serve = other.serve, no_version  # type: ignore[assignment, method-assign]
            await other.step()
            async for received in other.bus.follow("HR_EVENT", EVENT.where(run=run, actor="curriculum", type="event")):
                if received.message.text == "final evaluation":
                    break
            await serve(1)
            await until_finished(other.bus, run)
        told = [r.message async for r in other.bus.history("HR_EVENT", EVENT.where(run=run, actor="*"))]
    swapped = [n for n, message in enumerate(told) if getattr(message, "version", 0) == 1]
    finished = [n for n, message in enumerate(told) if getattr(message, "kind", "") == "run_finished"]
    assert swapped and finished and swapped[0] < finished[0]


async def no_version(_: int) -> None:
    """A sender that publishes versions slowly."""
