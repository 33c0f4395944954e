"""Another judge and another trainer use a recorded run; the run itself does not change."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import uvloop

from headrace.bus.broker.server import Server, open_store
from headrace.bus.connection import Bus
from headrace.cli.replay import follow
from headrace.messages.judging import Score
from headrace.messages.rollout import Trajectory
from headrace.messages.subjects import SCORE
from headrace.replay import recorded_run as pasts
from headrace.replay import rejudge
from headrace.replay.retrain import SecondTrainer
from tests.replay.conftest import Finished, Run
from tests.support.keys import as_writers


@pytest.fixture(scope="module")
def judged(finished: Finished, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path, str]]:
    """A copy of the run that another judge has judged with opposite verdicts, and the command's line."""
    folder = tmp_path_factory.mktemp("judged") / finished.run
    shutil.copytree(finished.folder, folder, ignore=shutil.ignore_patterns("server.json"))
    server = uvloop.run(open_store(folder / "broker"))

    async def contrary(made: Trajectory, old: Score) -> Score:
        return msgspec.structs.replace(old, reward=1.0 - old.reward, passed=not old.passed)

    async def body() -> str:
        async with await Bus.connect(server.url, role="judge", credentials=server.credentials) as bus:
            groups = await rejudge.closings(bus, finished.run)
            report = await rejudge.rejudge(bus, finished.run, "j2", contrary, groups)
            return msgspec.json.encode(report).decode()

    yield server, folder, uvloop.run(body())
    uvloop.run(server.stop())


def test_a_contrary_judge_flips_every_advantage_that_is_one(
    finished: Finished, judged: tuple[Server, Path, str]
) -> None:
    server, _, said = judged
    report = json.loads(said)
    assert (report["groups"], report["slots"], report["scores_run"]) == (12, 24, f"{finished.run}-j2")
    assert report["advantages_flipped"] == len(report["flips"]) > 0
    for flip in report["flips"]:
        assert flip["reward_again"] == 1.0 - flip["reward"]
        assert flip["advantage"] == -flip["advantage_again"] != 0.0

    async def seen(run: str) -> int:
        async with await as_writers(server.url, server.credentials) as bus:
            return len([r async for r in bus.history("HR_SCORE", SCORE.where(run=run))])

    assert uvloop.run(seen(finished.run)) == 24, "the run's own trainer and ledger see nothing new"
    assert uvloop.run(seen(f"{finished.run}-j2")) == 24


def test_a_second_trainer_of_the_same_mind_has_the_same_bits(
    finished: Finished, opened: Server, tmp_path: Path, headrace: Run
) -> None:
    """As far as the recipe was one: step 5 was taken under another, and 3 cannot be taken at all."""
    where = str(tmp_path / "second")
    code, out, _ = headrace("retrain", str(finished.folder), "--to", where, "--steps", "2")
    assert code == 0
    assert [json.loads(line)["same_weights"] for line in out] == [True, True]
    code, out, _ = headrace("retrain", str(finished.folder), "--to", where, "--steps", "3")
    lines = [json.loads(line) for line in out]
    assert [line["step"] for line in lines] == [2, 3, 4], "it goes on where it was left"
    assert [line["failed"] for line in lines] == ["bad_batch", "exception", "loss_not_finite"]
    assert all(line["same_weights"] for line in lines)


def test_another_objective_and_another_judge_teach_something_else(
    judged: tuple[Server, Path, str], tmp_path: Path, headrace: Run
) -> None:
    _, folder, _ = judged
    other = ("--with", "algorithm.weighting=masked", "--with", "algorithm.learning_rate=5e-3")
    taught = {}
    for name, words in (("own", ()), ("objective", other), ("judge", ("--judge", "j2"))):
        to = ("--to", str(tmp_path / name), "--steps", "2")
        code, out, _ = headrace("retrain", str(folder), *to, *words)
        assert code == 0
        taught[name] = [json.loads(line) for line in out]
    assert len({lines[1]["weights_hash"] for lines in taught.values()}) == 3
    assert taught["judge"][0]["reward_mean"] == pytest.approx(1.0 - taught["own"][0]["reward_mean"])
    code, _, err = headrace("retrain", str(folder), "--to", str(tmp_path / "none"), "--judge", "j9")
    assert code == 1
    assert "judge j9 has not judged run" in err


def test_a_second_trainer_waits_for_the_other_judge(finished: Finished, opened: Server, tmp_path: Path) -> None:
    """Both follow the run: a batch is taken when its groups are judged again, and not before."""

    async def same(made: Trajectory, old: Score) -> Score:
        return old

    async def body() -> None:
        async with (
            await Bus.connect(opened.url, role="replay", credentials=opened.credentials) as bus,
            await Bus.connect(opened.url, role="judge", credentials=opened.credentials) as judge,
        ):
            recorded = await pasts.of_run(bus, finished.setting, finished.folder, finished.run)
            live = rejudge.LiveScores()
            hearing = asyncio.create_task(live.follow(bus, finished.run, "j7"))
            second = SecondTrainer(recorded, finished.setting, tmp_path, live.found, live.more)
            lines = second.steps(follow(bus, finished.run))
            first = asyncio.ensure_future(anext(lines))
            closings = rejudge.ending(judge, finished.run)
            names = {group.group for group in recorded.manifests[0].groups}
            while names:
                done, _ = await asyncio.wait({first}, timeout=0.05)
                assert not done
                group = await anext(closings)
                names.discard(group.group)
                await rejudge.rejudge(judge, finished.run, "j7", same, [group])
            assert (await first).same_weights
            hearing.cancel()

    uvloop.run(body())


def test_a_second_trainer_follows_a_run_that_lives(finished: Finished, opened: Server, tmp_path: Path) -> None:
    """It reads the history first and then waits for new records; here none arrive."""

    async def body() -> list[bool]:
        async with await Bus.connect(opened.url, role="replay", credentials=opened.credentials) as bus:
            recorded = await pasts.of_run(bus, finished.setting, finished.folder, finished.run)
            second = SecondTrainer(recorded, finished.setting, tmp_path)
            same_weights = []
            lines = second.steps(follow(bus, finished.run))
            async for line in lines:
                same_weights.append(line.same_weights)
                if line.step == 5:
                    waiting = asyncio.ensure_future(anext(lines))
                    done, _ = await asyncio.wait({waiting}, timeout=0.05)
                    assert not done
                    waiting.cancel()
                    break
            return same_weights

    assert uvloop.run(body()) == [True] * 5 + [False]
