"""The example package: its suite, checker and reward are found by entry point, and an episode runs with them."""

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import registry
from headrace.algorithms.rewards import REWARDS
from headrace.judging import Candidate
from headrace.judging.checkers import CHECKERS
from headrace.judging.scoring import Rewarder, score_of
from headrace.judging.verdicts import Verdict
from headrace.messages.sandbox import TestOutcome as Outcome
from headrace.tasks import open_suite
from headrace.tasks.suites import SUITES
from tests.support.judging import trajectory
from tests.support.paths import ROOT
from tests.support.playing import played

pytestmark = pytest.mark.anyio
FOLDER = ROOT / "examples" / "math_suite"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The distribution is installed, as far as Python's import system can tell."""
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]
    info = tmp_path / "headrace_math_example-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    sections = [
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in names.items())
        for group, names in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(sections))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(FOLDER))
    registry._entry_points.cache_clear()
    yield
    registry._entry_points.cache_clear()
    sys.modules.pop("math_suite", None)


def test_the_parts_are_found_with_version_and_hash() -> None:
    for name, seam in (("sums", SUITES), ("worked", CHECKERS), ("priced_tests", REWARDS)):
        plugin = seam.plugin(name)
        assert plugin is not None and (plugin.version, len(plugin.source)) == ("1.0", 64)


async def test_sums_are_graded_without_a_sandbox() -> None:
    suite = open_suite("sums/hard")
    right = await played(None, suite, "3", "oracle")
    wrong = await played(None, suite, "3", "idle")
    assert [(verdict.decision, verdict.value) for verdict in (right, wrong)] == [("passed", 1.0), ("failed", 0.0)]
    made = trajectory("r", "g", {}, task=suite.task("3").ref)
    candidate = Candidate(trajectory=made, task=suite.task("3"), oracle=suite.oracle("3"))
    rewarder = Rewarder("priced_tests", {}, 5.0, {"free": 2, "price": 0.1})
    reward = await rewarder.reward(made, right)
    assert reward == pytest.approx(0.9), "three tokens, two of them free"
    score = score_of(candidate, 1, right, reward, by=rewarder, wall_s=0.0)
    assert [plugin.name for plugin in score.plugins] == ["priced_tests", "sums", "worked"]


async def test_the_reward_counts_single_tests() -> None:
    tests = (Outcome("a", "passed"), Outcome("b", "failed"))
    verdict = Verdict(decision="failed", tests=tests)
    rewarder = Rewarder("priced_tests", {}, 5.0, {"tests": 0.5, "free": 9})
    assert await rewarder.reward(trajectory("r", "g", {}), verdict) == 0.25
    cheat = Verdict(decision="cheating", tests=tests)
    assert await rewarder.reward(trajectory("r", "g", {}), cheat) == 0.0
