"""Progress and report of a run, from the records of a real broker; an unreadable one ends nothing."""

import asyncio
import json
from pathlib import Path
from secrets import token_hex

import msgspec
import pytest

from headrace.bus.connection import Bus
from headrace.config import Config
from headrace.dashboard import page, report
from headrace.dashboard.records import collect
from headrace.dashboard.run_metrics import RunMetrics
from headrace.dashboard.watch import FINISHED, Watch
from headrace.messages.evaluation import EvalRequest
from headrace.messages.operations import Event
from headrace.messages.rollout import PolicyRef
from headrace.messages.subjects import EVENT, LEDGER, SCORE, STEP, TRAJ
from headrace.messages.training import Efficiency
from headrace.replay.audit import audit
from tests.conftest import Connect
from tests.support import records

pytestmark = pytest.mark.anyio


async def test_an_unreadable_record_is_shown_and_the_run_goes_on_to_its_end(connect: Connect) -> None:
    run = f"r{token_hex(4)}"
    admin = await connect()
    await admin.publish_raw(EVENT.at(run=run, actor="environment", type="event"), b"{}", {"Hr-Type": "promotion/1"})
    await admin.publish_raw(STEP.at(run=run), b"x", {"Hr-Type": "step_done/9"})
    watch = Watch(await connect("operator"), run, Config(), started=0.0)
    lines: list[str] = []
    both = asyncio.Event()

    def say(line: str) -> None:
        lines.append(line)
        if len(lines) == 2:
            both.set()

    following = asyncio.create_task(watch.until_finished(say))
    await both.wait()
    finished = Event(actor="curriculum", id="c1", kind=FINISHED)
    await admin.publish(EVENT.at(run=run, actor="curriculum", type="event"), finished)
    await following
    assert [line.split(":")[0] for line in lines] == ["skipped an unreadable record"] * 2
    assert watch.bus.skipped_count == 2
    assert watch.events[-1][1].kind == FINISHED


async def test_a_report_is_made_of_the_streams(connect: Connect) -> None:
    run = f"r{token_hex(4)}"
    admin = await connect()
    asked = EvalRequest(
        id="b1", run=run, suite="generated/heldout", tasks=2, policy=PolicyRef(), reason="heldout_before"
    )
    issued = records.issued("eb1-000000", lane="eval", run=run)
    await admin.publish(LEDGER.at(run=run, group=issued.group), issued)
    at = await admin.publish(TRAJ.at(run=run, group=issued.group), records.trajectory(issued))
    score = records.score(issued.group, trajectory_seq=at, passed=False, lane="eval", run=run)
    await admin.publish(SCORE.at(run=run, judge="j1", group=issued.group), score)
    await admin.publish_raw(SCORE.at(run=run, judge="j1", group="g000001"), b"{}", {"Hr-Type": "score/9"})
    operator = await connect("operator")
    collected = await collect(operator, run, [asked])
    assert collected.episodes == 1
    assert collected.evaluations["heldout_before"].scores["t0"] == score
    assert collected.evaluations["heldout_before"].trajectories["t0"].group == issued.group

    watch = Watch(operator, run, Config(), started=1.0)
    moments = report.Moments(started=1.0, ready=2.0, shutdown=3.0)
    built = report.build(
        Config(), watch, collected, await audit(operator, run), moments, ["judge died"], report.Backends()
    )
    plain = json.loads(msgspec.json.encode(built))
    assert (plain["episodes"], plain["unreadable_records"], plain["heldout_before"]) == (1, 1, None)
    assert plain["restarts"] == ["judge died"] and plain["time"]["setup_s"] == 1.0 and plain["ledger"]["issued"] == 0
    assert "not measured" in page.render(built, watch, collected, str)

    spent = {"busy": 3.0, "batch": 1.0}
    told = Efficiency(seconds=spent, wall_s=4.0, trained_tokens=100, model_flops=6e9)
    done = msgspec.structs.replace(records.done(0, [], 2, run=run), efficiency=told)
    watch.steps = [done]
    assert "unknown peak" in page.render(built, watch, collected, str)
    assert gauges(watch, operator) == spent | {"trained": 25.0}
    watch.steps = [msgspec.structs.replace(done, efficiency=msgspec.structs.replace(told, peak_flops=3e9))]
    drawn = page.render(built, watch, collected, str)
    assert "unknown peak" not in drawn and "Seconds of a step by cause" in drawn
    assert "Largest memory" not in drawn and "in collectives" not in drawn, "an earlier headrace measured neither"
    assert gauges(watch, operator) == spent | {"trained": 25.0, "mfu": 0.5}
    more = {"peak_bytes": 3 << 30, "planned_bytes": 2 << 30, "collectives_s": (1.0, 0.25, 0.75)}
    watch.steps = [msgspec.structs.replace(done, efficiency=msgspec.structs.replace(told, **more))]
    drawn = page.render(built, watch, collected, str)
    assert "Largest memory" in drawn and "in collectives" in drawn
    memory = {"peak": 3.0 * (1 << 30), "plan": 2.0 * (1 << 30)}
    assert gauges(watch, operator) == spent | {"trained": 25.0, "collectives": 1.0, "straggler": 0.75} | memory


def gauges(watch: Watch, bus: Bus) -> dict[str, float]:
    """What Prometheus reads of the newest step's efficiency: seconds by cause, trained tokens a second, MFU, memory,
    and the longest times of ranks."""
    names = {
        "headrace_trained_tokens_per_second": "trained",
        "headrace_mfu_ratio": "mfu",
        "headrace_trainer_peak_bytes": "peak",
        "headrace_trainer_planned_bytes": "plan",
        "headrace_rank_collectives_seconds": "collectives",
        "headrace_rank_straggler_seconds": "straggler",
    }
    samples = [sample for metric in RunMetrics(watch, bus, Path()).collect() for sample in metric.samples]
    causes = {s.labels["cause"]: s.value for s in samples if s.name == "headrace_step_cause_seconds"}
    return causes | {names[s.name]: s.value for s in samples if s.name in names}
