"""A test that hangs in a whole run ends that run and says where it waits."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

HANGS = """
import asyncio

async def wait_without_end():
    await asyncio.Event().wait()

def test_hangs():
    print("what it said before")
    asyncio.run(wait_without_end())

def test_after():
    pass
"""


@pytest.mark.slow
def test_a_run_with_a_test_that_hangs_ends_and_names_what_it_waits_for(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.support.watchdog import register as pytest_configure\n")
    (tmp_path / "test_hangs.py").write_text(HANGS)
    options = [
        option
        for line in (ROOT / "Makefile").read_text().splitlines()
        if line.startswith("PYTEST :=")
        for option in line.split()[3:]
    ]
    assert "--max-worker-restart" in options
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", ".", "--timeout", "3", *options, "."],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 1
    assert "test_hangs did not end within 3 s" in run.stderr + run.stdout
    assert "in wait_without_end" in run.stderr + run.stdout
    assert "what it said before" in run.stderr + run.stdout
