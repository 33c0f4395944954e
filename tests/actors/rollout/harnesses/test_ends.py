"""How attempts of a harness end, and what is left of them."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any

import msgspec
import pytest

from headrace.harnesses import bundles
from headrace.messages.rollout import HarnessEnd, Limits, Sampling, SlotFailed, Trajectory
from headrace.training.batches.segment import tensors_of, weighted
from tests.conftest import Connect
from tests.support import client_engine, small_harness
from tests.support.client_engine import Said
from tests.support.harness_run import LIMITS, HarnessRun, fixes, harness_run
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.anyio

DONE: Said = ("Fixed.", [])
LOOK: Said = ("I look.", [("bash", {"command": "ls"})])
Opened = Callable[..., AbstractAsyncContextManager[HarnessRun]]


@pytest.fixture
def opened(connect: Connect, tmp_path: Path) -> Opened:
    """A run with the small harness."""
    program = small_harness.program(tmp_path / "bundle")
    bundles.make(tmp_path / "cache", program)

    @asynccontextmanager
    async def one(turns: Sequence[Said], *does: str, **more: Any) -> AsyncIterator[HarnessRun]:
        run = f"e{token_hex(4)}"
        folder = tmp_path / run
        options: dict[str, Any] = {"own": program, "cache": tmp_path / "cache", "arguments": does} | more
        async with harness_run(connect, folder, run, "small", turns, **options) as there:
            yield there

    return one


async def test_an_exit_code_decides_between_finished_and_crashed(opened: Opened) -> None:
    async with opened([LOOK, DONE], "exit=3") as run:
        made = await run.attempt()
        assert isinstance(made, Trajectory) and isinstance(made.harness, HarnessEnd)
        assert (made.outcome, made.harness.code, len(made.turns)) == ("crashed", 3, 2)
        assert (await run.score()).verdict == "failed", "its own fault is an outcome, and is scored"


async def test_limits_are_answered_and_end_the_attempt(opened: Opened) -> None:
    async with opened([LOOK] * 9) as run:
        for slot, (limits, outcome, turns) in enumerate(
            (
                (msgspec.structs.replace(LIMITS, max_turns=2), "max_turns", 2),
                (msgspec.structs.replace(LIMITS, max_tokens=1), "max_tokens", 1),
                (msgspec.structs.replace(LIMITS, context_tokens=400), "context", 2),
            )
        ):
            made = await run.attempt(slot, limits=limits)
            assert isinstance(made, Trajectory) and (made.outcome, len(made.turns)) == (outcome, turns), made


async def test_time_ends_the_harness_and_all_that_it_started(opened: Opened) -> None:
    endless: Said = ("I wait.", [("bash", {"command": "sleep 77771 & sleep 77772"})])
    async with opened([endless]) as run:
        made = await run.attempt(limits=msgspec.structs.replace(LIMITS, wall_s=3.0))
        assert isinstance(made, Trajectory) and made.outcome == "wall_time" and len(made.turns) == 1
        assert await gone(), "the release ends what the harness left"


async def gone() -> bool:
    """Whether no process of the test's name is left, once the sandbox had time to end."""
    async with asyncio.timeout(PATIENCE_S):
        while any(b"7777" in words(pid) for pid in filter(str.isdigit, os.listdir("/proc"))):
            await asyncio.sleep(0.05)
    return True


def words(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("command", [("nothing",), ("/bin/sleep", "60")])
async def test_a_harness_that_asks_nothing_is_no_outcome(
    opened: Opened, tmp_path: Path, command: tuple[str, ...]
) -> None:
    program = msgspec.structs.replace(small_harness.program(tmp_path / "other"), command=command)
    bundles.make(tmp_path / "cache", program)
    async with opened([DONE], own=program) as run:
        failed = await run.attempt(limits=msgspec.structs.replace(LIMITS, wall_s=2.0))
        assert isinstance(failed, SlotFailed) and failed.reason == "harness_failed"


async def test_the_fault_of_the_engine_is_infrastructure(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.engines.base import EngineError

    async def fails(*_: object) -> None:
        raise EngineError("no memory")

    async with opened([LOOK, DONE]) as run:
        monkeypatch.setattr(client_engine.ClientEngine, "sample", fails)
        failed = await run.attempt()
        assert isinstance(failed, SlotFailed) and failed.reason == "engine_error" and "no memory" in failed.detail


async def test_a_repeated_request_is_sampled_once(opened: Opened) -> None:
    """The client counts it as a retry: it gets the recorded turn."""
    async with opened([fixes(), DONE], "twice") as run:
        made = await run.attempt()
        assert isinstance(made, Trajectory) and isinstance(made.harness, HarnessEnd)
        assert made.harness.requests == 4 and len(made.turns) == 2 and {turn.segment for turn in made.turns} == {0}


async def test_only_the_main_conversation_gets_the_reward(opened: Opened) -> None:
    async with opened([LOOK, DONE], "title", reward="main") as run:
        made = await run.attempt(sampling=Sampling(temperature=1.0, max_turn_tokens=4096))
        assert isinstance(made, Trajectory) and isinstance(made.harness, HarnessEnd)
        assert [turn.segment for turn in made.turns] == [0, 1, 1] and made.harness.unrewarded == (0,)
    taught = weighted(tensors_of(made), made, 0.5)
    assert [segment.advantage for segment in taught] == [0.0, 0.5]
    by_turn = weighted(tensors_of(made), made, 0.5, 0, [1.0, 1.0, 1.0])
    assert [float(segment.advantages.max()) for segment in by_turn] == [0.0, 1.5]


async def test_the_key_of_an_attempt_ends_with_it(opened: Opened) -> None:
    """The endpoint of an attempt that has ended refuses its key, and a key that it never had."""
    steal: Said = ("I look.", [("bash", {"command": "env > env.txt"})])
    async with opened([steal, DONE]) as run:
        made = await run.attempt(limits=Limits(max_turns=9, max_tokens=20_000, context_tokens=60_000))
        assert isinstance(made, Trajectory)
        rollout = run.rollout._endpoint
        assert rollout._attempts == {} and rollout._keys._keys == {}
