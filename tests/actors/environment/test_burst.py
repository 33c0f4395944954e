"""The burst of the benchmark, small: real environment actors over a real broker, simulated machines."""

import json
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

WORDS = ("--nodes", "4", "--burst", "80", "--rates", "40", "--seconds", "0.5")


@pytest.mark.slow
def test_every_ask_of_a_burst_gets_its_sandbox() -> None:
    command = [sys.executable, "-m", "benchmarks.burst", *WORDS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert (figures["burst_acquired"], figures["burst_failed"], figures["burst_nodes_used"]) == (80, 0, 4)
    assert (figures["rate_40_acquired"], figures["rate_40_failed"]) == (20, 0)
