"""`make proof` goes on where it was interrupted."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import proof


def test_a_seed_with_a_report_is_not_repeated_and_one_that_failed_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    finished = tmp_path / "runs" / "proof-abc1234-s1-500-episode"
    finished.mkdir(parents=True)
    (finished / "report.json").write_text(json.dumps({"wall_s": 2.0}))
    assert proof.trained("abc1234", 1, 500, "episode") == {"wall_s": 2.0}
    for commit, seed, tasks in (("abc1234", 2, 500), ("abc1234", 1, 50), ("fff0000", 1, 500)):
        with pytest.raises(SystemExit, match=f"seed {seed} ended with code 1; start the benchmark again to resume"):
            proof.trained(commit, seed, tasks, "episode")
