"""`headrace eval` as a user runs it: two scripted policies, their card, and the same report from the streams again."""

import json
from pathlib import Path

import pytest

from tests.launch.test_up import command
from tests.tasks.making.test_making import FILES, WORDS, commit, write

COMMIT_LIMITS = ("max_tokens=65536", "context_tokens=65536", "max_turns=64", "wall_s=600")
"""Those of docs/benchmark.md for a suite of commits."""
SETTINGS = ("--set", "environment.backend=process", "--set", "run.min_free_mb=64")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_policies_are_measured_and_the_report_is_made_again_from_the_streams(tmp_path: Path) -> None:
    done = command(
        tmp_path, "eval", "--policy", "scripted:oracle", "--against", "scripted:idle", "--suite", "generated/heldout",
        "--tasks", "5", "--trials", "2", *SETTINGS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    idle, oracle, comparison = [json.loads(line) for line in lines if line.startswith("{")]
    assert (idle["pass_1"]["mean"], oracle["pass_1"]["mean"], comparison["finding"]) == (0.0, 1.0, "better")
    assert oracle["attempts"] == 10 and oracle["infra_failures"] == 0
    assert oracle["first_edit_s"]["count"] == 10 and oracle["means"]["tested"] == 1.0
    cards = [Path(line.removeprefix("card: ")) for line in lines if line.startswith("card: ")]
    assert len(cards) == 3 and all("pass@1" in (tmp_path / card).read_text() for card in cards)
    again = command(tmp_path, "eval", "--policy", oracle["run"], "--again", oracle["id"], *SETTINGS)
    assert again.returncode == 0 and "the report is equal" in again.stdout, again.stderr
    stored = tmp_path / "runs" / oracle["run"] / "bench" / f"{oracle['id']}.json"
    told = stored.read_bytes()
    assert oracle["means"]["call_tokens"] > 0 and oracle["means"]["thinking_tokens"] == 0.0
    stored.write_bytes(told.replace(b'"passed": true', b'"passed": false', 1))
    again = command(tmp_path, "eval", "--policy", oracle["run"], "--again", oracle["id"], *SETTINGS)
    assert again.returncode == 1 and "DIFFERS" in again.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_commits_of_a_repository_are_passed_by_their_patches_and_by_nothing_else(tmp_path: Path) -> None:
    tree = write(tmp_path / "words", FILES)
    commit(tree, "Words")
    tests = FILES["tests/test_words.py"]
    long = "".join(f"\n\ndef count_{number}(text):\n    return len(text) + {number}\n" for number in range(40))
    asked = "\n\ndef test_count():\n    from words.text import count_39\n\n    assert count_39('ab') == 41\n"
    write(tree, {"words/text.py": WORDS + long, "tests/test_words.py": tests + asked})
    commit(tree, "Counts: a patch that is longer than an attempt of the demo")
    write(tree, {"words/text.py": WORDS.replace("len(word) >", "len(word) >=") + long})
    write(tree, {"tests/test_words.py": tests.replace('longest("ab cd") == "ab"', 'longest("ab cd") == "cd"') + asked})
    commit(tree, "The last of several longest words counts")
    made = command(
        tmp_path, "tasks", "make", "commits", "words", "--name", "words", "--changed-tests", *SETTINGS
    )  # fmt: skip
    assert made.returncode == 0 and "2 certified tasks of 1 sources" in made.stdout, made.stdout + made.stderr
    limits = [word for limit in COMMIT_LIMITS for word in ("--set", f"limits.{limit}")]
    done = command(
        tmp_path, "eval", "--policy", "scripted:oracle", "--against", "scripted:idle", "--suite", "words",
        "--tasks", "0", "--trials", "1", *limits, *SETTINGS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    idle, oracle, found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert (idle["pass_1"]["mean"], oracle["pass_1"]["mean"], found["pass_1"]["mean"]) == (0.0, 1.0, 1.0)
    assert idle["attempts"] == oracle["attempts"] == 2 and oracle["infra_failures"] == 0
