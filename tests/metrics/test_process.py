"""Metrics of a process: every figure of every actor has one, actors that end take their gauges along."""

import ast
import re
import shutil
import stat
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import generate_latest

from headrace.bus.runtime.actor import Actor
from headrace.config import Config
from headrace.messages import subjects as s
from headrace.metrics import process
from headrace.metrics.exposition import Exposition, PortTaken, key_of
from headrace.metrics.figures import FIGURES, figure_of
from headrace.secret_files import SecretError
from tests.conftest import Connect
from tests.support.paths import ROOT

PROMTOOL = shutil.which("promtool") or next(
    (str(path) for path in [ROOT / ".cache/prometheus/usr/bin/promtool"] if path.exists()), None
)
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is missing: apt-get install prometheus")
NAME = re.compile(r"^headrace(_[a-z0-9]+)+$")


def exposed() -> str:
    return generate_latest(process.registry).decode()


def published_figures() -> set[tuple[str, str]]:
    """(actor, figure) of every call `self.metric(name=...)` in the actors."""
    figures: set[tuple[str, str]] = set()
    for path in sorted((ROOT / "headrace" / "actors").rglob("*.py")):
        actor = path.parent.name if path.name == "actor.py" else path.stem
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "metric":
                figures |= {(actor, keyword.arg) for keyword in node.keywords if keyword.arg}
    return figures


def test_every_figure_that_an_actor_publishes_has_a_metric() -> None:
    published = published_figures()
    assert len(published) > 15
    assert published <= set(FIGURES)


def test_names_follow_the_convention_and_are_unique() -> None:
    names = [figure.name for figure in FIGURES.values()]
    assert len(set(names)) == len(names)
    assert all(NAME.match(name) and not name.endswith("_total") for name in names)


def test_a_figure_without_a_metric_is_named_and_counted() -> None:
    with pytest.raises(KeyError, match=r"add it to headrace/metrics/figures.py"):
        figure_of("judge", "mood")
    process.figures("judge", "j", {"mood": 1.0})  # an actor goes on without it
    assert 'headrace_unlisted_figures_total{actor="judge",figure="mood"} 1.0' in exposed()


def test_figures_of_several_actors_become_one_without_ids() -> None:
    process.figures("rollout", "a", {"running": 2, "version": 7})
    process.figures("rollout", "b", {"running": 3, "version": 6})
    text = exposed()
    assert "\nheadrace_running_episodes 5.0\n" in text
    assert "\nheadrace_served_version 6.0\n" in text
    process.ended("b")
    assert "\nheadrace_running_episodes 2.0\n" in exposed()
    process.ended("a")
    assert "headrace_running_episodes" not in exposed()


def test_two_processes_cannot_share_a_port(tmp_path: Path) -> None:
    first = Exposition("127.0.0.1", 0, "k", tmp_path, "one", {"run": "r1"})
    try:
        entry = msgspec.json.decode((tmp_path / "one.json").read_bytes())
        assert entry == [{"targets": [first.address], "labels": {"run": "r1", "process": "one"}}]
        url = f"http://{first.address}/metrics"
        keyed = urllib.request.Request(url, headers={"Authorization": "Bearer k"})
        with urllib.request.urlopen(keyed, timeout=60) as answer:
            assert b"process_cpu_seconds_total" in answer.read()
        for headers in ({}, {"Authorization": "Bearer j"}, {"Authorization": "Basic k"}, {"X-Api-Key": "k"}):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60)
            assert refused.value.code == 401 and b"process_" not in refused.value.read()
        with pytest.raises(PortTaken, match=r"set \[metrics\] port = 0"):
            Exposition("127.0.0.1", int(first.address.rpartition(":")[2]), "k", tmp_path, "two", {})
    finally:
        first.close()
    assert not (tmp_path / "one.json").exists()


def test_processes_of_one_folder_share_a_key_that_no_other_user_can_read(tmp_path: Path) -> None:
    key = key_of("", tmp_path)
    assert len(key) > 40 and key_of("", tmp_path) == key
    assert stat.S_IMODE((tmp_path / "metrics.key").stat().st_mode) == 0o600
    (tmp_path / "own").write_text("mine\n")
    assert key_of(str(tmp_path / "own"), tmp_path) == "mine"
    with pytest.raises(SecretError, match=r"\[metrics\] key: .* cannot be read"):
        key_of(str(tmp_path / "absent"), tmp_path)


def scored() -> float:
    """The counter belongs to the process, and other tests of this process may have run a judge."""
    sample = re.search(r"^headrace_scored_trajectories_total (.*)$", exposed(), re.MULTILINE)
    return float(sample.group(1)) if sample else 0.0


class Listener(Actor):
    role = "judge"

    async def start(self) -> None:
        await self.metric(scored=3, passed=1)
        await self.event("greeting", "hello")


@pytest.mark.anyio
async def test_an_actor_s_figures_events_and_publishes_are_metrics(connect: Connect) -> None:
    actor: Any = Listener(Config(), await connect("judge"), "rmetrics", "listener-1")
    actor.name = lambda: "judge"
    before = scored()
    await actor.start()
    text = exposed()
    assert scored() == before + 3
    assert 'headrace_events_total{actor="judge",kind="greeting",level="info"} 1.0' in text
    assert f'headrace_publish_seconds_count{{family="{s.EVENT.template}"}}' in text
    await actor.shut(1.0)


@needs_promtool
def test_promtool_accepts_every_metric() -> None:
    process.figures("trainer", "t", {name: 1.0 for actor, name in FIGURES if actor == "trainer"})
    process.figures("environment", "e", {name: 1.0 for actor, name in FIGURES if actor == "environment"})
    process.delivered("HR_TRAJ", "handled", 0.1)
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, "check", "metrics"], input=exposed(), capture_output=True, text=True)
    complaints = [line for line in done.stderr.splitlines() if "headrace_" in line]
    assert done.returncode == 0 or not complaints, done.stderr + done.stdout
