"""The judge over a real broker and real sandboxes: verdicts on good and bad attempts, and the loss of a sandbox."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.actors.environment.actor import Environment
from headrace.actors.judge import Judge
from headrace.bus.connection import Bus
from headrace.config import Algorithm
from headrace.config import Environment as Section
from headrace.config import Judge as JudgeSection
from headrace.config.training import Options
from headrace.judging.examination import TRIES
from headrace.messages import tasks
from headrace.messages.operations import Event
from headrace.messages.rollout import SlotFailed, TokenKinds
from headrace.messages.sandbox import ANY_RUN, Acquire
from headrace.messages.subjects import EVENT, FAIL, SCORE, TRAJ
from headrace.sandboxes.client import Sandboxes
from headrace.vmhost.errors import VmhostError
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.judging import CACHE, FIXED, KILLS_ITS_KEEPER, ORACLE, PATH, TASK, config, first, judged, trajectory
from tests.support.touched import overwrite, page_of

pytestmark = pytest.mark.anyio


@pytest.fixture
async def observer(connect: Connect) -> Bus:
    return await connect("admin")


@pytest.fixture
async def environment(connect: Connect, tmp_path: Path) -> AsyncIterator[Environment]:
    async with living(Environment, config(tmp_path), await connect("environment", node="n1"), ANY_RUN) as actor:
        yield actor


async def test_verdicts(connect: Connect, environment: Environment, tmp_path: Path, observer: Bus) -> None:
    weaker = b"def test_nothing():\n    assert True\n"
    async with living(Judge, config(tmp_path), await connect("judge"), "j1"):
        right, wrong, sly, odd, crash, broken = await asyncio.gather(
            judged(observer, trajectory("j1", "g1", {PATH: FIXED}, slot=0)),
            judged(observer, trajectory("j1", "g1", {}, slot=1)),
            judged(observer, trajectory("j1", "g1", {"test_hidden.py": weaker}, slot=2, touched=("test_hidden.py",))),
            judged(observer, trajectory("j1", "g1", {PATH: FIXED + b"\nimport sys\nsys.modules\n"}, slot=3)),
            judged(observer, trajectory("j1", "g1", {PATH: b"import os\nos._exit(0)\n"}, slot=4)),
            judged(observer, trajectory("j1", "g1", {PATH: b"def"}, slot=5)),
        )
    assert (right.verdict, right.passed, right.reward, right.suspicions) == ("passed", True, 1.0, ())
    assert [test.name for test in right.tests] == list(ORACLE.expected)
    where = EVENT.where(run="j1", actor="judge", type="event")
    told = [received.message async for received in observer.history("HR_EVENT", where)]
    blind = [event.text for event in told if isinstance(event, Event) and event.kind == "machines_not_checked"]
    assert len(blind) == 1 and "lacks the capability inspect" in blind[0]
    assert (right.sampled_tokens, right.calls, right.turns, right.family) == (3, 1, 1, TASK.family)
    assert (wrong.verdict, wrong.passed, wrong.reward) == ("failed", False, 0.0)
    assert (sly.verdict, sly.reward) == ("failed", 0.0)
    assert (odd.verdict, odd.reward, odd.suspicions) == ("passed", 1.0, ()), "a word in a text takes nothing away"
    assert (crash.verdict, crash.reward) == ("failed", 0.0)
    assert (broken.verdict, broken.reward) == ("failed", 0.0)


async def test_length_is_priced_and_the_verdict_is_not(
    connect: Connect, environment: Environment, tmp_path: Path, observer: Bus
) -> None:
    effort = {"thinking_tokens": 10.0, "call_tokens": 20.0, "text_tokens": 30.0, "calls": 40.0, "turns": 200.0}
    prices: dict[str, Any] = {f"length_{name}": x for name, x in effort.items()} | {"length_penalty": 0.001}
    rules = Algorithm(options=Options(reward=prices))
    plain = trajectory("j2", "g1", {PATH: FIXED}, slot=1)
    (turn,) = plain.turns  # three tokens and one call
    counted = msgspec.structs.replace(turn, kinds=TokenKinds(thinking=1, calls=1))
    async with living(Judge, config(tmp_path, algorithm=rules), await connect("judge"), "j2"):
        priced = await judged(observer, trajectory("j2", "g1", {PATH: FIXED}, turns=(counted,)))
        await observer.publish(TRAJ.at(run="j2", group="g1"), plain)
        where = FAIL.where(run="j2")
        failed = await first(observer, "HR_LEDGER", where, lambda record: isinstance(record, SlotFailed))
    # x = 10 + 20 + 30 + 40 + 200 = 300, and the price is 0.001 x (sqrt(1 + 3) - 1) / 0.005.
    assert priced.passed and priced.reward == pytest.approx(0.8)
    assert priced.parts == {"verdict": 1.0, "effort": pytest.approx(-0.2)}
    assert failed.reason == "reward_error" and "does not count its tokens by kind" in failed.detail


async def test_a_candidate_that_kills_its_machine_twice_is_judged_and_its_siblings_are_not_harmed(
    connect: Connect, environment: Environment, tmp_path: Path, observer: Bus
) -> None:
    async with living(Judge, config(tmp_path), await connect("judge"), "j3"):
        scores = await asyncio.gather(
            judged(observer, trajectory("j3", "g1", {PATH: KILLS_ITS_KEEPER}, slot=0)),
            judged(observer, trajectory("j3", "g1", {PATH: FIXED}, slot=1)),
        )
    assert [score.verdict for score in scores] == ["candidate_crash", "passed"]
    deaths = [
        received.message.data["deaths"]
        async for received in observer.history("HR_EVENT", EVENT.where(run="j3", actor="judge", type="event"))
        if isinstance(received.message, Event) and received.message.kind == "judge_vm_died"
    ]
    assert deaths == [1, 2]


async def test_our_own_failure_is_no_verdict(
    connect: Connect, environment: Environment, tmp_path: Path, observer: Bus
) -> None:
    # The process backend refuses the production lane: for the judge a sandbox that can't be had.
    made = trajectory("j4", "g1", {PATH: FIXED}, lane="production")
    async with living(Judge, config(tmp_path), await connect("judge"), "j4"):
        await observer.publish(TRAJ.at(run="j4", group="g1"), made)
        failed = await first(observer, "HR_LEDGER", FAIL.at(run="j4", group="g1"), lambda message: True)
    assert isinstance(failed, SlotFailed)
    assert (failed.reason, failed.slot, failed.attempt) == ("judge_lost", 0, 0)
    assert [r async for r in observer.history("HR_SCORE", SCORE.where(run="j4"))] == []


async def test_a_trajectory_of_an_unknown_task_is_a_dead_letter(
    connect: Connect, tmp_path: Path, observer: Bus
) -> None:
    lost = trajectory("j5", "g1", {}, task=tasks.TaskRef("generated/train", "no-such-task"))
    async with living(Judge, config(tmp_path), await connect("judge"), "j5"):
        await observer.publish(TRAJ.at(run="j5", group="g1"), lost)
        where = EVENT.where(run="j5", actor="judge", type="event")
        told = await first(observer, "HR_EVENT", where, lambda message: message.kind == "rejected")
    assert "no-such-task" in told.text
    assert [r async for r in observer.history("HR_SCORE", SCORE.where(run="j5"))] == []


async def test_a_redelivered_trajectory_is_scored_once(
    connect: Connect, environment: Environment, tmp_path: Path, observer: Bus
) -> None:
    made = trajectory("j6", "g1", {PATH: FIXED})
    async with living(Judge, config(tmp_path), await connect("judge"), "j6") as judge:
        score = await judged(observer, made)
        received = await observer.get("HR_TRAJ", score.trajectory_seq)
        received.deliveries = 2
        await judge._handle(received)
    scores = [r.message async for r in observer.history("HR_SCORE", SCORE.where(run="j6"))]
    assert scores == [score]


MEETS_ITS_SIBLINGS = b"""import os, pathlib

_seen = pathlib.Path("{mark}")
_seen.touch()
with _seen.open("a") as file:
    file.write("x")
if len(_seen.read_text()) > 1:
    raise RuntimeError("not the first")
"""


async def test_some_verdicts_are_made_again_alone_and_two_that_differ_are_said(
    connect: Connect, environment: Environment, tmp_path: Path, observer: Bus
) -> None:
    # An attack on another sandbox needs a leak; in the process backend the host's files are one.
    spy = MEETS_ITS_SIBLINGS.replace(b"{mark}", str(tmp_path / "mark").encode())
    section = JudgeSection(again=1.0)
    async with living(Judge, config(tmp_path, judge=section), await connect("judge"), "j8"):
        same, other = await asyncio.gather(
            judged(observer, trajectory("j8", "g1", {PATH: FIXED}, isolation="group")),
            judged(observer, trajectory("j8", "g2", {PATH: spy + FIXED}, isolation="group")),
        )
        alone = await judged(observer, trajectory("j8", "g3", {PATH: FIXED}, isolation="episode"))
    assert (same.verdict, same.again) == ("passed", "same")
    assert (other.verdict, other.again) == ("passed", "other")
    assert (alone.verdict, alone.again) == ("passed", "")
    told = [
        received.message.data["group"]
        async for received in observer.history("HR_EVENT", EVENT.where(run="j8", actor="judge", type="event"))
        if isinstance(received.message, Event) and received.message.kind == "verdicts_differ"
    ]
    assert told == ["g2"]


async def test_every_suspicious_verdict_is_made_again_and_few_others(
    connect: Connect, environment: Environment, tmp_path: Path, observer: Bus
) -> None:
    async with living(Judge, config(tmp_path, judge=JudgeSection(again=0.0)), await connect("judge"), "j9"):
        sly = {PATH: FIXED, "conftest.py": b""}
        scores = await asyncio.gather(
            judged(observer, trajectory("j9", "g1", {PATH: FIXED}, isolation="group")),
            judged(observer, trajectory("j9", "g1", sly, slot=1, isolation="group")),
        )
    assert [score.again for score in scores] == ["", "same"]
    drawn = Judge(config(tmp_path), await connect("judge"), "j10", "j10")  # never started
    share = sum(drawn._drawn(trajectory("j10", f"g{n}", {})) for n in range(2000)) / 2000
    assert 0.03 < share < 0.07


MEETS_ITS_SUCCESSOR = b"""import os, pathlib

_seen, _taken = pathlib.Path("{mark}"), pathlib.Path("{mark}.taken")
with _seen.open("a") as file:
    file.write("x")
while len(_seen.read_text()) > 1 and not _taken.exists():
    pass
"""


async def test_a_judge_that_is_superseded_in_its_second_look_steps_back(
    connect: Connect, environment: Environment, tmp_path: Path, observer: Bus
) -> None:
    mark, taken = tmp_path / "mark", tmp_path / "mark.taken"
    code = MEETS_ITS_SUCCESSOR.replace(b"{mark}", str(mark).encode()) + FIXED
    settings = config(tmp_path, judge=JudgeSection(again=1.0))
    successor = Sandboxes(await connect("judge"), 20.0)
    async with living(Judge, settings, await connect("judge"), "j12"):
        made = trajectory("j12", "g1", {PATH: code}, isolation="group")
        await observer.publish(TRAJ.at(run="j12", group="g1"), made)
        while not mark.exists() or mark.read_text() != "xx":
            await asyncio.sleep(0.01)
        sandbox_group = f"g1-0-alone{2 * TRIES}"
        held = await successor.acquire(
            Acquire(run="j12", lane="train", role="judge", group=sandbox_group, slot=0, attempt=0, isolation="episode")
        )
        assert not held.fresh
        taken.touch()
        where = EVENT.where(run="j12", actor="judge", type="event")
        told = await first(observer, "HR_EVENT", where, lambda message: message.kind == "superseded")
        assert told.data["trajectory"] == made.id
        await successor.release(held)
    assert [r async for r in observer.history("HR_SCORE", SCORE.where(run="j12"))] == []
    assert [r async for r in observer.history("HR_LEDGER", FAIL.where(run="j12"))] == []


WAITS_TO_BE_TOUCHED = b"while open('/etc/hostname').read() == 'sandbox\\n':\n    pass\n"


@pytest.mark.vm
async def test_a_machine_that_was_touched_is_not_believed_and_who_did_it_has_cheated(
    connect: Connect, tmp_path: Path, observer: Bus
) -> None:
    """An attacker that controls a guest's kernel can write any page. The test does so in all machines of the diff."""
    section = Section(backend="qemu", cache_dir=CACHE, lease_s=20.0, warm=0, max_vms=3)
    changes: dict[str, Any] = {"environment": section, "judge": JudgeSection(again=0.0)}
    settings = config(tmp_path, **changes)
    async with (
        living(Environment, settings, await connect("environment", node="n1"), ANY_RUN) as node,
        living(Judge, settings, await connect("judge"), "j11"),
    ):
        diff = {PATH: WAITS_TO_BE_TOUCHED + FIXED}
        beside = judged(observer, trajectory("j11", "g1", diff, isolation="group"))
        alone = judged(observer, trajectory("j11", "g3", diff, isolation="episode"))
        judging = asyncio.gather(beside, alone)
        page = 0
        while not judging.done():
            for clone in node._host._backend.alive():  # type: ignore[attr-defined]
                page = page or page_of(clone, "/etc/hostname")
                with suppress(VmhostError):  # it does not map its memory yet
                    overwrite(clone, page, b"touched")
            await asyncio.sleep(0.02)
        culprits = await judging
        same = await judged(observer, trajectory("j11", "g1", {PATH: FIXED}, slot=1, isolation="group"))
        clean = await judged(observer, trajectory("j11", "g2", {PATH: FIXED}, isolation="group"))
    for guilty in culprits:
        assert (guilty.verdict, guilty.reward, guilty.again) == ("cheating", 0.0, "")
        assert guilty.suspicions == ("machine_touched:/etc/hostname",)
    assert (same.verdict, same.again, same.suspicions) == ("passed", "same", ())
    assert (clean.verdict, clean.again, clean.suspicions) == ("passed", "", ())
    told = [
        (received.message.data["slot"], received.message.text.rpartition(" and ")[2])
        async for received in observer.history("HR_EVENT", EVENT.where(run="j11", actor="judge", type="event"))
        if isinstance(received.message, Event) and received.message.kind == "machine_touched"
    ]
    assert sorted(told) == [(0, "did it"), (0, "did it"), (1, "did not do it")]
