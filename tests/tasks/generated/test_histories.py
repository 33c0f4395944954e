"""Git histories of generated fixes: always the same commits, and only the fixes are candidates for tasks."""

import subprocess
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.tasks import certificates, open_suite
from headrace.tasks.base import both_sides
from headrace.tasks.generated.repositories import make
from headrace.tasks.making import commits

PROCESS = ("--set", "environment.backend=process")


def head(folder: Path) -> str:
    return subprocess.run(["git", "-C", folder, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout


def test_only_the_fixes_of_a_history_are_candidates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "history", str(tmp_path / "a"), "--count", "3"]) == 0
    assert "3 fixes in" in capsys.readouterr().out
    listed = list(commits.commits(tmp_path / "a"))
    assert [each.message for each in listed] == [make("heldout", seed).task.prompt for seed in (2, 1, 0)]
    before, after = (commits.tree(tmp_path / "a", commit, "a").files for commit in (listed[1].parent, listed[1].id))
    made = make("heldout", 1)
    code = {path: data for path, data in made.task.files.items() if path.startswith(("kit/", "lib/", "app/"))}
    assert before == code | {"test_visible.py": made.task.files["test_visible.py"]}, "the bug and the agent's tests"
    assert after == code | made.oracle.solution | made.oracle.hidden
    assert main(["tasks", "history", str(tmp_path / "b"), "--count", "3"]) == 0
    assert head(tmp_path / "a") == head(tmp_path / "b")


def test_a_folder_that_exists_and_another_suite_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "history", str(tmp_path)]) == 2
    assert main(["tasks", "history", str(tmp_path / "a"), "--suite", "xmltodict-0.13.0"]) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path} cannot be made: File exists" in error
    assert "expected a generated suite such as generated/heldout, got 'xmltodict-0.13.0'" in error


@pytest.mark.slow  # a certificate is some twenty test runs
def test_the_fixes_make_certified_tasks(tmp_path: Path) -> None:
    assert main(["tasks", "history", str(tmp_path / "fixes"), "--count", "3"]) == 0
    suites = tmp_path / "suites"
    words = ["tasks", "make", "commits", str(tmp_path / "fixes"), "--name", "made", "--count", "2", "--bare-prompt"]
    assert main([*words, *PROCESS, "--set", f'tasks.dir="{suites}"']) == 0
    suite = open_suite("made", suites)
    assert len(list(suite.ids())) == 2 and certificates.refusal(suite, suites, False) == ""
    prompts = {make("heldout", seed).task.prompt for seed in range(3)}
    for id in suite.ids():
        task, oracle = both_sides(suite, id)
        assert task.prompt in prompts, "what the policies of headrace's own recipe were trained on"
        assert len(oracle.solution) == 1 and list(oracle.hidden) == ["test_hidden.py"]
        assert task.tests.paths == ("test_visible.py",)
