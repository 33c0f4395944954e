"""The broker enforces who may publish what; a refusal is a clear error at once, not a timeout."""

import asyncio
import itertools
from secrets import token_hex

import pytest

from headrace.bus.broker import callers, permissions
from headrace.bus.errors import ApiError, Denied, NoResponders
from headrace.messages import subjects as s
from headrace.messages.operations import Event, Ping
from headrace.messages.subjects import covers
from tests.conftest import Connect
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.anyio


ROLES = [*permissions.ACTORS, *permissions.READERS]


def event() -> Event:
    return Event(actor="a", id="a-1", kind="test")


def concrete(subject: s.Subject, **fields: str) -> str:
    """A subject of a family with every field filled."""
    tokens = [fields.get(t.strip("{}"), "x") if t.startswith("{") else t for t in subject.template.split(".")]
    return ".".join(tokens)


LANES = ("train", "eval", "production")
LANE_OF = {"curriculum": "train", "evaluator": "eval", "gateway": "production"}


def own_lane(role: str, subject: s.Subject, lane: str, group: str) -> bool:
    """Whether requests of this lane, or ledger entries of this group, are this role's."""
    if subject is s.TASK:
        return LANE_OF.get(role, lane) == lane
    sessions = {"gateway": (s.LEDGER,), "feedback": (s.LEDGER, s.TRAJ, s.SCORE, s.CLOSE, s.FAIL)}
    return subject not in sessions.get(role, ()) or "." in group


TABLE = [subject for subject in s.SUBJECTS.values() if s.stream_of(subject.where()) is not None]


@pytest.mark.parametrize("role", ROLES)
async def test_each_role_publishes_its_row_and_nothing_else(connect: Connect, role: str) -> None:
    """Every stream subject is tried by every role against the broker: stored, or Denied, as the table says."""
    bus = await connect(role)
    run = f"r{token_hex(4)}"
    for subject in TABLE:
        if subject in (s.EVENT, s.BLOB, s.ADVISORY):
            continue
        for lane, group in itertools.product(LANES if "{lane}" in subject.template else LANES[:1], ("g1", "u1.g1")):
            where = concrete(subject, run=run, tenant=run, lane=lane, group=group)
            if role in subject.publishers and own_lane(role, subject, lane, group):
                assert await bus.publish(where, event()) > 0
            else:
                with pytest.raises(Denied) as denied:
                    await bus.publish(where, event())
                assert (denied.value.role, denied.value.action, denied.value.subject) == (role, "publish on", where)
    with pytest.raises(Denied):
        await bus.publish(concrete(s.ADVISORY), event())
    other = "trainer" if role != "trainer" else "judge"
    await bus.publish(s.EVENT.at(run=run, actor=role, type="event"), event())
    with pytest.raises(Denied):
        await bus.publish(s.EVENT.at(run=run, actor=other, type="event"), event())
    if role != "trainer":
        with pytest.raises(Denied):
            await bus.publish(s.EVENT.at(run=run, actor=role, type="snapshot_ready"), event())


@pytest.mark.parametrize("role", ROLES)
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
            await bus.connection.api(verb, {"name": "HR_TRAJ", "seq": 1})


async def test_only_rollouts_pull_work_and_only_readers_read(connect: Connect) -> None:
    judge, environment = await connect("judge"), await connect("environment")
    config = {"stream_name": "HR_TASK", "config": {"durable_name": "thief", "ack_policy": "explicit"}}
    with pytest.raises(Denied):
        await judge.connection.api("CONSUMER.CREATE.HR_TASK.thief", config)
    with pytest.raises(Denied):
        await environment.get("HR_TRAJ", 1)
    with pytest.raises(Denied):
        await (await connect("dashboard")).last("HR_FEEDBACK", "hr.feedback.>")


@pytest.mark.parametrize("role", ROLES)
async def test_each_role_reads_and_writes_its_buckets_alone(connect: Connect, role: str) -> None:
    bus, admin = await connect(role), await connect("admin")
    for bucket in s.KEY_VALUES:
        await (await admin.kv(bucket)).put("some.key", event())  # an empty bucket is listed without a consumer
        entries = await bus.kv(bucket)
        if role in permissions.KV_READERS[bucket]:
            await entries.get("none")
            assert await entries.keys("none.>") == []
        else:
            with pytest.raises(Denied):
                await entries.get("none")
            with pytest.raises(Denied):
                await entries.keys("none.>")
        for key in (f"{role}.x1", "admin.x1"):
            writer = permissions.KV_WRITERS.get(bucket, key.partition(".")[0])
            if writer == role:
                assert await entries.put(key, event()) > 0
            else:
                with pytest.raises(Denied):
                    await entries.put(key, event())


async def test_prompts_are_for_the_gateway_alone() -> None:
    assert permissions.KV_READERS["HR_SESSION"] == ("gateway",)


@pytest.mark.parametrize("role", ROLES)
async def test_each_role_makes_consumers_where_it_reads(connect: Connect, role: str) -> None:
    """Judged by the table: a reader or publisher of a subject of the stream, and nobody else."""
    bus = await connect(role)
    for stream in s.STREAMS:
        families = [subject for subject in s.SUBJECTS.values() if s.stream_of(subject.where()) is stream]
        listed = any(role in (*subject.readers, *subject.publishers) for subject in families)
        everybody = stream.name == "HR_EVENT" or (role == "operator" and stream.name != "HR_ADVISORY")
        listed = listed or (stream.name, role) == ("HR_ADVISORY", "dead_letter")
        reader = role in permissions.READERS and stream.name not in ("HR_FEEDBACK", "HR_ADVISORY", "HR_TASK")
        worker = stream.name != "HR_TASK" or role == "rollout"
        name = f"CONSUMER.CREATE.{stream.name}.x{token_hex(4)}"
        wrong = {"stream_name": "nothing", "config": {}}  # refused by the API, so that nothing is made
        allowed = (listed or everybody or reader) and worker
        with pytest.raises(ApiError if allowed else Denied):
            await bus.connection.api(name, wrong)


async def test_an_operator_makes_consumers_with_several_filters(connect: Connect) -> None:
    operator = await connect("operator")
    config = {"name": f"x{token_hex(4)}", "ack_policy": "none", "filter_subjects": ["hr.ledger.r1.>", "hr.fail.r1.>"]}
    request = {"stream_name": "HR_LEDGER", "config": config, "action": "create"}
    assert b"filter_subjects" in await operator.connection.api("CONSUMER.CREATE.HR_LEDGER", request)


async def test_nobody_hears_what_is_not_for_him(connect: Connect) -> None:
    judge = await connect("judge")

    async def hear(_: object) -> None:
        raise AssertionError

    for subject in ("_INBOX.trainer.>", "hr.rpc.environment.>", ">", "hr.traffic.>", "$KV.>"):
        with pytest.raises(Denied):
            await judge.connection.subscribe(subject, hear)


@pytest.mark.parametrize("role", ROLES)
async def test_no_sibling_answers_for_an_environment(connect: Connect, role: str) -> None:
    """An observation is a node's answer: other roles neither take its calls nor write into the caller's inbox."""
    bus = await connect(role)
    for asker in ("rollout", "judge", role):
        with pytest.raises(Denied):
            await bus.publish(f"_INBOX.{asker}.x.1", event())
    if role != "environment":

        async def take(_: object) -> None:
            raise AssertionError

        for subject in ("hr.rpc.environment.n1.call", "hr.rpc.environment.acquire-r1", "hr.rpc.environment.>"):
            with pytest.raises(Denied):
                await bus.connection.subscribe(subject, take)


@pytest.mark.parametrize("role", ROLES)
async def test_a_role_calls_under_its_own_name_and_only_the_services_of_its_row(connect: Connect, role: str) -> None:
    """Judged by the table: every service x the names of itself, of its callers, of this role and of nobody."""
    bus = await connect(role)
    may = {service for service, methods in callers.CALLERS.items() if any(role in each for each in methods.values())}

    async def passes(subject: str) -> bool:
        try:
            await bus.request(subject, Ping())
        except NoResponders:
            return True
        except Denied:
            return False
        raise AssertionError(f"{subject} was answered")

    subjects: dict[str, bool] = {}
    for service in (*ROLES, "unheard"):
        named = {each for roles in callers.CALLERS.get(service, {}).values() for each in roles}
        for caller in {role, service, "unheard", *callers.PINGING, *named}:
            for method in (callers.PING, "call"):
                allowed = caller == role and service in may
                pings = caller == role and role in callers.PINGING and method == callers.PING
                subjects[s.RPC.at(service=service, caller=caller, method=method)] = allowed
                subjects[s.RPC_NODE.at(service=service, caller=caller, node="n1", method=method)] = allowed or pings
        subjects[f"hr.rpc.{service}.ping"] = subjects[f"hr.rpc.{service}.n1.ping"] = False
    passed = dict(zip(subjects, await asyncio.gather(*map(passes, subjects)), strict=True))
    assert {subject for subject in subjects if passed[subject] != subjects[subject]} == set()


def test_every_caller_of_the_table_is_a_publisher_of_the_subject() -> None:
    named = {role for methods in callers.CALLERS.values() for roles in methods.values() for role in roles}
    assert named | set(callers.PINGING) == set(s.RPC.publishers) == set(s.RPC_NODE.publishers)
    assert set(callers.CALLERS) == set(s.RPC.readers)


async def test_a_refusal_is_told_also_when_nobody_waits(connect: Connect) -> None:
    judge = await connect("judge")
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    judge.connection.on_error.append(told.set_result)
    await judge.emit("hr.traffic.local", event())
    assert await asyncio.wait_for(told, PATIENCE_S) == "role 'judge' may not publish hr.traffic.local"


def test_no_role_may_do_anything_and_unknown_roles_have_nothing() -> None:
    for role in (*permissions.ACTORS, *permissions.READERS):
        allowed = permissions.of(role).publish
        for forbidden in ("$JS.API.STREAM.DELETE.HR_TRAJ", "$SYS.REQ.SERVER.PING", "hr.unheard.of", "_INBOX.judge.1"):
            assert not any(covers(pattern, forbidden) for pattern in allowed), (role, forbidden)
    with pytest.raises(KeyError, match="unknown role 'root'"):
        permissions.of("root")


def test_every_publisher_of_the_table_is_a_role() -> None:
    named = {name for subject in s.SUBJECTS.values() for name in subject.publishers}
    assert named <= {*permissions.ROLES, "every actor", "nats-server", "tenants"}
    assert {role for roles in permissions.EVENT_TYPES.values() for role in roles} <= set(permissions.ROLES)
    assert set(permissions.EVENT_TYPES) | set(permissions.FREE_EVENTS) == set(s.EVENT.types)
