"""`headrace bench` as a user runs it: two scripted policies, their card, and the same report from the streams again."""

import json
from pathlib import Path

import pytest

from tests.launch.test_up import command, one_sentence

SETTINGS = ("--set", "environment.backend=process", "--set", "run.min_free_mb=64")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_policies_are_measured_and_the_report_is_made_again_from_the_streams(tmp_path: Path) -> None:
    done = command(
        tmp_path, "bench", "--policy", "scripted:oracle", "--against", "scripted:idle", "--suite", "generated/heldout",
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
    again = command(tmp_path, "bench", "--policy", oracle["run"], "--again", oracle["id"], *SETTINGS)
    assert again.returncode == 0 and "the report is equal" in again.stdout, again.stderr
    stored = tmp_path / "runs" / oracle["run"] / "bench" / f"{oracle['id']}.json"
    told = stored.read_bytes()
    stored.write_bytes(told.replace(b'"passed": true', b'"passed": false', 1))
    again = command(tmp_path, "bench", "--policy", oracle["run"], "--again", oracle["id"], *SETTINGS)
    assert again.returncode == 1 and "DIFFERS" in again.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--policy", "scripted:nobody"), "oracle, idle or edit-tests"),
        (("--policy", "scripted:idle", "--suite", "no/suite"), "no/suite"),
        (("--policy", "scripted:idle", "--trials", "0"), "expected an integer >= 1"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_sentence(tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    done = command(tmp_path, "bench", *words)
    assert done.returncode == 2 and one_sentence(done.stderr) and says in done.stderr
