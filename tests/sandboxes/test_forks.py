"""Forks over the bus: they are held by the actor that asked for them."""

import pytest

from headrace.actors.environment.actor import Environment
from headrace.config import Config
from headrace.config import Environment as Section
from headrace.messages.sandbox import ANY_RUN, Acquire, ReadFile, WriteFiles
from headrace.sandboxes.client import Sandboxes
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.paths import ROOT

pytestmark = [pytest.mark.anyio, pytest.mark.vm, pytest.mark.slow]
SECTION = Section(backend="qemu", cache_dir=str(ROOT / ".cache" / "headrace"), max_vms=6, warm=0, lease_s=60.0)


def ask(slot: int) -> Acquire:
    return Acquire(run="f", lane="train", role="rollout", group="g", slot=slot, attempt=0, isolation="episode")


async def test_a_fork_belongs_to_the_actor_that_asked_for_it(connect: Connect) -> None:
    async with living(Environment, Config(environment=SECTION), await connect("environment", node="n1"), ANY_RUN):
        sandboxes = Sandboxes(await connect("rollout"), 60.0)
        one = await sandboxes.acquire(ask(0))
        await one.call(WriteFiles(files={"a.txt": b"mine"}))
        twins = await sandboxes.fork(one, [ask(1), ask(2)])
        await one.call(WriteFiles(files={"a.txt": b"later"}))
        for sandbox in twins:
            assert (await sandbox.call(ReadFile(path="a.txt"))).data == b"mine" and sandbox.backend == "qemu"
        assert len(sandboxes) == 3
