"""`kill -9` of `headrace up`, then `up` again with the same run id."""

import json
import subprocess
import sys

import pytest

from tests.support.paths import ROOT


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_survives_the_death_of_up_again_and_again() -> None:
    words = (sys.executable, "-m", "benchmarks.restarts", "--kills", "3", "--steps", "4")
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert (figures["kills"], figures["unbalanced"], figures["duplicates"], figures["exit_code"]) == (3, 0, 0, 0)
    assert figures["gone_max_s"] <= 5.0
    assert figures["issued_slots"] == figures["trained_slots"] > 0
