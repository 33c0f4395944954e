"""The issuer over a real broker: an attempt is written once, also when two actors issue for the run."""

import pytest

from headrace import config as c
from headrace.bus.connection import Bus
from headrace.bus.errors import WrongSequence
from headrace.ledger.issuer import Issuer
from headrace.ledger.requests import settings_of
from headrace.ledger.state import RunState
from headrace.messages.ledger import SlotIssued
from headrace.messages.rollout import RolloutRequest
from headrace.messages.subjects import LEDGER, TASK
from tests.conftest import Connect
from tests.support import records

pytestmark = pytest.mark.anyio


def issuer(bus: Bus) -> Issuer:
    return Issuer(bus, RunState(records.RUN), settings_of(c.Config(), 1.0).request)


async def written(bus: Bus, group: str) -> list[int]:
    """The attempts of a group in the ledger."""
    where = LEDGER.at(run=records.RUN, group=group)
    return [received.message.attempt async for received in bus.history("HR_LEDGER", where)]


async def test_the_newest_fence_refuses_an_older_issuer(connect: Connect) -> None:
    bus = await connect("curriculum")
    older, newer = issuer(bus), issuer(bus)
    await older.fence("curriculum", "curriculum", "c-1")
    await newer.fence("curriculum", "curriculum", "c-2")
    with pytest.raises(WrongSequence):
        await older.issue([records.issued("i000001", 0, 0)])
    await newer.issue([records.issued("i000001", 0, 0)])
    assert await written(bus, "i000001") == [0]


async def test_without_a_fence_the_second_record_of_an_attempt_is_refused(connect: Connect) -> None:
    bus = await connect("gateway")
    one, other = issuer(bus), issuer(bus)
    await one.issue([records.issued("u1.i000002", 0, 0, lane="production")])
    await one.issue([records.issued("u1.i000002", 0, 1, lane="production")])
    with pytest.raises(WrongSequence):
        await other.issue([records.issued("u1.i000002", 0, 2, lane="production")])
    assert await written(bus, "u1.i000002") == [0, 1]


async def test_a_finished_attempt_is_not_requested_again(connect: Connect) -> None:
    bus, admin = await connect("curriculum"), await connect("admin")
    state = RunState(records.RUN)
    made = Issuer(bus, state, settings_of(c.Config(), 1.0).request)
    await made.fence("curriculum", "curriculum", "c-1")
    failed, running = records.issued("i000003", 0, 0), records.issued("i000003", 1, 0)
    for seq, issued in enumerate((failed, running), 1):
        assert isinstance(issued, SlotIssued)
        state.apply(issued, seq)
    state.fail("i000003", 0, 0, "sandbox_lost")
    await made.request([running, failed])
    last = await admin.last("HR_TASK", TASK.where(run=records.RUN))
    assert last is not None and isinstance(last.message, RolloutRequest)
    assert (last.message.group, last.message.slot) == ("i000003", 1)
