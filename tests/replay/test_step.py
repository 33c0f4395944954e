"""A past step gives the same bits, and says so when it does not or cannot."""

import dataclasses
import json
import shlex
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
import uvloop

from headrace.bus.broker.server import Server, open_store
from headrace.bus.connection import Bus
from headrace.messages.subjects import TRAJ
from headrace.messages.training import StepFailed
from headrace.replay import recorded_run as pasts
from headrace.replay.fetching import Records
from headrace.replay.recorded_run import RecordedRun, ReplayError
from headrace.replay.step import Rerun, attempt, choose, compare
from tests.replay.conftest import Finished, Run
from tests.support.keys import as_writers

KEYS = [
    "step",
    "bitwise_equal",
    "loss",
    "grad_norm",
    "weights_hash",
    "fingerprint_match",
    "layout_match",
    "why",
    "differences",
]
T = TypeVar("T")


def on(finished: Finished, server: Server, work: Callable[[RecordedRun], Awaitable[T]]) -> T:
    """Work on the finished run's past, in the role that replays."""

    async def body() -> T:
        async with await Bus.connect(server.url, role="replay", credentials=server.credentials) as bus:
            return await work(await pasts.of_run(bus, finished.setting, finished.folder, finished.run))

    return uvloop.run(body())


def test_random_steps_of_a_run_whose_trainer_was_killed_are_bit_equal(
    finished: Finished, opened: Server, headrace: Run
) -> None:
    code, out, err = headrace("replay", str(finished.folder), "--steps", "20", "--seed", "3")
    assert (code, err) == (0, "")
    lines = [json.loads(line) for line in out]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5]
    assert all(list(line) == KEYS and line["bitwise_equal"] and line["fingerprint_match"] for line in lines)
    assert [line["weights_hash"] for line in lines] == [finished.outcomes[step].state_hash for step in range(6)]


def test_a_seed_names_the_steps(finished: Finished, opened: Server) -> None:
    async def drawn(recorded: RecordedRun) -> list[list[int]]:
        return [choose(recorded, 3, seed) for seed in (1, 1, 2, 3, 4)]

    step_lists = on(finished, opened, drawn)
    assert step_lists[0] == step_lists[1] == sorted(set(step_lists[0]))
    assert len(step_lists[0]) == 3
    assert len({tuple(steps) for steps in step_lists}) > 1


@pytest.mark.parametrize(
    ("step", "reason"), [(2, "bad_batch"), (3, "exception"), (4, "loss_not_finite"), (5, "gradient_spike")]
)
def test_a_failed_step_names_the_command_that_fails_it_again(
    finished: Finished, opened: Server, headrace: Run, step: int, reason: str
) -> None:
    failed = finished.outcomes[step]
    assert isinstance(failed, StepFailed)
    assert failed.reason == reason
    words = shlex.split(failed.command)
    assert words[0] == "headrace"
    code, out, _ = headrace(*words[1:])
    assert code == 0
    report = json.loads(out[0])
    assert (report["step"], report["bitwise_equal"], report["weights_hash"]) == (step, True, failed.state_hash)
    if reason == "loss_not_finite":
        assert report["loss"] is None


def test_one_step_of_a_run_without_a_broker(finished: Finished, tmp_path: Path, headrace: Run) -> None:
    alone = tmp_path / finished.run
    shutil.copytree(finished.folder, alone, ignore=shutil.ignore_patterns("server.json"))
    code, out, _ = headrace("replay", str(alone), "--step", "1")
    assert code == 0
    assert json.loads(out[0])["bitwise_equal"]


def test_the_manifest_says_how_a_step_is_computed_not_the_configuration(finished: Finished, opened: Server) -> None:
    slower = msgspec.structs.replace(finished.setting.algorithm, learning_rate=1e-3)
    other = msgspec.structs.replace(finished.setting, algorithm=slower)

    async def again(recorded: RecordedRun) -> bool:
        with Rerun(recorded) as rerun:
            loaded = await rerun.reach(1)
            return compare(loaded, attempt(loaded)).bitwise_equal

    assert on(finished._replace(setting=other), opened, again)


def test_a_way_that_strays_is_said(finished: Finished, opened: Server) -> None:
    """A checkpoint of other bits, which says of itself that it is whole: the first step after it is named."""

    async def again(recorded: RecordedRun) -> tuple[bool, int]:
        with Rerun(recorded) as rerun:
            strange = await rerun.reach(0)
            tensor = strange.trainer.state.master[next(iter(strange.trainer.state.master))]
            tensor.data.mul_(1.5)
            strange.trainer.save({})
            forged = strange.trainer.folder / "checkpoint.safetensors"
            with Rerun(dataclasses.replace(recorded, checkpoints={0: forged})) as astray:
                loaded = await astray.reach(1)
                return compare(loaded, attempt(loaded)).bitwise_equal, astray.strayed

    assert on(finished, opened, again) == (False, 0)


def test_what_cannot_be_replayed_is_said(finished: Finished, opened: Server, tmp_path: Path, headrace: Run) -> None:
    run = str(finished.folder)
    for words, code, says in [
        ((run, "--step", "9"), 1, "has no finished step 9; it has 0 to 5"),
        ((run,), 2, "expected exactly one of"),
        ((run, "--step", "1", "--steps", "2"), 2, "expected exactly one of"),
        ((run, "--steps", "0"), 2, "expected an integer >= 1"),
        ((run, "--steps", "2", "--debug"), 2, "work on one step"),
        ((run, "--step", "1", "--debug", "--to", "x"), 2, "exclude each other"),
        ((str(tmp_path), "--step", "1"), 2, "holds neither a run"),
    ]:
        exit_code, out, err = headrace("replay", *words)
        assert (exit_code, out) == (code, []), words
        assert says in err
        assert err.count("\n") == 1


def test_purged_records_and_a_missing_checkpoint_are_no_failed_step(
    finished: Finished, tmp_path: Path, headrace: Run
) -> None:
    alone = tmp_path / finished.run
    shutil.copytree(finished.folder, alone, ignore=shutil.ignore_patterns("server.json"))

    async def purge() -> int:
        async with await open_store(alone / "broker") as server:
            async with await as_writers(server.url, server.credentials) as admin:
                return await admin.purge("HR_TRAJ", subject=TRAJ.at(run=finished.run, group="g000002"))

    assert uvloop.run(purge()) == 2
    code, out, err = headrace("replay", str(alone), "--step", "1")
    assert (code, out) == (1, [])
    assert "purged: group g000002 of step 1" in err
    for file in (alone / "checkpoints").glob("v*"):
        file.unlink()
    code, _, err = headrace("replay", str(alone), "--step", "1")
    assert code == 1
    assert "keeps no checkpoint of version 1 or before; there is none" in err


def test_the_nearest_checkpoint_is_the_newest_that_is_not_too_new(finished: Finished, tmp_path: Path) -> None:
    async def never(_: object) -> Records:
        raise AssertionError

    recorded = RecordedRun(
        run="r",
        config=finished.setting,
        tokenizer="",
        manifests={},
        outcomes={},
        checkpoints={version: tmp_path for version in (0, 10, 20)},
        fetch=never,
    )
    assert [recorded.nearest(step) for step in (0, 9, 10, 25)] == [0, 0, 10, 20]
    with pytest.raises(ReplayError, match="no finished step that can be run again"):
        choose(recorded, 1, 1)
