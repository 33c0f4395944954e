"""The broker enforces who may publish what; a refusal is a clear error at once, not a timeout."""

import asyncio
from secrets import token_hex

import pytest

from headrace.bus import permissions
from headrace.bus.errors import Denied
from headrace.messages import subjects as s
from headrace.messages.operations import Event
from headrace.messages.subjects import covers
from tests.conftest import Connect

pytestmark = pytest.mark.anyio


def event() -> Event:
    return Event(actor="a", id="a-1", kind="test")


def concrete(subject: s.Subject, **fields: str) -> str:
    """A subject of a family with every field filled."""
    tokens = [fields.get(t.strip("{}"), "x") if t.startswith("{") else t for t in subject.template.split(".")]
    return ".".join(tokens)


TABLE = [subject for subject in s.SUBJECTS.values() if s.stream_of(subject.where()) is not None]


@pytest.mark.parametrize("role", [*permissions.ACTORS, *permissions.READERS])
async def test_each_role_publishes_its_row_and_nothing_else(connect: Connect, role: str) -> None:
    """Every stream subject is tried by every role against the broker: stored, or Denied, as the table says."""
    bus = await connect(role)
    run = f"r{token_hex(4)}"
    for subject in TABLE:
        if subject in (s.EVENT, s.BLOB, s.ADVISORY):
            continue
        where = concrete(subject, run=run, tenant=run)
        if role in subject.publishers:
            assert await bus.publish(where, event()) > 0
        else:
            with pytest.raises(Denied, match=f"role '{role}' may not publish on {where}"):
                await bus.publish(where, event())
    with pytest.raises(Denied):
        await bus.publish(concrete(s.ADVISORY), event())
    other = "trainer" if role != "trainer" else "judge"
    await bus.publish(s.EVENT.at(run=run, actor=role, type="event"), event())
    with pytest.raises(Denied):
        await bus.publish(s.EVENT.at(run=run, actor=other, type="event"), event())
    if role != "trainer":
        with pytest.raises(Denied):
            await bus.publish(s.EVENT.at(run=run, actor=role, type="snapshot_ready"), event())


@pytest.mark.parametrize("role", [*permissions.ACTORS, *permissions.READERS])
async def test_only_trainer_and_feedback_purge_and_nobody_deletes_streams(connect: Connect, role: str) -> None:
    bus = await connect(role)
    for stream in s.STREAMS:
        if stream.name in permissions.PURGES.get(role, ()):
            assert await bus.purge(stream.name, subject="hr.nothing") == 0
        else:
            with pytest.raises(Denied):
                await bus.purge(stream.name, subject="hr.nothing")
    for verb in ("STREAM.DELETE.HR_TRAJ", "STREAM.UPDATE.HR_TRAJ", "STREAM.CREATE.MINE", "STREAM.MSG.DELETE.HR_TRAJ"):
        with pytest.raises(Denied):
            await bus.link.api(verb, {"name": "HR_TRAJ", "seq": 1})


async def test_only_rollouts_pull_work_and_only_readers_read(connect: Connect) -> None:
    judge, environment = await connect("judge"), await connect("environment")
    config = {"stream_name": "HR_TASK", "config": {"durable_name": "thief", "ack_policy": "explicit"}}
    with pytest.raises(Denied):
        await judge.link.api("CONSUMER.CREATE.HR_TASK.thief", config)
    with pytest.raises(Denied):
        await environment.get("HR_TRAJ", 1)
    with pytest.raises(Denied):
        await (await connect("dashboard")).last("HR_FEEDBACK", "hr.feedback.>")


async def test_buckets_have_writers_too(connect: Connect) -> None:
    judge, scavenger = await connect("judge"), await connect("scavenger")
    curriculum = await connect("curriculum")
    assert await (await scavenger.kv("HR_LEASE")).put("rollout-1", event()) > 0
    assert await (await judge.kv("HR_LEASE")).get("rollout-1") is not None
    with pytest.raises(Denied):
        await (await judge.kv("HR_LEASE")).put("rollout-1", event())
    assert await (await curriculum.kv("HR_STATE")).put("admission.r1", event()) > 0
    with pytest.raises(Denied):
        await (await curriculum.kv("HR_STATE")).put("trainer.r1", event())
    assert await (await judge.kv("HR_PRESENCE")).put("judge.j1", event()) > 0
    with pytest.raises(Denied):
        await (await judge.kv("HR_PRESENCE")).put("trainer.t1", event())


async def test_nobody_hears_what_is_not_for_him(connect: Connect) -> None:
    judge = await connect("judge")

    async def hear(_: object) -> None:
        raise AssertionError

    for subject in ("_INBOX.trainer.>", "hr.rpc.environment.>", ">", "hr.traffic.>", "$KV.>"):
        with pytest.raises(Denied, match="may not subscribe"):
            await judge.link.subscribe(subject, hear)


async def test_a_refusal_is_told_also_when_nobody_waits(connect: Connect) -> None:
    judge = await connect("judge")
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    judge.link.on_error.append(told.set_result)
    await judge.emit("hr.traffic.local", event())
    assert await asyncio.wait_for(told, 10) == "role 'judge' may not publish hr.traffic.local"


def test_no_role_may_do_anything_and_unknown_roles_have_nothing() -> None:
    for role in (*permissions.ACTORS, *permissions.READERS):
        allowed = permissions.of(role).publish
        for forbidden in ("$JS.API.STREAM.DELETE.HR_TRAJ", "$SYS.REQ.SERVER.PING", "hr.unheard.of", "_INBOX.judge.1"):
            assert not any(covers(pattern, forbidden) for pattern in allowed), (role, forbidden)
    with pytest.raises(KeyError, match="unknown role 'root'"):
        permissions.of("root")


def test_every_publisher_of_the_table_is_a_role() -> None:
    named = {name for subject in s.SUBJECTS.values() for name in subject.publishers}
    assert named <= {*permissions.ROLES, "every actor", "nats-server"}
    assert {role for roles in permissions.EVENT_TYPES.values() for role in roles} <= set(permissions.ROLES)
    assert set(permissions.EVENT_TYPES) | set(permissions.FREE_EVENTS) == set(s.EVENT.types)
