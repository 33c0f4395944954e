"""Harbor tasks with steps, and with a verifier's own image, through rollout, environment and judge."""

import asyncio
import os
from pathlib import Path

import pytest

from headrace.actors.environment.actor import Environment
from headrace.actors.judge import Judge
from headrace.actors.rollout.actor import Rollout
from headrace.bus.connection import Bus
from headrace.config import Config, Production, Run, Tasks
from headrace.config import Environment as Section
from headrace.judging.rules import VERSION
from headrace.messages.judging import Score, StepScore
from headrace.messages.rollout import Limits, PolicyRef, RolloutRequest, Trajectory, TurnSampled
from headrace.messages.sandbox import ANY_RUN
from headrace.messages.subjects import FAIL, SCORE, TASK, TRAJ, TURN, token
from headrace.messages.tasks import TaskRef
from headrace.tasks import diff as task_diff
from headrace.tasks.importing import harbor
from headrace.tasks.importing.base import ImportOptions
from headrace.tasks.importing.writing import import_suite
from headrace.vmhost.backends.container.backend import unavailable
from headrace.vmhost.images import base, packages
from headrace.vmhost.qemu import probe
from tests.conftest import Connect
from tests.support import rows
from tests.support.actors import living
from tests.support.archives import Members, file, folder, link
from tests.support.bases import built
from tests.support.hosts import CACHE
from tests.tasks.importing import test_stepwise

pytestmark = pytest.mark.anyio
SUITE = "folders"
AGENT, JUDGE = "headrace.example/agent:1", "headrace.example/judge:1"


def config(place: Path, section: Section) -> Config:
    return Config(
        run=Run(dir=str(place)),
        environment=section,
        production=Production(enabled=False),
        tasks=Tasks(dir=str(place / "suites")),
    )


def suite(place: Path, template: str = "") -> None:
    environment = Section(cache_dir=CACHE)
    options = ImportOptions(suite=SUITE, source=place / "tasks", template=template, environment=environment)
    report = import_suite(SUITE, place / "suites" / SUITE, "harbor", harbor.read(options))
    assert not report.refused, report.refused


async def issue(bus: Bus, run: str, slot: int, policy: str, task: str = "t", max_turns: int = 12) -> None:
    request = RolloutRequest(
        run=run,
        lane="train",
        group="g",
        slot=slot,
        attempt=0,
        task=TaskRef(SUITE, task),
        seed=slot,
        policy=PolicyRef(kind="scripted", name=policy),
        limits=Limits(max_turns=max_turns, max_tokens=50_000, context_tokens=50_000, wall_s=600.0),
    )
    await bus.publish(TASK.at(run=run, lane="train", suite=token(SUITE)), request)


async def scored(bus: Bus, run: str, count: int) -> dict[int, Score]:
    """The scores by slot; an attempt that infrastructure failed fails the test."""
    scores: dict[int, Score] = {}

    async def follow() -> None:
        async for received in bus.follow("HR_SCORE", SCORE.at(run=run, judge=VERSION, group="g")):
            scores[received.message.slot] = received.message
            if len(scores) == count:
                return

    async def failure() -> str:
        async for received in bus.follow("HR_LEDGER", FAIL.at(run=run, group="g")):
            return str(received.message.detail)
        return ""

    failing, following = asyncio.create_task(failure()), asyncio.create_task(follow())
    await asyncio.wait({failing, following}, return_when=asyncio.FIRST_COMPLETED)
    assert not failing.done(), failing.result()
    failing.cancel()
    return scores


async def trajectories(bus: Bus, run: str, count: int) -> dict[int, Trajectory]:
    ends: dict[int, Trajectory] = {}
    async for received in bus.follow("HR_TRAJ", TRAJ.at(run=run, group="g")):
        ends[received.message.slot] = received.message
        if len(ends) == count:
            break
    return ends


async def test_every_step_is_judged_with_the_changes_at_its_end(connect: Connect, tmp_path: Path) -> None:
    test_stepwise.folder(tmp_path / "tasks" / "t", first="min_reward = 1.0")
    suite(tmp_path, "light")
    settings, bus, run = config(tmp_path, Section(backend="process")), await connect("admin"), "steps"
    async with (
        living(Environment, settings, await connect("environment", node="n1"), ANY_RUN),
        living(Judge, settings, await connect("judge"), run),
        living(Rollout, settings, await connect("rollout"), run),
    ):
        for slot, (policy, turns) in enumerate([("oracle", 12), ("idle", 12), ("oracle", 2), ("edit-tests", 12)]):
            await issue(bus, run, slot, policy, max_turns=turns)
        scores, ends = await scored(bus, run, 4), await trajectories(bus, run, 4)
    gold, half = ends[0], ends[2]
    assert [snapshot.diff for snapshot in gold.earlier or ()] == [{"first.txt": b"one\n"}]
    assert gold.diff == {"first.txt": b"one\n", "given.txt": b"two\n", "second.txt": b"two\n"}
    assert (half.outcome, half.diff) == ("max_turns", {"first.txt": b"one\n", "given.txt": b"two\n"})
    assert [(score.verdict, score.reward) for _, score in sorted(scores.items())] == [
        ("passed", 1.0),
        ("failed", 0.0),
        ("failed", 0.5),
        ("failed", 0.0),
    ]
    assert scores[0].parts == {"step first": 0.5, "step second": 0.5} and scores[0].suspicions == ()
    assert scores[2].steps == (
        StepScore(name="first", value=1.0, share=0.5),
        StepScore(name="second", value=0.0),
    )
    assert scores[1].steps == (
        StepScore(name="first", value=0.0, reason="min_reward: reward is 0, expected at least 1"),
        StepScore(name="second", reason="not examined, because of step first"),
    )


async def test_an_attempt_that_is_handed_over_keeps_the_changes_of_its_earlier_steps(
    connect: Connect, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    solve = f"cat {gate}\ncat given.txt > second.txt\n"
    test_stepwise.folder(tmp_path / "tasks" / "t", **{"steps/second/solution/solve.sh": solve})
    suite(tmp_path, "light")
    settings, bus, run = config(tmp_path, Section(backend="process")), await connect("admin"), "over"
    async with living(Environment, settings, await connect("environment", node="n1"), ANY_RUN):
        async with living(Rollout, settings, await connect("rollout"), run, "leaving"):
            await issue(bus, run, 0, "oracle")
            async for received in bus.follow("HR_TURN", TURN.at(run=run, trajectory="g-0-0")):
                if isinstance(received.message, TurnSampled) and received.message.turn.index == 2:
                    break
        async with living(Rollout, settings, await connect("rollout"), run, "heir"):
            with await asyncio.to_thread(gate.open, "w"):  # once the script reads
                pass
            end = (await trajectories(bus, run, 1))[0]
    assert (end.rollout, end.outcome, len(end.turns)) == ("heir", "finished", 4)
    assert [snapshot.diff for snapshot in end.earlier or ()] == [{"first.txt": b"one\n"}]
    assert end.diff["second.txt"] == b"two\n"


async def test_a_step_that_fills_its_sandbox_is_said_in_the_outcome(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tests see none of its changes; the last step is small again."""
    monkeypatch.setattr(task_diff, "PULL_LIMIT", 4096)
    monkeypatch.setattr(task_diff, "_fits_at_first", lambda task: True)  # as of a task that brings its files
    fills = {"steps/first/solution/solve.sh": "echo one > first.txt\nhead -c 9000 /dev/zero > big\n"}
    fills["steps/second/solution/solve.sh"] = "cat given.txt > second.txt\nrm big\n"
    test_stepwise.folder(tmp_path / "tasks" / "t", **fills)
    suite(tmp_path, "light")
    settings, bus, run = config(tmp_path, Section(backend="process")), await connect("admin"), "fills"
    async with (
        living(Environment, settings, await connect("environment", node="n1"), ANY_RUN),
        living(Judge, settings, await connect("judge"), run),
        living(Rollout, settings, await connect("rollout"), run),
    ):
        await issue(bus, run, 0, "oracle")
        scores, ends = await scored(bus, run, 1), await trajectories(bus, run, 1)
    assert (ends[0].outcome, [snapshot.diff for snapshot in ends[0].earlier or ()]) == ("sandbox_limit", [{}])
    assert ends[0].diff["first.txt"] == b"one\n"
    assert scores[0].steps and scores[0].steps[0].value == 0.0 and scores[0].verdict == "failed"


def images(place: Path) -> None:
    """The agent's image, with a library and a tool that the judge's lacks, and the judge's, with an answer."""
    base.ensure(Section(cache_dir=CACHE))
    names = ("sh", "cat", "chmod", "cp", "find", "mkdir", "rm", "grep", "sed", "test", "ls")
    shell: Members = [
        folder("bin"),
        file("bin/busybox", probe._busybox(packages.folder(Path(CACHE))), mode=0o755),
        *(link(f"bin/{name}", "busybox") for name in names),
        file("bin/bash", b'#!/bin/sh\nexec /bin/sh "$@"\n', mode=0o755),
    ]
    given = [folder("app"), file("app/given.txt", b"given\n"), folder("data"), file("data/old.txt", b"old\n")]
    hidden = [folder("judge"), file("judge/answer.txt", b"42\n")]
    for name, tag, below in (("agent", AGENT, given), ("judge", JUDGE, hidden)):
        built(Path(CACHE), place / name, f"{name}-own", tag, [*shell, *below])


OWN = {
    "task.toml": f"""schema_version = "1.4"
artifacts = ["/app/given.txt", "/app/out.txt", "/data"]
[environment]
docker_image = "{AGENT}"
workdir = "/app"
[verifier]
environment_mode = "separate"
[verifier.environment]
""",
    "instruction.md": "Write 42 to /app/out.txt and new to /data/new.txt.",
    "solution/solve.sh": "echo 42 > out.txt; echo new > /data/new.txt; echo x > left.txt; echo y > /data/sub\n",
    "tests/Dockerfile": f"FROM {JUDGE}\nWORKDIR /judge\nENV WANTED=/judge/answer.txt\nCOPY . /tests/\n",
    "tests/test.sh": """ok=1
[ "$PWD" = /judge ] || ok=0
[ "$(cat /app/out.txt)" = "$(cat $WANTED)" ] || ok=0
[ "$(cat /app/given.txt)" = given ] || ok=0  # the agent did not change it
[ "$(cat /data/old.txt)$(cat /data/new.txt)" = oldnew ] || ok=0  # beside its work folder
[ "$(ls /app)" = "given.txt
out.txt" ] || ok=0
echo $ok > /logs/verifier/reward.txt
""",
}
LINK = OWN | {"solution/solve.sh": "ln -s /judge/answer.txt out.txt; echo new > /data/new.txt\n"}


@pytest.mark.vm
@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_verifier_with_an_image_of_its_own_gets_the_artifacts_alone(connect: Connect, tmp_path: Path) -> None:
    if why := unavailable():
        pytest.skip(f"no containers here: {why}")
    await asyncio.to_thread(images, tmp_path)
    rows.write(tmp_path / "tasks" / "t", OWN)
    rows.write(tmp_path / "tasks" / "link", LINK)
    suite(tmp_path)
    section = Section(backend="container", cache_dir=CACHE, lease_s=120.0)
    settings, bus, run = config(tmp_path, section), await connect("admin"), "own"
    async with (
        living(Environment, settings, await connect("environment", node="n1"), ANY_RUN),
        living(Judge, settings, await connect("judge"), run),
        living(Rollout, settings, await connect("rollout"), run),
    ):
        await issue(bus, run, 0, "oracle")
        await issue(bus, run, 1, "idle")
        await issue(bus, run, 2, "oracle", "link")
        scores, ends = await scored(bus, run, 3), await trajectories(bus, run, 3)
    assert (scores[0].verdict, scores[0].value, scores[0].reason) == ("passed", 1.0, "")
    assert (scores[1].verdict, scores[1].value) == ("failed", 0.0)
    assert ends[0].diff.keys() == {"out.txt", "/data/new.txt", "/data/sub"} and "left.txt" in ends[0].touched
    assert (scores[2].verdict, scores[2].value) == ("failed", 0.0), "a link does not show the judge's answer"
