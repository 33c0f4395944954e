"""The proof of compaction: its configuration is in order, and a short run of it gives a curve."""

import json
from pathlib import Path

import pytest

from benchmarks import proof_compaction
from headrace.config import load
from headrace.launch import runs
from headrace.launch.checks import suites as checks
from tests.launch.test_up import HEADRACE, up
from tests.support.paths import ROOT

CONFIG = ROOT / "deploy" / "proof-compaction.toml"
SHORT = {
    "policy.dim": 32,
    "policy.layers": 1,
    "policy.heads": 2,
    "policy.kv_heads": 2,
    "policy.expert_dim": 32,
    "mid_training.tokens": 6000,
    "curriculum.steps": 2,
    "curriculum.group_size": 4,
    "curriculum.groups_per_step": 2,
    "limits.max_turns": 3,
    "evaluation.before": True,
    "evaluation.after": True,
    "evaluation.heldout_tasks": 8,
}


def test_its_limits_leave_no_turn_to_read_the_values_again() -> None:
    config = load(CONFIG)
    assert config.tasks.suite == "generated/notes" and config.mid_training.traces == "notes"
    assert config.mid_training.quality == 0.0, "the warm start does not prefer a mark"
    assert (config.limits.max_turns, config.limits.max_parallel_calls) == (3, 1)
    assert not [finding for finding in checks.check(config) if finding.part.startswith("tasks")]


def test_the_figures_are_means_over_the_first_and_the_last_steps() -> None:
    points = [
        {"step": step, "pass_rate": step / 10, "attempts": 4, "chosen": 1.0, "carried": 1.0, "answered": 1.0}
        for step in range(10)
    ]
    names = ("run", "seed", "backend", "isolated", "steps", "episodes", "heldout_tasks", "heldout_before")
    more = ("heldout_after_t1", "heldout_after_greedy", "staleness_max", "max_abs_dlp", "wall_s", "rl_wall_s")
    report = dict.fromkeys((*names, *more), 1) | {"ledger": {"balanced": True}, "cpu_s": {"judge": 1.5, "trainer": 2.0}}
    figures = proof_compaction.summary(report, points)
    assert (figures["pass_rate_first"], figures["pass_rate_last"]) == (0.2, 0.7)
    assert figures["cpu_s"] == 3.5 and figures["curve"] == points


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.anyio
async def test_two_steps_of_it_give_a_curve(tmp_path: Path) -> None:
    async with up(tmp_path, *HEADRACE, "up", str(CONFIG), **SHORT) as run:
        code, said = await run.end(500.0)
    assert code == 0, said
    report = json.loads((run.run / "report.json").read_text())
    assert report["ledger"]["balanced"] and report["max_abs_dlp"] == 0.0
    points = await proof_compaction.curve(runs.find(str(run.run)))
    assert [(point["step"], point["attempts"]) for point in points] == [(0, 8), (1, 8)]
    figures = proof_compaction.summary(report, points)
    assert figures["backend"] == "process" and not figures["isolated"] and figures["heldout_tasks"] == 8
