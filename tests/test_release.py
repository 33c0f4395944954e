"""`make release` twice from one commit: equal files."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="builds a commit"),
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in ("build", "cyclonedx_py")),
        reason="needs pip install 'headrace[release]'",
    ),
]


def test_two_builds_of_one_commit_are_equal(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        words = [sys.executable, str(ROOT / "deploy/release/build.py"), "--out", str(tmp_path / folder)]
        done = subprocess.run(words, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    first, second = ({file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert first == second
    kinds = sorted(name.removeprefix("headrace-").partition("-py3")[0] for name in first)
    assert len(first) == 4 and "SHA256SUMS" in kinds and "headrace.cdx.json" in kinds
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=tmp_path / "one", check=True)
    parts = {part["name"].lower() for part in json.loads(first["headrace.cdx.json"])["components"]}
    assert {"msgspec", "torch", "nats-py"} <= parts
