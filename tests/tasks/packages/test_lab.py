"""A lab waits for capacity that its own sandboxes take, and not for capacity that never comes."""

import asyncio
from typing import Any

import pytest

from headrace.config import Environment
from headrace.messages.sandbox import Acquire
from headrace.tasks.packages import lab
from headrace.vmhost.node.host import Host

pytestmark = pytest.mark.anyio


async def test_a_lab_ends_where_others_hold_all_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "CAPACITY_S", 0.3)
    host = await Host.open(Environment(backend="process", max_vms=1, judge_share=0))
    try:
        made = lab.Lab(host, "full", "light")
        async with made.sandbox({}, 0, alone=True):
            second: asyncio.Task[None] = asyncio.create_task(_use(made))
            await asyncio.sleep(2 * lab.CAPACITY_S)
            assert not second.done(), "the lab's own sandbox takes the place"
        await second
        other: dict[str, Any] = {"run": "r", "lane": "train", "role": "rollout", "group": "g", "attempt": 0}
        await host.acquire(Acquire(slot=0, isolation="episode", **other))
        with pytest.raises(lab.SuiteError, match=r"no sandbox had capacity within 0.3 s .*max_vms"):
            await _use(made)
    finally:
        await host.close()


async def _use(made: lab.Lab) -> None:
    async with made.sandbox({}, 1, alone=True):
        pass
