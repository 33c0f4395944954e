"""`kill -9` of `headrace up`, then `up` again with the same run id."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.chaos import measure
from benchmarks.tiny_run import TINY
from tests.support.paths import ROOT


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_survives_the_death_of_up_again_and_again() -> None:
    words = (sys.executable, "-m", "benchmarks.restarts", "--kills", "3", "--steps", "4")
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert (figures["kills"], figures["unbalanced"], figures["duplicates"], figures["up_exit_code"]) == (3, 0, 0, 0)
    assert figures["gone_max_s"] <= 5.0
    assert figures["issued_slots"] == figures["trained_slots"] > 0


def test_a_part_that_misses_a_target_is_not_met() -> None:
    """Its own exit code counts, whatever its report calls by that name."""
    report = measure((sys.executable, "-c", "print('{\"exit_code\": 0}'); raise SystemExit(1)"))
    assert report["exit_code"] == 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_make_chaos_measures_its_three_parts_and_keeps_what_is_finished(tmp_path: Path) -> None:
    """Small and in the process backend. The second call continues behind the parts that ended well."""
    changes = [word for key, value in TINY.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    changes += ["--set", f"run.dir={json.dumps(str(tmp_path / 'runs'))}"]
    sizes = ("--kills", "2", "--others", "2", "--restarts", "1", "--restart-steps", "2", "--seed", "5")
    places = ("--folder", str(tmp_path / "parts"), "--out", str(tmp_path / "chaos.json"))
    words = (sys.executable, "-m", "benchmarks.chaos", *sizes, *places, *changes)
    with subprocess.Popen(words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as first:
        deadline = time.monotonic() + 600.0
        while not (tmp_path / "parts" / "kills.json").exists():
            assert first.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        first.terminate()
    done = subprocess.run(words, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "kills: kept from" in done.stderr
    report = json.loads(done.stdout)
    assert report == json.loads((tmp_path / "chaos.json").read_text()) and report["met"]
    assert set(report["kills"]["faults"]) == {name for name in report["kills"]["faults"] if name.startswith("kill_")}
    assert report["kills"]["audit"]["balanced"] and report["stops_and_cuts"]["audit"]["balanced"]
    assert report["restarts"]["unbalanced"] == 0 and report["restarts"]["kills"] == 1
