"""Alerts and dashboards name metrics that exist; every alert has a runbook and fires in promtool's own test."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from headrace.metrics.figures import FIGURES
from tests.support.paths import ROOT

DEPLOY = ROOT / "deploy" / "prometheus"
ALERTS = (DEPLOY / "alerts.yml").read_text()
NAMES = re.findall(r"- alert: (\w+)", ALERTS)
_LOCAL = ROOT / ".cache" / "prometheus" / "usr" / "bin" / "promtool"
PROMTOOL = shutil.which("promtool") or (str(_LOCAL) if _LOCAL.exists() else "")
SOURCES = [*(ROOT / "headrace" / "metrics").glob("*.py"), ROOT / "headrace" / "dashboard" / "run_metrics.py"]


def existing() -> set[str]:
    """Every metric name that headrace exposes, without the endings of counters and histograms."""
    text = "".join(path.read_text() for path in SOURCES)
    return {figure.name for figure in FIGURES.values()} | set(re.findall(r'"(headrace_[a-z0-9_]+)"', text))


def named(text: str) -> set[str]:
    return {re.sub(r"_(total|count|bucket|sum)$", "", name) for name in re.findall(r"headrace_[a-z0-9_]+", text)}


def expressions() -> dict[str, str]:
    grafana = json.loads((ROOT / "deploy" / "grafana" / "headrace.json").read_text())
    panels = " ".join(target["expr"] for panel in grafana["panels"] for target in panel["targets"])
    return {"alerts.yml": " ".join(re.findall(r"expr: '(.*)'", ALERTS)), "headrace.json": panels}


@pytest.mark.parametrize("where", ["alerts.yml", "headrace.json"])
def test_every_metric_in_use_exists(where: str) -> None:
    used = named(expressions()[where])
    assert len(used) > 10
    assert used <= existing()


def test_every_alert_has_a_runbook() -> None:
    headings = re.findall(r"^## (\w+)$", (ROOT / "docs" / "runbooks.md").read_text(), re.MULTILINE)
    assert headings == NAMES
    assert re.findall(r"runbooks.md#(\w+)", ALERTS) == [name.lower() for name in NAMES]


@pytest.mark.skipif(not PROMTOOL, reason="promtool is missing: apt-get install prometheus")
@pytest.mark.parametrize("words", [("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")])
def test_promtool_accepts_the_rules(words: tuple[str, ...]) -> None:
    done = subprocess.run([PROMTOOL, *words], cwd=DEPLOY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_finds_the_targets_where_processes_write_them() -> None:
    assert "../../runs/*/targets/*.json" in (DEPLOY / "prometheus.yml").read_text()
    assert '"targets"' in Path(ROOT / "headrace" / "launch" / "serve.py").read_text()
