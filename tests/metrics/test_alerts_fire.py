"""The alerts of a night's run fire once, on series that the exporters themselves make from a run's records.

Each scenario is a calm run to which one thing happens. What `RunMetrics` and the process's registry expose before and
after is given to promtool, with every alert of alerts.yml: the scenario's own has to fire and no other one.
"""

import json
import math
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.bus.connection import Bus
from headrace.config import Config
from headrace.dashboard.run_metrics import RunMetrics
from headrace.dashboard.watch import Watch
from headrace.messages.evaluation import EvalResult
from headrace.messages.operations import Event
from headrace.messages.rollout import PolicyRef
from headrace.messages.training import EngineMismatch
from headrace.metrics import process
from tests.metrics.test_alerts import ALERTS, DEPLOY, NAMES, PROMTOOL
from tests.support import records

LABELS = {"run": "r1", "instance": "h:1"}
STEPS, CALM, LONG = 30, 60, 120
"""Steps of the calm run; minutes before and after the thing happens."""


def calm(watch: Watch) -> None:
    for step in range(STEPS):
        happen(watch, step)
    evaluated(watch, 60)
    process.gpus(8)


def happen(watch: Watch, step: int, **changes: Any) -> None:
    figures = {"reward_mean": 0.5 + 0.05 * (-1) ** step, "entropy": 0.8, "grad_norm": 0.3, "k3": 0.002}
    done = records.done(step, (f"g{step}",), 8)
    watch.steps.append(msgspec.structs.replace(done, **(figures | changes)))
    watch.step_ended = float(step)


def evaluated(watch: Watch, passed: int) -> None:
    policy = PolicyRef("pinned", 1)
    counts: dict[str, Any] = {"tasks": 100, "passed": passed, "rate": passed / 100, "infra_failures": 0, "version": 1}
    watch.evaluations.append(EvalResult(id=f"e{passed}", run="r1", suite="held", policy=policy, **counts))


def events(kind: str, count: int = 1) -> Callable[[Watch], None]:
    def apply(watch: Watch) -> None:
        event = Event(actor="rollout", id="a", run="r1", kind=kind, level="warning", text="", data={})
        watch.events += [(0.0, event)] * count

    return apply


def later(steps: int, **changes: Any) -> Callable[[Watch], None]:
    def apply(watch: Watch) -> None:
        for step in range(STEPS, STEPS + steps):
            happen(watch, step, **changes)

    return apply


FOREIGN = EngineMismatch(engine="s", fingerprint="other", same_fingerprint=False, k3=0.002)
SCENARIOS: dict[str, tuple[Callable[[Watch], None], dict[str, str]]] = {
    "ServerLost": (events("server_lost"), {"kind": "server_lost", **LABELS}),
    "ServerHung": (events("server_hung"), {"kind": "server_hung", **LABELS}),
    "LoadRefused": (events("load_failed"), {"kind": "load_failed", **LABELS}),
    "AttemptsFail": (events("slot_failed", 20), {"run": "r1"}),
    "StepFailed": (lambda watch: watch.failed_steps.append(records.step_failed(STEPS, (), 8)), LABELS),
    "RewardFalls": (later(10, reward_mean=0.1), LABELS),
    "EvaluationFalls": (lambda watch: evaluated(watch, 30), {"suite": "held", **LABELS}),
    "EntropyOutOfBand": (later(1, entropy=0.1), {"figure": "entropy", **LABELS}),
    "GradientOutOfBand": (later(1, grad_norm=9.0), {"figure": "grad_norm", **LABELS}),
    "MismatchOutOfBand": (later(1, k3=0.05), LABELS),
    "CheckpointFailed": (events("checkpoint_failed"), {"kind": "checkpoint_failed", **LABELS}),
    "DiskFullSoon": (lambda _: None, LABELS),
    "GpuLost": (lambda _: process.gpus(7), {"run": "r1"}),
    "": (later(3, engines=(FOREIGN,)), {}),
}


def exposed(metrics: RunMetrics) -> dict[str, float]:
    """Series to value, as Prometheus reads them. The time since the newest step is no part of a scenario."""
    values: dict[str, float] = {}
    for family in (*metrics.collect(), *process.registry.collect()):
        for sample in family.samples:
            if sample.name.startswith("headrace_") and sample.name != "headrace_step_end_timestamp_seconds":
                labels = ",".join(f'{name}="{value}"' for name, value in {**sample.labels, **LABELS}.items())
                values[f"{sample.name}{{{labels}}}"] = sample.value
    return values


def series(before: dict[str, float], after: dict[str, float], scenario: str) -> list[dict[str, str]]:
    made = []
    for name, value in after.items():
        first = before.get(name, math.nan)
        values = f"{'_' if math.isnan(first) else first}x{CALM - 1} {value}x{LONG}"
        if name.startswith("headrace_disk_free_ratio"):
            values = f"0.9x{CALM - 1} 0.9-0.004x{LONG}" if scenario == "DiskFullSoon" else f"0.9x{CALM + LONG}"
        made.append({"series": name, "values": values})
    return made


@pytest.mark.skipif(not PROMTOOL, reason="promtool is missing: apt-get install prometheus")
def test_each_alert_fires_on_its_own_scenario_and_a_foreign_fingerprint_raises_none(tmp_path: Path) -> None:
    blocks = ALERTS.split("- alert: ")[1:]
    tests = []
    for scenario, (happens, labels) in SCENARIOS.items():
        watch = Watch(Bus.__new__(Bus), "r1", Config(), 0.0)
        metrics = RunMetrics(watch, watch.bus, tmp_path)
        calm(watch)
        before = exposed(metrics)
        happens(watch)
        rules = []
        for name, block in zip(NAMES, blocks, strict=True):
            expected: list[dict[str, Any]] = []
            if name == scenario:
                severity = re.search(r"severity: (\w+)", block)
                summary = re.search(r"summary: (.*)", block)
                assert severity and summary
                notes = {"summary": summary[1], "runbook_url": f"docs/runbooks.md#{name.lower()}"}
                expected = [{"exp_labels": {**labels, "severity": severity[1]}, "exp_annotations": notes}]
            rules.append({"eval_time": f"{CALM - 2}m", "alertname": name, "exp_alerts": []})
            moment = CALM + (50 if name == "DiskFullSoon" else 4)
            rules.append({"eval_time": f"{moment}m", "alertname": name, "exp_alerts": expected})
        tests.append(
            {"interval": "1m", "input_series": series(before, exposed(metrics), scenario), "alert_rule_test": rules}
        )
    file = tmp_path / "scenarios.yml"
    rules_file = str(DEPLOY / "alerts.yml")
    file.write_text(json.dumps({"rule_files": [rules_file], "evaluation_interval": "1m", "tests": tests}))
    done = subprocess.run([PROMTOOL, "test", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    process.gpus(0)


def test_a_scenario_or_a_test_of_promtool_covers_every_alert() -> None:
    tested = re.findall(r"alertname: (\w+)$", (DEPLOY / "alerts_test.yml").read_text(), re.MULTILINE)
    assert sorted([*tested, *filter(None, SCENARIOS)]) == sorted(NAMES)
