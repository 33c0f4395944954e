"""Tasks without a sandbox: rollout and judge alone, from a request to a Score; no environment runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.curriculum import Curriculum
from headrace.actors.judge import Judge
from headrace.actors.rollout.actor import Rollout
from headrace.bus.errors import Unrecoverable
from headrace.config import Config, Evaluation, Production, Run, Tasks
from headrace.launch.checks import suites as checks
from headrace.messages import tasks
from headrace.messages.rollout import Limits, PolicyRef, RolloutRequest, Trajectory
from headrace.messages.subjects import SCORE, TASK, TRAJ, token
from headrace.messages.tasks import ANSWER, Grading, Oracle, Task, TaskRef
from headrace.registry import PluginError
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.folder_suites import write_suite
from tests.support.judging import first, trajectory

pytestmark = pytest.mark.anyio


def suite(folder: Path, name: str, grading: Grading, ids: Sequence[str] = ("1",)) -> None:
    pairs = []
    for id in ids:
        ref = TaskRef(name, id)
        plan = tasks.TestPlan(kind="command", argv=("true",))
        task = Task(ref=ref, family="sums", prompt="1 + 1?", files={}, allowed=(), tests=plan, sandbox=False)
        oracle = Oracle(
            ref=ref, hidden={}, tests=plan, expected=(), solution={}, answer="so it is\nanswer: 2", grading=grading
        )
        pairs.append((task, oracle))
    write_suite(name, folder / "suites" / name, pairs, "made by a test")


def config(folder: Path, **changes: Any) -> Config:
    return Config(
        run=Run(dir=str(folder)),
        production=Production(enabled=False),
        evaluation=Evaluation(before=False, after=False),
        tasks=Tasks(
            dir=str(folder / "suites"), suite="sums", heldout="sums", unseen="sums", uncertified=True, **changes
        ),
    )


async def test_a_message_becomes_a_trajectory_and_a_score(connect: Connect, tmp_path: Path) -> None:
    suite(tmp_path, "sums", Grading(kind="checker", checker="number", reference={"answer": "2"}))
    observer, settings = await connect("admin"), config(tmp_path)
    async with (
        living(Rollout, settings, await connect("rollout"), "r1"),
        living(Judge, settings, await connect("judge"), "r1"),
    ):
        for slot, policy in enumerate(("oracle", "idle")):
            request = RolloutRequest(
                run="r1",
                lane="train",
                group="g1",
                slot=slot,
                attempt=0,
                task=TaskRef("sums", "1"),
                seed=7,
                policy=PolicyRef(kind="scripted", name=policy),
                limits=Limits(max_tokens=500, context_tokens=500),
            )
            await observer.publish(TASK.at(run="r1", lane="train", suite=token("sums")), request)
        scores = {
            slot: await first(
                observer, "HR_SCORE", SCORE.where(run="r1"), lambda score, slot=slot: getattr(score, "slot", -1) == slot
            )
            for slot in (0, 1)
        }
        made = await first(observer, "HR_TRAJ", TRAJ.at(run="r1", group="g1"), lambda found: found.slot == 0)
    assert isinstance(made, Trajectory) and made.diff == {ANSWER: b"so it is\nanswer: 2"}
    assert (made.outcome, made.backend, made.malformed_calls, len(made.turns)) == ("finished", "", 0, 1)
    assert [(scores[slot].verdict, scores[slot].value, scores[slot].reward) for slot in (0, 1)] == [
        ("passed", 1.0, 1.0),
        ("failed", 0.0, 0.0),
    ]


async def test_a_checker_that_is_not_there_ends_the_judge_with_its_name(connect: Connect, tmp_path: Path) -> None:
    suite(tmp_path, "sums", Grading(kind="checker", checker="no_such", reference={"answer": "2"}))
    observer = await connect("admin")
    judge = Judge(config(tmp_path), await connect("judge"), "r4", "j-1")
    await judge.start()
    try:
        made = trajectory("r4", "g1", {ANSWER: b"2"}, task=TaskRef("sums", "1"))
        await observer.publish(TRAJ.at(run="r4", group="g1"), made)
        error = await judge.failed
    finally:
        await judge.shut(1.0)
    assert isinstance(error, PluginError) and "no_such" in str(error)


async def test_a_suite_judged_by_logs_is_not_trained_on_without_a_word(connect: Connect, tmp_path: Path) -> None:
    suite(tmp_path, "sums", Grading(kind="f2p_p2p", parser="pytest", trust="log"))
    wanted = r"suite sums reads its verdicts from logs.*at_risk = true"
    refused = Curriculum(config(tmp_path), await connect("curriculum"), "r2", "c-1")
    with pytest.raises(Unrecoverable, match=wanted):
        await refused.start()
    await refused.shut(1.0)
    assert [finding.part for finding in checks.check(config(tmp_path)) if "reads its verdicts" in finding.text] == [
        "tasks.suite"
    ]
    allowed = config(tmp_path, at_risk=True)
    assert not [finding for finding in checks.check(allowed) if "reads its verdicts" in finding.text]
    async with living(Curriculum, allowed, await connect("curriculum"), "r3"):
        pass
