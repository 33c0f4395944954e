"""Texts of policies, users and programs in a real browser: the live page and the report show them, and run nothing.

Every text of every record is the same attack (`tests/support/hostile.py`)."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest

from headrace.bus.connection import Bus
from headrace.config import Config
from headrace.dashboard import charts, errors, transcripts
from headrace.dashboard.records import EvaluatedAttempts, RunRecords
from headrace.dashboard.watch import Watch
from headrace.messages import sandbox
from headrace.messages import subjects as s
from headrace.messages.evaluation import EvalResult
from headrace.messages.ledger import GroupDropped
from headrace.messages.operations import DeadLetter, Event, Heartbeat, Metric
from headrace.messages.product import CapacityLease, GateVerdict, lease_key
from headrace.messages.rollout import PolicyRef, SlotFailed, ToolCall, ToolResult
from headrace.messages.tasks import TaskRef
from headrace.messages.weights import WeightsStaged, WeightsSwapped
from tests.dashboard.live.test_page import (
    CHROMIUM,
    DRIVER,
    RUBRIC,
    RUN,
    Site,
    attempt,
    browser,
    issued,
    score,
    shows,
    site,
    step,
    writers,
)
from tests.support import records
from tests.support.hostile import MARK, PAYLOAD, SHOWN, hostile
from tests.support.keys import Writers
from tests.support.records import of

if TYPE_CHECKING:
    from selenium import webdriver

__all__ = ["browser", "site"]
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no browser: apt-get install chromium chromium-driver"),
]
GROUP = "hostile"
RAN = f"""return [typeof {MARK}, document.querySelectorAll(
    'img, iframe, object, embed, a[href^="javascript"], [onerror], [onload], script:not([src])').length]"""


def bad_attempt() -> Any:
    turn = msgspec.structs.replace(
        attempt().turns[0],
        calls=(ToolCall(id="c1", name="x", arguments={"a": "x"}), ToolCall(id="c2", name="x", error="x")),
        results=(ToolResult(call_id="c1", ok=False, output="x"),),
    )
    made = hostile(msgspec.structs.replace(attempt(), group=GROUP, turns=(turn,), touched=("x",)), "run", "id", "group")
    return msgspec.structs.replace(made, id="hostile-0-0", diff={PAYLOAD: PAYLOAD.encode()})


async def fill(bus: Writers) -> int:
    """A hostile record of every type that the page reads; the attempt's sequence."""
    keep = ("run", "group", "id")
    seq = await bus.publish(s.TRAJ.at(run=RUN, group=GROUP), bad_attempt())
    failed = SlotFailed(run=RUN, lane="train", group=GROUP, slot=1, attempt=0, reason="x")
    scored = msgspec.structs.replace(
        score(GROUP, 0, seq, False),
        parts={"tests": 1.0},
        rubric=RUBRIC,
        reason="x",
        suspicions=("x",),
        tests=(sandbox.TestOutcome("x", "failed"),),
    )
    for subject, record in (
        (s.LEDGER.at(run=RUN, group=GROUP), issued(GROUP, 1, 0)),
        (s.FAIL.at(run=RUN, group=GROUP), failed),
        (s.SCORE.at(run=RUN, judge="judge", group=GROUP), scored),
        (s.CLOSE.at(run=RUN, group=GROUP), GroupDropped(run=RUN, group=GROUP, reason="stale", group_size=2)),
        (s.STEP.at(run=RUN), step(3)),
        (s.DLQ.at(stream="traj", consumer="judge"), of(DeadLetter, stream_seq=1, trace="x", command="x")),
    ):  # fmt: skip
        await bus.publish(subject, hostile(record, *keep))
    measured = of(EvalResult, id="e1", run=RUN, suite="x", version=1, tasks=2, passed=1, rate=0.5, reason="x")
    verdict = GateVerdict(
        run=RUN, candidate=PolicyRef("pinned", 3), promoted=PolicyRef("pinned", 1), stage="shadow", reason="x"
    )
    for actor, kind, event in (
        ("judge", "event", Event(actor="judge", id="j", run=RUN, kind="x", text="x", level="error", data={"a": "x"})),
        ("scavenger", "event", Event(actor="scavenger", id="s", run=RUN, kind="x", text="x")),
        ("evaluator", "eval_result", measured),
        ("feedback", "gate_verdict", verdict),
        ("weight_sync", "weights_staged",
         WeightsStaged(run=RUN, node="n", region="x", version=3, path="x", state_hash="0" * 32, stage_s=0.25)),
        ("rollout", "weights_swapped",
         WeightsSwapped(run=RUN, rollout="x", node="n", version=2, state_hash="0" * 32, pause_ms=1.5)),
    ):  # fmt: skip
        await bus.publish(s.EVENT.at(run=RUN, actor=actor, type=kind), hostile(event, *keep, "actor"))
    lease = CapacityLease(rollout="r9", lanes=("train",), reason="x", since=1.0)
    await (await bus.kv("HR_LEASE")).create(lease_key(RUN, "r9"), hostile(lease))
    return seq


async def heartbeats(bus: Writers) -> None:
    beat = Heartbeat(actor="judge", id="j", node="n1", pid=2, state="running", status="x", waits="x", run=RUN)
    await bus.emit(s.HEARTBEAT.at(actor="judge", id="j"), hostile(beat, "run", "actor"))
    figures = Metric(actor="judge", id="j", run=RUN, time=1.0, values={"a": 1.0})
    await bus.emit(s.METRIC.at(actor="judge"), hostile(figures, "run", "actor"))


async def test_the_live_page_shows_them_and_runs_nothing(site: Site, browser: "webdriver.Chrome") -> None:
    async with writers(site) as bus:
        seq = await fill(bus)
        await asyncio.to_thread(browser.get, site.url)
        await shows(browser, "live")
        for view, shown in {
            "overview": SHOWN, "actors": SHOWN, "groups": GROUP, "trajectories": SHOWN, "behaviour": "", "ledger": "",
            "letters": SHOWN, "regions": SHOWN, "feedback": SHOWN, "scavenger": SHOWN, f"t/{seq}": SHOWN,
        }.items():  # fmt: skip
            browser.execute_script(f"location.hash = '#/{view}'")
            await heartbeats(bus)
            await shows(browser, shown)
            await asyncio.sleep(0.3)  # what an attack would start runs after it is drawn
            assert browser.execute_script(RAN) == ["undefined", 0], view
    assert browser.execute_script("return headrace.state.counts.unreadable") == 0


async def test_the_report_shows_them_and_runs_nothing(browser: "webdriver.Chrome", tmp_path: Path) -> None:
    watch = Watch(cast(Bus, None), RUN, Config(), started=0.0)
    watch.events = [(1.0, hostile(Event(actor="judge", id="j", kind="x", level="error", text="x")))]
    task = TaskRef("generated/heldout", "x")
    made = bad_attempt()
    good, bad = (
        hostile(records.score("e1-000000", 0, passed=passed, lane="eval", task=task), "verdict")
        for passed in (True, False)
    )
    before, after = EvaluatedAttempts(), EvaluatedAttempts()
    for measured, scored in ((before, bad), (after, good)):
        measured.scores[PAYLOAD], measured.trajectories[PAYLOAD] = scored, made
    evaluations = {transcripts.BEFORE: before, transcripts.AFTER: after, transcripts.UNSEEN: after}
    collected = RunRecords(evaluations=evaluations)
    parts = [
        transcripts.section(collected, lambda _: PAYLOAD),
        transcripts.others(collected, lambda _: PAYLOAD),
        errors.section(watch),
        charts.line_chart(PAYLOAD, {PAYLOAD: [(0.0, 1.0), (1.0, 2.0)]}, PAYLOAD),
        charts.busy_strips({PAYLOAD: [(0.0, 0.5)]}, 0.0, 1.0),
        charts.bars({PAYLOAD: 1.0}, PAYLOAD),
    ]
    for number, part in enumerate(parts):
        page = tmp_path / f"{number}.html"
        page.write_text(f"<!doctype html><meta charset=utf-8>{part}")
        await asyncio.to_thread(browser.get, page.as_uri())
        await shows(browser, SHOWN)
        assert browser.execute_script(RAN) == ["undefined", 0], part
    browser.execute_script("document.body.innerHTML = arguments[0]", PAYLOAD)
    assert browser.execute_script(RAN)[1] > 4, "the check sees what an attack would leave"
