"""A sandbox that outlives its attempt: the next request of the same workspace continues in it."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from headrace.actors.environment.actor import Environment
from headrace.actors.rollout.actor import Rollout
from headrace.bus.connection import Bus
from headrace.bus.errors import NoResponders
from headrace.messages.operations import Ping
from headrace.messages.product import AttemptControl
from headrace.messages.rollout import (
    RolloutRequest,
    SlotFailed,
    Trajectory,
    TurnSampled,
    Workspace,
)
from headrace.messages.sandbox.calls import SandboxKey
from headrace.messages.subjects import FAIL, RPC, TRAJ, TURN
from headrace.tasks import open_suite
from tests.actors.rollout.test_actor import config, issue, request
from tests.conftest import Connect
from tests.support.actors import living

pytestmark = pytest.mark.anyio
KEY = SandboxKey("r1", "train", "rollout", "user.agent", 0, 0)


async def done(bus: Bus, wanted: RolloutRequest) -> tuple[Trajectory, str, str]:
    """The attempt's Trajectory, its node and its sandbox."""
    async for received in bus.follow("HR_TRAJ", TRAJ.at(run=wanted.run, group=wanted.group)):
        turns = bus.history("HR_TURN", TURN.at(run=wanted.run, trajectory=wanted.trajectory))
        sampled = [r.message async for r in turns if isinstance(r.message, TurnSampled)]
        return received.message, sampled[-1].node, sampled[-1].sandbox
    raise AssertionError


def asked(run: str, group: str, policy: str, turn: int, node: str = "", **changes: object) -> RolloutRequest:
    workspace = Workspace(name="user.agent", turn=turn, node=node, hold_s=600.0)
    return msgspec.structs.replace(request(run, group, policy=policy), workspace=workspace, **changes)


async def test_the_next_request_continues_in_the_sandbox_that_is_held(connect: Connect, tmp_path: Path) -> None:
    settings, admin = config(tmp_path), await connect("admin")
    task = open_suite("generated/train").task(open_suite("generated/train").ids()[0])
    async with (
        asyncio.timeout(120),
        living(Environment, settings, await connect("environment"), "r1") as environment,
        living(Rollout, settings, await connect("rollout"), "r1"),
    ):
        feedback = await connect("feedback")  # it cancels its users' attempts, and does nothing else there
        for method in ("turn-r1", "end-r1", "command-r1"):
            with pytest.raises(NoResponders):
                await feedback.request(RPC.at(service="rollout", caller="feedback", method=method), Ping())

        first = asked("r1", "g1", "oracle", 0)
        await issue(admin, first)
        trajectory, node, sandbox = await done(admin, first)
        assert trajectory.diff and sandbox
        second = asked("r1", "g2", "idle", 1, node, files=task.files)
        await issue(admin, second)
        after, _, same = await done(admin, second)
        assert same == sandbox and after.diff == trajectory.diff, "the work of the first is there"

        control = RPC.at(service="rollout", caller="gateway", method="control-r1")
        await (await connect("gateway")).emit(control, AttemptControl(run="r1", workspace="user.agent"))
        while environment._leases.find(KEY) is not None:
            await asyncio.sleep(0.01)
        third = asked("r1", "g3", "idle", 2, node, files=task.files)
        await issue(admin, third)
        fresh, _, other = await done(admin, third)
        assert other != sandbox and not fresh.diff, "released: the files of the request, in another sandbox"
        await (await connect("gateway")).emit(control, AttemptControl(run="r1", workspace="user.agent"))
        while environment._leases.find(KEY) is not None:
            await asyncio.sleep(0.01)
        fourth = asked("r1", "g4", "idle", 3, node)
        await issue(admin, fourth)
        async for received in admin.follow("HR_LEDGER", FAIL.at(run="r1", group="g4")):
            assert isinstance(received.message, SlotFailed) and "with it its files" in received.message.detail
            break
