"""A certificate names everything that was searched, the actors that dropped the user, and those that did not say so."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from headrace.actors.feedback import purge
from headrace.actors.feedback.actor import Feedback
from headrace.actors.rollout.actor import Rollout
from headrace.bus.broker.permissions import ERASES, PURGES
from headrace.bus.connection import Bus
from headrace.messages.operations import Heartbeat
from headrace.messages.product import PurgeStatement
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.gateway import OpenGateway

pytestmark = pytest.mark.anyio


async def beat(bus: Bus, role: str, id: str, run: str, state: str = "running") -> None:
    """As a supervisor does for its actors."""
    alive = Heartbeat(actor=role, id=id, node="n1", pid=1, state=state, run=run)  # type: ignore[arg-type]
    await (await bus.kv("HR_PRESENCE")).put(f"{role}.{id}", alive)


@pytest.mark.parametrize("ghosts", [(), ("gateway",), ("gateway", "rollout")])
async def test_a_certificate_says_who_was_reached_and_who_was_not(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ghosts: tuple[str, ...]
) -> None:
    """A gateway that hung held the user's sessions, and the certificate did not say so."""
    monkeypatch.setattr(purge, "CANCEL_S", 2.0 if ghosts else 60.0)
    run = f"reach{len(ghosts)}"
    product = await OpenGateway(connect, tmp_path, run).open()
    rollout = await connect("rollout")
    try:
        async with (
            asyncio.timeout(60),
            living(Feedback, product.config, await connect("feedback"), run),
            living(Rollout, product.config, rollout, run, "product"),
        ):
            for role, bus, id in (("gateway", product.gateway.bus, "gateway-1"), ("rollout", rollout, "product")):
                await beat(bus, role, id, run)
                await beat(bus, role, "over", run, "stopped")
                await beat(bus, role, "of-another-run", "other")
                if role in ghosts:
                    await beat(bus, role, "ghost", run)
            await product.call("POST", "/v1/sessions", {"user": "ada"})
            status, told = await product.call("DELETE", "/v1/users/ada")
            assert status == 200, told
    finally:
        await product.gateway.shut(1.0)
    said = msgspec.json.decode(told["certificate"]["statement"], type=PurgeStatement)
    assert said.reached == ("gateway.gateway-1 on n1", "rollout.product on n1")
    assert said.unreached == tuple(f"{role}.ghost on n1" for role in ghosts)
    assert all(name in told["purged"] for name in said.unreached), "the person who asked is told"
    searched = {record.stream for record in said.records}
    assert searched == {*PURGES["feedback"], *ERASES["feedback"]}, "also where nothing was found"
    assert {text.partition(":")[0] for text in said.elsewhere} >= {"objects", "folders", "environments"}
