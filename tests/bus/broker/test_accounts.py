"""Runs that share a broker have an account each: neither sees, writes, purges or consumes records of the other."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.bus.broker import credentials
from headrace.bus.broker.server import CONF, Server
from headrace.bus.connection import Bus
from headrace.bus.errors import ApiError, CredentialsRefused
from headrace.bus.nats.streams import declare
from headrace.messages import subjects as s
from headrace.messages.operations import Event

pytestmark = pytest.mark.anyio


@pytest.fixture
async def shared(tmp_path: Path) -> AsyncIterator[Server]:
    """A broker with the accounts of r1 and r2, both declared."""
    credentials.write_accounts(tmp_path / "credentials", ["r1", "r2"])
    (tmp_path / "nats.conf").write_bytes(CONF.read_bytes())
    async with Server(tmp_path, prepared=True) as server:
        for run in ("r1", "r2"):
            async with await connect(server, run, "admin") as admin:
                await declare(admin)
        yield server


async def connect(server: Server, run: str, role: str) -> Bus:
    return await Bus.connect(server.url, role=role, credentials=server.credentials / run)


async def test_a_run_cannot_reach_another(shared: Server) -> None:
    one, other = await connect(shared, "r1", "feedback"), await connect(shared, "r2", "feedback")
    record = Event(actor="feedback", id="f", run="r2", kind="k")
    ours = s.EVENT.at(run="r1", actor="feedback", type="event")
    theirs = s.EVENT.at(run="r2", actor="feedback", type="event")
    assert await other.publish(theirs, record) == 1
    assert await one.publish(theirs, record) == 1, "it is stored in the publisher's own account"
    assert await one.publish(ours, record) == 2
    assert await other.last_seq("HR_EVENT") == 1 and [r.seq async for r in other.history("HR_EVENT")] == [1]

    user = s.FEEDBACK.at(tenant="t", user="u1")
    trainer = await connect(shared, "r2", "gateway")
    await trainer.publish(user, record)
    assert await one.purge("HR_FEEDBACK", subject="hr.feedback.>") == 0
    assert await other.last_seq("HR_FEEDBACK") == 1
    assert await other.purge("HR_FEEDBACK", subject="hr.feedback.>") == 1

    judge, thief = await connect(shared, "r2", "judge"), await connect(shared, "r1", "judge")
    config = {"durable_name": "judge-r2", "name": "judge-r2", "ack_policy": "explicit"}
    await judge.connection.api("CONSUMER.CREATE.HR_TRAJ.judge-r2", {"stream_name": "HR_TRAJ", "config": config})
    with pytest.raises(ApiError, match="consumer not found"):
        await thief.connection.api("CONSUMER.DELETE.HR_TRAJ.judge-r2")

    lease, foreign = await connect(shared, "r2", "scavenger"), await connect(shared, "r1", "scavenger")
    await (await lease.kv("HR_LEASE")).put("r2.product", record)
    assert await (await foreign.kv("HR_LEASE")).get("r2.product") is None
    for bus in (one, other, trainer, judge, thief, lease, foreign):
        await bus.close()


async def test_calls_stay_inside_a_run(shared: Server) -> None:
    from headrace.bus.errors import NoResponders
    from headrace.messages.operations import Ack, Ping

    node, caller = await connect(shared, "r1", "environment"), await connect(shared, "r2", "rollout")

    async def answer(_: object) -> Ack:
        return Ack()

    where = s.RPC.at(service="environment", caller="rollout", method="ping")
    await node.respond(where, answer)
    with pytest.raises(NoResponders):
        await caller.request(where, Ping())
    await node.close()
    await caller.close()


def test_a_run_is_added_and_a_wrong_one_refused(tmp_path: Path) -> None:
    credentials.write_accounts(tmp_path, ["r1"])
    seed = (tmp_path / "r1" / "judge.nk").read_text()
    credentials.write_accounts(tmp_path, ["r2"])
    text = (tmp_path / "users.conf").read_text()
    assert '"r1.HR_TASK"' in text and '"r2.judge"' in text and (tmp_path / "r1" / "judge.nk").read_text() == seed
    assert all((path.stat().st_mode & 0o777) == 0o600 for path in tmp_path.rglob("*.nk"))
    with pytest.raises(ValueError, match="expected a run id"):
        credentials.write_accounts(tmp_path, ["../r3"])


async def test_a_key_of_one_run_signs_in_to_it_alone(shared: Server, tmp_path: Path) -> None:
    with pytest.raises(CredentialsRefused):
        stranger = credentials.write_accounts(tmp_path / "elsewhere", ["r1"])
        await Bus.connect(shared.url, role="judge", credentials=stranger / "r1", timeout=60.0)
