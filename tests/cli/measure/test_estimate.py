"""`headrace estimate` prints the time of each part of a run, and refuses what it cannot measure."""

import re

import pytest

from headrace.cli.main import main
from tests.support.paths import ROOT


def test_the_demo_is_estimated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", str(ROOT / "deploy" / "demo.toml")]) == 0
    products, *parts = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"products in float32: \d+ G operations/s a thread, \d+ with few rows; attempts of .*", products
    )
    assert [line.split("  ")[0] for line in parts] == ["mid-training", "training", "evaluations", "together about"]
    assert "40 steps of" in parts[1] and "744 attempts" in parts[2]


def test_other_suites_are_estimated_by_their_limits(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--set", "tasks.suite=mine", "--set", "limits.context_tokens=640", "--set", "limits.max_tokens=192"]
    assert main(["estimate", str(ROOT / "deploy" / "demo.toml"), *words]) == 0
    assert "attempts of at most 640 tokens, of which 192 are sampled" in capsys.readouterr().out
