"""A trainer of these tests never ends the process, which is the one of pytest."""

import os

import pytest

from headrace.actors.trainer import other_ranks
from headrace.bus.runtime.actor import Actor


@pytest.fixture(autouse=True)
def no_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer whose thread does not return from its group ends its process. Here that would be pytest's: the test
    fails with the reason in its place."""

    async def fail(actor: Actor, why: str) -> None:
        raise AssertionError(f"the trainer would end process {os.getpid()}: {why}")

    monkeypatch.setattr(other_ranks, "leave", fail)
