"""`headrace tasks probe`: which tasks it keeps, and that a killed probe repeats no attempt."""

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.bus.broker.server import running
from headrace.launch.measuring.probe import Band, Probe, of_results
from headrace.launch.runs import RunDir
from headrace.launch.session import bus_of
from headrace.messages.evaluation import EvalResult
from headrace.messages.ledger import SlotIssued
from headrace.messages.rollout import PolicyRef, Trajectory
from headrace.messages.subjects import LEDGER, SCORE, TRAJ
from headrace.python_modules import module_command
from headrace.tasks import open_suite
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.anyio
RUN = "probe-band"


def results(*passes: dict[str, bool]) -> list[EvalResult]:
    fields: dict[str, Any] = {"run": "r", "suite": "s", "policy": PolicyRef("pinned", 4), "version": 4, "tasks": 4}
    counts: dict[str, Any] = {"passed": 0, "rate": 0.0, "infra_failures": 0}
    return [EvalResult(id=str(n), passes=each, **fields, **counts) for n, each in enumerate(passes)]


def test_the_band_counts_attempts_with_a_verdict() -> None:
    measured = results(
        {"never": False, "once": True, "always": True, "lost": True, "half": True},
        {"never": False, "once": False, "always": True, "lost": True},
        {"never": False, "once": False, "always": True, "half": False},
    )
    made = of_results(measured, ["never", "once", "always", "lost", "half"], Band(attempts=3, low=1, high=2), "p", "r")
    assert (made.histogram, made.unmeasured, made.kept, made.version) == ((1, 1, 0, 1), 2, 2, 4)
    assert made.tasks == {"never": (0, 3), "once": (1, 3), "always": (3, 3), "lost": (2, 2), "half": (1, 2)}
    kept = {id for id, counts in made.tasks.items() if made.band.keeps(*counts)}
    assert kept == {"once", "half"}  # every attempt of "lost" with a verdict passed, so it may be solved always


async def start(folder: Path, *words: str) -> asyncio.subprocess.Process:
    argv = module_command("headrace.cli", "tasks", "probe", "run.toml", "--policy", "scripted:oracle", "--tasks", "8")
    return await asyncio.create_subprocess_exec(*argv, "--out", "band", "--attempts", "4", *words, cwd=folder)


@pytest.mark.slow
async def test_a_killed_probe_continues_and_repeats_no_attempt(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[environment]\nbackend = "process"\n[production]\nenabled = false\n')
    folder = RunDir(tmp_path / "runs" / RUN)
    probe = await start(tmp_path, "--high", "4")
    async with asyncio.timeout(PATIENCE_S):
        while not (folder.broker / "store" / "jetstream").is_dir() or not (folder.logs / "judge.log").exists():
            await asyncio.sleep(0.1)
        async with bus_of(folder, "replay") as bus:
            async for _ in bus.follow("HR_SCORE", SCORE.where(run=RUN)):
                break
    os.kill(probe.pid, signal.SIGKILL)
    await probe.wait()
    async with asyncio.timeout(PATIENCE_S):
        while running(folder.broker):  # it ends with its parent
            await asyncio.sleep(0.1)
    before = await records(folder)
    assert 0 < len(before[SCORE]) < 32
    again = await start(tmp_path, "--high", "4")
    async with asyncio.timeout(4 * PATIENCE_S):
        assert await again.wait() == 0
    after = await records(folder)
    assert len(after[SCORE]) == len({(group, slot) for group, slot, _ in after[SCORE]}) == 32
    for family in (LEDGER, TRAJ, SCORE):
        assert set(after[family].values()) == {1} and before[family].items() <= after[family].items()
    judged = {(group, slot) for group, slot, _ in before[TRAJ]}  # the others' sandboxes ended with the probe
    assert not judged & {(group, slot) for group, slot, attempt in after[LEDGER] if attempt}
    made = msgspec.json.decode((tmp_path / "suites" / "band" / "probe.json").read_bytes(), type=Probe)
    assert (made.histogram, made.kept, made.unmeasured) == ((0, 0, 0, 0, 8), 8, 0)
    assert list(open_suite("band", tmp_path / "suites").ids()) == list(made.tasks)
    async with asyncio.timeout(PATIENCE_S):
        assert await (await start(tmp_path)).wait() == 1  # the same attempts, another band
    assert await records(folder) == after


async def records(folder: RunDir) -> dict[Any, Counter[tuple[str, int, int]]]:
    """How often each attempt is on record, by family of subjects."""
    found: dict[Any, Counter[tuple[str, int, int]]] = {}
    async with bus_of(folder, "replay") as bus:
        for stream, family in (("HR_LEDGER", LEDGER), ("HR_TRAJ", TRAJ), ("HR_SCORE", SCORE)):
            found[family] = Counter()
            async for received in bus.history(stream, family.where(run=folder.id)):
                record: Any = received.message
                if isinstance(record, (SlotIssued, Trajectory)) or family is SCORE:
                    found[family][record.group, record.slot, record.attempt] += 1
    return found
