"""Verdicts that count for further attempts of their content, over a real broker and the process backend."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.actors.environment.actor import Environment
from headrace.actors.judge import Judge
from headrace.bus.connection import Bus
from headrace.judging import reuse
from headrace.judging.candidates import Candidate
from headrace.judging.rules import VERSION
from headrace.messages.judging import Certificate, Score
from headrace.messages.operations import Event
from headrace.messages.rollout import Trajectory
from headrace.messages.sandbox import ANY_RUN
from headrace.messages.subjects import EVENT, SCORE
from headrace.messages.tasks import Change, SandboxLimits
from headrace.tasks.certificates import AtIssue, task_hash
from headrace.vmhost import agent_files
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.judging import FIXED, ORACLE, PATH, SUITE, TASK, config, first, judged, trajectory

pytestmark = pytest.mark.anyio

WRONG = TASK.files[PATH] + b"\n# nothing\n"


def made(run: str, group: str, diff: dict[str, bytes], slot: int = 0, **changes: Any) -> Trajectory:
    machine = agent_files.digest(sys.version)
    return trajectory(run, group, diff, slot=slot, backend="process", machine=machine, **changes)


async def scores(bus: Bus, run: str) -> dict[int, Score]:
    return {r.seq: r.message async for r in bus.history("HR_SCORE", SCORE.where(run=run))}


async def test_a_content_is_examined_once_by_all_judges_and_after_their_restart(
    connect: Connect, tmp_path: Path
) -> None:
    observer, settings = await connect("admin"), config(tmp_path)
    async with living(Environment, settings, await connect("environment", node="n1"), ANY_RUN):
        async with living(Judge, settings, await connect("judge"), "ja"):
            await asyncio.gather(
                *(judged(observer, made("ja", "g1", {PATH: FIXED}, slot)) for slot in (0, 1)),
                *(judged(observer, made("ja", "g1", {PATH: WRONG}, slot)) for slot in (2, 3, 4)),
            )
    before = await scores(observer, "ja")
    examined = {score.content: seq for seq, score in before.items() if not score.same_as}
    assert len(examined) == 2, "equal attempts that are judged at the same time wait for the first one"
    assert all(score.same_as == examined[score.content] for score in before.values() if score.same_as)
    # There is no environment any more: every verdict is from the records.
    async with (
        living(Judge, settings, await connect("judge"), "ja"),
        living(Judge, settings, await connect("judge"), "ja"),
    ):
        right, wrong = await asyncio.gather(
            judged(observer, made("ja", "g2", {PATH: FIXED}, lane="eval")),
            judged(observer, made("ja", "g3", {PATH: WRONG})),
        )
    originals = {seq: score for seq, score in before.items() if not score.same_as}
    for score, verdict in ((right, "passed"), (wrong, "failed")):
        source = originals[score.same_as]  # type: ignore[index]
        assert (score.verdict, score.content, score.tests) == (verdict, source.content, source.tests)
    assert (right.reward, right.passed, wrong.reward, wrong.passed) == (1.0, True, 0.0, False)


async def test_a_wrong_verdict_is_found_told_and_counts_no_more(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    observer, settings, mine = await connect("admin"), config(tmp_path), await connect("judge")
    attempt = made("jb", "g1", {PATH: FIXED})
    limits = SandboxLimits(**msgspec.structs.asdict(settings.sandboxes))
    content = reuse.content_of(Candidate(trajectory=attempt, task=TASK, oracle=ORACLE), limits)
    planted = Score(
        run="jb", lane="train", group="g0", slot=0, attempt=0, trajectory_seq=1 << 40, task=TASK.ref, family="f",
        judge_version=VERSION, verdict="failed", reward=0.0, passed=False, content=content,
    )  # fmt: skip
    seq = await mine.publish(SCORE.at(run="jb", judge=VERSION, group="g0"), planted)
    async with living(Environment, settings, await connect("environment", node="n1"), ANY_RUN):
        async with living(Judge, settings, mine, "jb"):
            believed = await judged(observer, attempt)
            monkeypatch.setattr(reuse, "CHECKED", 1.0)
            checked = await judged(observer, made("jb", "g1", {PATH: FIXED}, 1))
            where = EVENT.where(run="jb", actor="judge", type="event")
            told = await first(
                observer, "HR_EVENT", where, lambda m: isinstance(m, Event) and m.kind == "verdicts_differ"
            )
            monkeypatch.setattr(reuse, "CHECKED", 0.0)
            after = await judged(observer, made("jb", "g1", {PATH: FIXED}, 2))
        async with living(Judge, settings, await connect("judge"), "jb"):
            restarted = await judged(observer, made("jb", "g1", {PATH: FIXED}, 3))
    assert (believed.same_as, believed.verdict) == (seq, "failed")
    assert (checked.same_as, checked.verdict, checked.content) == (msgspec.UNSET, "passed", content)
    assert (told.level, told.data["content"]) == ("error", content)
    assert [(score.same_as, score.verdict) for score in (after, restarted)] == [(msgspec.UNSET, "passed")] * 2


async def test_a_purged_record_and_a_task_that_is_not_steady_are_examined(connect: Connect, tmp_path: Path) -> None:
    observer, settings = await connect("admin"), config(tmp_path)
    async with living(Environment, settings, await connect("environment", node="n1"), ANY_RUN):
        async with living(Judge, settings, await connect("judge"), "jc") as judge:
            await judged(observer, made("jc", "g1", {PATH: WRONG}))
            (gone,) = await scores(observer, "jc")
            await observer.delete("HR_SCORE", gone)
            anew = await judged(observer, made("jc", "g1", {PATH: WRONG}, 1))
            candidate = Candidate(trajectory=made("jc", "g1", {PATH: WRONG}), task=TASK, oracle=ORACLE)
            certified = judge._content(candidate)
            flaky = Certificate(
                task=TASK.ref, task_hash=task_hash(TASK, ORACLE), judge_version=VERSION, verdict="refused",
                gold_runs=5, gold_passed=4,
            )  # fmt: skip
            judge._made[flaky.task_hash] = flaky
            judge._steady.cache_clear()
            assert judge._content(candidate) == ""
    assert (anew.same_as, anew.verdict, anew.content) == (msgspec.UNSET, "failed", certified)


async def test_an_untouched_repository_needs_no_machine(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no environment at first: the verdict is the certificate's. A checked attempt is examined nevertheless,
    and an examination that passes bars the certificate's verdict."""
    observer, settings = await connect("admin"), config(tmp_path)
    certificate = AtIssue(SUITE, tmp_path).of(TASK.ref.task)
    assert isinstance(certificate, Certificate)
    async with living(Judge, settings, await connect("judge"), "jd") as judge:
        score = await judged(observer, made("jd", "g1", {}))
        monkeypatch.setattr(reuse, "CHECKED", 1.0)
        async with living(Environment, settings, await connect("environment", node="n1"), ANY_RUN):
            checked = await judged(observer, made("jd", "g1", {}, 1))
            monkeypatch.setattr(reuse, "CHECKED", 0.0)
            again = await judged(observer, made("jd", "g1", {}, 2))
            planted = msgspec.structs.replace(checked, group="g0", verdict="passed", passed=True)
            judge._known.bar(str(checked.content))
            judge._known = reuse.Known("jd")
            seq = await judge.bus.publish(SCORE.at(run="jd", judge=VERSION, group="g0"), planted)
            judge._known.note(seq, planted)
            barred = await judged(observer, made("jd", "g1", {}, 3))
    assert (score.certificate, score.verdict, score.reward, score.tests) == (certificate.task_hash, "failed", 0.0, ())
    assert (score.content, score.same_as) == (msgspec.UNSET, msgspec.UNSET)
    assert (checked.certificate, checked.verdict) == (msgspec.UNSET, "failed") and checked.tests
    assert (again.same_as, again.verdict) == ((await sequence(observer, checked)), "failed")
    assert (barred.same_as, barred.certificate, barred.verdict) == (msgspec.UNSET, msgspec.UNSET, "failed")


async def sequence(bus: Bus, score: Score) -> int:
    found = await scores(bus, score.run)
    return next(seq for seq, each in found.items() if each.trajectory_seq == score.trajectory_seq)


@pytest.mark.parametrize(
    "changes",
    [
        {"diff": {PATH: WRONG}},
        {"deleted": (PATH,)},
        {"changes": (Change(PATH, "file", 0o755),)},
        {"digest_before": "0" * 32},
        {"altered": True},
        {"machine": msgspec.UNSET},
    ],
)
async def test_only_an_untouched_and_plain_attempt_takes_its_certificates_verdict(
    changes: dict[str, Any], connect: Connect, tmp_path: Path
) -> None:
    async with living(Judge, config(tmp_path), await connect("judge"), "je") as judge:
        for changed, known in (({}, True), (changes, False)):
            attempt = msgspec.structs.replace(made("je", "g1", {}), **changed)
            candidate = Candidate(trajectory=attempt, task=TASK, oracle=ORACLE)
            content = judge._content(candidate)
            assert (bool(content) and await judge._recorded(content, candidate) is not None) is known
