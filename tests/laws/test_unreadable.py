"""Law 1: no record ends the run. Readers pass over what they cannot read, consumers make a dead letter of it."""

import asyncio
import contextlib
import itertools
import time
from pathlib import Path
from secrets import token_hex

import msgspec
import pytest

from headrace import config as c
from headrace.actors.registry import ACTORS, load_class
from headrace.bus.connection import Bus
from headrace.bus.runtime.actor import Actor
from headrace.dashboard.watch import Watch
from headrace.messages import subjects as s
from headrace.messages.operations import Event
from headrace.messages.product import Feedback, Promotion
from headrace.replay.audit import prove
from tests.conftest import Connect
from tests.support import mutations
from tests.support.actors import living
from tests.support.patience import PATIENCE_S
from tests.support.world import CONFIG

pytestmark = pytest.mark.anyio
QUIET_S = 0.3


async def pollute(bus: Bus, run: str, seed: int, every: int = 1) -> int:
    """Publish every n-th of the mutated records of every type; how many."""
    count = 0
    for record in itertools.islice(mutations.mutations(run, seed), 0, None, every):
        await bus.connection.send(record.subject, record.payload, record.headers)
        count += 1
    await bus.connection.flush()
    return count


async def quiet(bus: Bus) -> None:
    """Return when a connection has been silent for `QUIET_S`: its readers are at the end of their streams."""
    heard, before = bus.connection.client.stats["in_msgs"], -1
    while heard != before:
        await asyncio.sleep(QUIET_S)
        heard, before = bus.connection.client.stats["in_msgs"], heard


async def test_the_live_page_and_the_audit_pass_over_what_they_cannot_read(connect: Connect) -> None:
    """A half-written Promotion on a plain event's subject ended `headrace up`, and again at every resume."""
    run = f"r{token_hex(4)}"
    admin = await connect("admin")
    event = s.EVENT.at(run=run, actor="environment", type="event")
    await admin.publish_raw(event, b"\x81\xa3run\xa1r", {"Hr-Type": "promotion/1"})
    await admin.publish_raw(s.FAIL.at(run=run, group="a.b"), b"\x80", {"Hr-Type": "slot_failed/9"})
    whole = Promotion(run=run, version=3)
    await admin.publish(event, whole)
    await admin.publish_raw(s.STEP.at(run=run), bytes(100), {"Hr-Type": "step_done/1"})
    await admin.publish(event, Event(actor="curriculum", id="c", run=run, kind="run_finished"))
    dashboard = await connect("dashboard")
    async with asyncio.timeout(PATIENCE_S):
        await Watch(dashboard, run, c.Config(), time.time()).until_finished(lambda line: None)
    assert {record.reason for record in dashboard.skipped.values() if record.stream == "HR_EVENT"} == {
        "forged: a promotion of nobody, signed by admin",
    }
    report, wrong = await prove(await connect("operator"), run)
    assert (report.skipped_count, wrong) == (2, [])
    assert any("hr.fail" in line and "slot_failed/9" in line for line in report.skipped)


async def test_every_reader_of_every_stream_goes_on(connect: Connect) -> None:
    run = f"r{token_hex(4)}"
    admin = await connect("admin")
    expected = {(cls.type_name, record.subject) for cls, record in mutations.readable(run)}
    assert await pollute(admin, run, seed=1) > 1500
    for _, record in mutations.readable(run):
        await admin.publish_raw(record.subject, record.payload, record.headers)
    reader = await connect("admin")
    read: set[tuple[str, str]] = set()
    for stream in s.STREAMS:
        if stream.name in ("HR_BLOB", "HR_ADVISORY", "HR_TASK"):
            continue
        async for received in reader.history(stream.name, *stream.subjects):
            read.add((received.message.type_name, received.subject))
        last = await reader.last_seq(stream.name)
        async for received in reader.follow(stream.name, *stream.subjects):
            if received.seq >= last:
                break
    assert {(kind, place) for kind, place in expected if not place.startswith("hr.task.")} <= read
    assert reader.skipped_count > 1000 and len(reader.skipped) == reader.skipped_count
    assert {record.stream for record in reader.skipped.values()} >= {"HR_TRAJ", "HR_LEDGER", "HR_EVENT", "HR_WEIGHTS"}
    assert all(record.reason and record.subject for record in reader.skipped.values())


ACTORS_HERE = sorted(set(ACTORS) - {"search"})
"""All but the one that needs a model's files; it answers requests and reads no stream."""
NO_HISTORY = {"dead_letter", "environment", "scavenger"}
"""They get advisories, requests and live messages, and skip no record of a stream."""
ZEROS = bytes((8 << 20) - 4096)
"""As large as the broker takes, headers included."""


async def go_on(names: list[str], connect: Connect, folder: Path, seeds: range, every: int = 1) -> None:
    """Start actors on a run whose history is polluted, pollute it again, and see that none of them fails."""
    run = f"r{token_hex(4)}"
    admin = await connect("admin")
    machines = c.Environment(backend="process", warm=0)
    # Without a measurement before training: 248 episodes are not what this test is about.
    measured = c.Evaluation(before=False)
    few = c.Curriculum(group_size=2, groups_per_step=1, staleness=0, steps=1)  # a run goes on in spite of the records
    config = msgspec.structs.replace(
        CONFIG, run=c.Run(dir=str(folder)), environment=machines, evaluation=measured, curriculum=few
    )
    await pollute(admin, run, seeds[0], every)
    for subject in (s.EVENT.at(run=run, actor="environment", type="event"), s.FAIL.at(run=run, group="a.b")):
        await admin.publish_raw(subject, ZEROS, {"Hr-Type": "slot_failed/1"})
    rating = Feedback(tenant="t", user="u", run=run, trajectory="u.1-0-0", thumb="up")
    for user in ("", "a.b", "x" * 5000):  # no subject can hold it, and the rating's end would need one
        payload = msgspec.msgpack.encode(msgspec.to_builtins(rating) | {"user": user})
        await admin.publish_raw(s.FEEDBACK.at(tenant="t", user="u"), payload, {"Hr-Type": "feedback/1"})
    async with contextlib.AsyncExitStack() as stack:
        actors: list[Actor] = []
        for name in names:
            cls = load_class(name)
            actors.append(await stack.enter_async_context(living(cls, config, await connect(cls.role), run, name)))
        for seed in seeds[1:]:
            await pollute(admin, run, seed, every)
            for actor in actors:
                await quiet(actor.bus)
        async with asyncio.timeout(PATIENCE_S):
            while set(names) - NO_HISTORY and not any(actor.bus.skipped_count for actor in actors):
                await asyncio.sleep(QUIET_S)
        assert [actor.name() for actor in actors if actor.failed.done()] == []
        readers = {actor.name(): actor.bus.skipped_count for actor in actors}
    assert set(readers) == set(names)
    told = {
        r.message.actor
        for r in [r async for r in admin.history("HR_EVENT", s.EVENT.where(run=run, type="event"))]
        if isinstance(r.message, Event) and r.message.kind == "record_skipped"
    }
    assert told >= {name for name, count in readers.items() if count}


async def test_every_actor_goes_on(connect: Connect, tmp_path: Path) -> None:
    await go_on(ACTORS_HERE, connect, tmp_path, range(1, 3), every=9)


@pytest.mark.slow
@pytest.mark.parametrize("name", ACTORS_HERE)
async def test_every_actor_goes_on_through_all_of_it(name: str, connect: Connect, tmp_path: Path) -> None:
    await go_on([name], connect, tmp_path, range(1, 5))


async def test_an_unreadable_entry_of_a_bucket_is_passed_over(connect: Connect) -> None:
    """An unreadable session put the gateway into a restart loop, an unreadable presence ended `headrace status`."""
    admin = await connect("admin")
    state, key = await admin.kv("HR_ADMISSION"), f"trainer.r{token_hex(4)}.x"
    await admin.publish_raw(f"$KV.HR_ADMISSION.{key}", b"\xc1", {"Hr-Type": "rollout_request/1"})
    assert await state.get(key) is None and await state.keys(key) == [] and await state.items(key) == {}
    assert admin.skipped_count == 1
    watching = state.watch(key)
    change = asyncio.ensure_future(anext(watching))
    await state.put(key, Event(actor="a", id="a", kind="k"))
    name, value, _ = await asyncio.wait_for(change, PATIENCE_S)
    assert name == key and isinstance(value, Event)
    await watching.aclose()  # type: ignore[attr-defined]
