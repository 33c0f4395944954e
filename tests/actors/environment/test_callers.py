"""A sandbox belongs to the role that acquired it, whatever another role knows: its key, its id, even its secret."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from headrace.actors.environment.actor import Environment
from headrace.bus.broker import permissions
from headrace.bus.connection import Bus
from headrace.bus.errors import Denied, NoResponders
from headrace.config import Config
from headrace.config import Environment as Section
from headrace.messages.base import Message
from headrace.messages.operations import Ack
from headrace.messages.sandbox import (
    ANY_RUN,
    Acquire,
    Exec,
    Fork,
    ReadFile,
    Release,
    ReleaseGroup,
    Renew,
    SandboxCall,
    SandboxReply,
    acquire_method,
    holders,
)
from headrace.messages.subjects import RPC, RPC_NODE
from headrace.sandboxes.client import Sandboxes
from tests.conftest import Connect
from tests.support.actors import living

pytestmark = pytest.mark.anyio

CONFIG = Config(environment=Section(backend="process", max_vms=4, judge_share=2, slots_per_vm=2, lease_s=30.0))
ROLES = {*permissions.ACTORS, *permissions.READERS}
HIDDEN = b"the hidden tests"


def wanted(slot: int = 0, **changes: Any) -> Acquire:
    fields = dict(run="r1", lane="train", role="judge", group="g1", slot=slot, attempt=0, isolation="group")
    return Acquire(**fields | {"files": {"hidden.py": HIDDEN}, "lease_s": 30.0} | changes)  # type: ignore[arg-type]


@pytest.fixture
async def environment(connect: Connect) -> AsyncIterator[Environment]:
    async with living(Environment, CONFIG, await connect("environment", node="n1"), ANY_RUN) as actor:
        yield actor


def attacks(caller: str, node: str, who: dict[str, Any]) -> list[tuple[str, Message]]:
    """Every request that could touch the judge's sandbox, on the subjects of `caller`."""
    take = wanted(handovers=7, files={})
    service = {"service": "environment", "caller": caller}
    acquire = acquire_method("r1")
    return [
        (RPC.at(**service, method=acquire), take),
        (RPC_NODE.at(**service, node=holders("light"), method=acquire), take),
        *(
            (RPC_NODE.at(**service, node=node, method=method), request)
            for method, request in {
                "acquire": take,
                "call": SandboxCall(**who, call_id="stolen", op=ReadFile(path="hidden.py")),
                "renew": Renew(**who, lease_s=1e-3),
                "release": Release(**who),
                "release_group": ReleaseGroup(run="r1", lane="train", role="judge", group="g1"),
                "fork": Fork(**who, into=(wanted(1),)),
            }.items()
        ),
    ]


async def refused(bus: Bus, subject: str, request: Message) -> bool:
    """Whether the broker or the node refuses a request."""
    try:
        reply = await bus.request(subject, request)
    except (Denied, NoResponders):
        return True
    if isinstance(reply, SandboxReply):
        return reply.result is None and reply.failure == "refused"
    return isinstance(reply, Ack) and not reply.ok


async def test_no_role_touches_the_sandbox_of_another(environment: Environment, connect: Connect) -> None:
    """The judge's sandbox, with its hidden tests; every other role knows all that the judge knows about it."""
    judge = Sandboxes(await connect("judge"), 30.0)
    held = await judge.acquire(wanted())
    acquired = held._acquired
    who = {"sandbox": acquired.sandbox, "secret": acquired.secret, "epoch": acquired.epoch}
    allowed = []
    async with AsyncExitStack() as stack:
        for role in ROLES - {"judge"}:
            bus = await stack.enter_async_context(await connect(role))
            for caller in (role, "judge"):
                for subject, request in attacks(caller, held.node, who):
                    if not await refused(bus, subject, request):
                        allowed.append((role, subject))
    assert not allowed
    assert (await held.call(ReadFile(path="hidden.py"))).data == HIDDEN, "it lives, and no epoch has passed"
    machines = environment._host.usage()["clones"]
    sibling = await judge.acquire(wanted(1))
    assert environment._host.usage()["clones"] == machines, "its group still shares a machine"
    await judge.release(sibling)
    await judge.release(held)
    assert len(environment._leases) == 0


async def test_a_role_cannot_lock_the_judge_out_before_it_comes(environment: Environment, connect: Connect) -> None:
    """The keys of a run can be guessed: who acquires first must not own them."""
    for role in ("rollout", "certifier"):
        early = await connect(role)
        for subject, request in attacks(role, environment._node, {"sandbox": "s", "secret": "s", "epoch": 1}):
            await refused(early, subject, request)
        mine = await Sandboxes(early, 30.0).acquire(wanted(role=role, handovers=9, files={"hidden.py": b"planted"}))
        assert (await mine.call(ReadFile(path="hidden.py"))).data == b"planted"
    judge = Sandboxes(await connect("judge"), 30.0)
    first = await judge.acquire(wanted())
    assert (first.fresh, (await first.call(ReadFile(path="hidden.py"))).data) == (True, HIDDEN)
    await first.call(Exec(argv=("sh", "-c", "echo mine > hidden.py")))
    again = await Sandboxes(await connect("judge"), 30.0).acquire(wanted())
    assert (again.id, again.fresh) == (first.id, False), "another judge takes it over as before"
    assert (await again.call(ReadFile(path="hidden.py"))).data == b"mine\n"
