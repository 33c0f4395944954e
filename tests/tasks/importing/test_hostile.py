"""An import ends with tasks and refusals, or with one sentence about the source, whatever the source holds."""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.main import main
from headrace.tasks.importing import harbor
from headrace.tasks.importing.base import ImportOptions, SourceError
from headrace.tasks.importing.jsonl import read
from headrace.tasks.importing.writing import LONGEST_REASON, ImportReport, import_suite

DEEP = "[" * 100_000 + "]" * 100_000
ROWS = (
    f'{{"prompt": {DEEP}}}',
    '{"prompt": "\\ud800", "answer": "1"}',
    '{"prompt": "x", "answer": "1", "\\udfff": 1}',
    '{"prompt": "x", "\\u001b[2J' + "y" * 100_000 + '": 1}',
    '{"prompt": "x", "answer": ' + "9" * 5000 + "}",
    '{"prompt": "x", "answer": "1"',
    "\0",
    '{"prompt": "\\ud83d\\ude00", "answer": "1"}',
)


def imported(source: Path, folder: Path) -> ImportReport:
    return import_suite("s", folder, "jsonl", read(ImportOptions(suite="s", source=source)))


def test_rows_that_no_task_can_hold_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text("\n".join(ROWS))
    report = imported(source, tmp_path / "s")
    assert report.tasks == 1 and len(report.refused) == len(ROWS) - 1
    reasons = [refusal.reason for refusal in report.refused]
    assert "nested too deep" in reasons[0] and "surrogate pair" in reasons[1] and "surrogate" in reasons[2]
    assert "\x1b" not in reasons[3] and all(len(reason) < LONGEST_REASON + 100 for reason in reasons)


@pytest.mark.parametrize("text", [DEEP, f'[{{"prompt": {DEEP}}}]', '["\\ud800"]', "[1"])
def test_a_list_that_cannot_be_read_is_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(SourceError, match=r"rows\.json cannot be read: "):
        imported(tmp_path / "rows.json", tmp_path / "s")


def test_a_pipe_that_nobody_writes_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "rows")
    for source in (tmp_path / "rows", tmp_path, Path("/dev/zero")):
        words = ("tasks", "import", "jsonl", str(source), "--name", "s", "--set", f"tasks.dir={tmp_path}/suites")
        assert main(words) == 2
        assert "expected a file, it is a folder, a pipe or a device" in capsys.readouterr().err


def test_options_that_name_unreadable_text_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x", "answer": "1"}')
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    os.mkfifo(tmp_path / "pipe")
    rows = ("tasks", "import", "jsonl", str(tmp_path / "rows.jsonl"), "--set", f"tasks.dir={tmp_path}/suites")
    client = ("acp", "--url", "http://127.0.0.1:1", "--key-file")
    taskset = ("tasks", "import", "verifiers", "x", "--python", sys.executable, "--taskset-config")
    for words, sentence in (
        ((*rows, "--system", f"{tmp_path}/latin"), "--system: expected UTF-8, byte 3 of "),
        ((*rows, "--system", f"{tmp_path}/pipe"), "--system: expected a file, "),
        ((*rows, "--system", f"{tmp_path}/none"), f"--system: {tmp_path}/none cannot be read (No such file"),
        ((*client, f"{tmp_path}/latin"), "--key-file: expected UTF-8, byte 3"),
        ((*taskset, DEEP), "--taskset-config: "),
    ):
        assert main(words) == 2
        complaint = capsys.readouterr().err
        assert complaint.startswith(f"headrace: {sentence}") and len(complaint) < 500


IMAGE = 'environment.docker_image = "debian"'
ODD = ("1", "nan", "true", '"x"', "[1, [2]]", "[{}]", "{a = 1}", "1979-05-27", "[" * 2000 + "]" * 2000)
KEYS = (
    "schema_version",
    "steps",
    "artifacts",
    "environment",
    "environment.allowed_hosts",
    "environment.docker_image",
    "environment.workdir",
    "verifier.env",
    "verifier.environment_mode",
    "verifier.collect",
    "agent",
    "metadata.category",
)


def harbor_task(folder: Path, config: str) -> Path:
    (folder / "tests").mkdir(parents=True)
    (folder / "tests" / "test.sh").write_text("true\n")
    (folder / "instruction.md").write_text("Do it.\n")
    (folder / "task.toml").write_text(config)
    return folder


@pytest.mark.parametrize("key", KEYS)
def test_any_value_of_a_harbor_key_makes_a_task_or_a_refusal(key: str, tmp_path: Path) -> None:
    for number, value in enumerate(ODD):
        lines = [f"{key} = {value}"]
        if not key.startswith("environment"):
            lines.append(IMAGE)
        if key == "artifacts":
            lines.append('verifier.environment_mode = "separate"')
        harbor_task(tmp_path / "tasks" / f"t{number}", "\n".join(lines))
    report = made(tmp_path)
    assert report.tasks + len(report.refused) == len(ODD)
    assert any("nested too deep" in refusal.reason for refusal in report.refused)


def test_a_harbor_folder_of_odd_files_is_refused(tmp_path: Path) -> None:
    files: dict[str, Any] = {"a/task.toml": b"\xff", "b/instruction.md": b"\xff"}
    for path, content in files.items():
        task = harbor_task(tmp_path / "tasks" / path[0], IMAGE)
        (task / path[2:]).parent.mkdir(exist_ok=True)
        (task / path[2:]).write_bytes(content)
    for path in ("instruction.md", "tests/test.sh"):
        task = harbor_task(tmp_path / "tasks" / path.replace("/", "-"), IMAGE)
        (task / path).unlink()
        os.mkfifo(task / path)
    report = made(tmp_path)
    assert report.tasks == 0 and len(report.refused) == 4
    assert sum("expected UTF-8" in refusal.reason for refusal in report.refused) == 2, report.refused


def test_a_harbor_folder_that_cannot_be_read_is_refused_alone() -> None:
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        for task in ("good", "shut"):
            harbor_task(place / "tasks" / task, IMAGE)
        for path in (place, *place.rglob("*")):
            path.chmod(0o755)
        (place / "s").mkdir()
        (place / "s").chmod(0o777)
        (place / "tasks" / "shut" / "tests" / "test.sh").chmod(0)
        user = os.geteuid()
        try:
            os.seteuid(user or 65534)  # root may read everything
            report = made(place)
        finally:
            os.seteuid(user)
    assert report.tasks == 1 and [refusal.id for refusal in report.refused] == ["shut"]
    assert report.refused[0].reason.startswith("the folder cannot be read: ")


def test_a_harbor_folder_without_a_usable_name_is_refused_alone(tmp_path: Path) -> None:
    harbor_task(tmp_path / "tasks" / "---", IMAGE)
    harbor_task(tmp_path / "tasks" / "good", IMAGE)
    report = made(tmp_path)
    assert report.tasks == 1
    assert report.refused[0].reason == "expected an id with letters or digits, got '---'"


@pytest.mark.parametrize("place", ["instruction.md", "tests/test.sh", "tests", "environment", "solution/solve.sh"])
def test_a_harbor_task_reads_no_file_outside_of_its_folder(place: str, tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    for name in ("instruction.md", "test.sh", "solve.sh"):
        (tmp_path / "secret" / name).write_text("my key")
    task = harbor_task(tmp_path / "tasks" / "t", IMAGE)
    for part in ("environment", "solution"):
        (task / part).mkdir()
    path = task / place
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(tmp_path / "secret" / (path.name if path.suffix else ""))
    assert [refusal.reason for refusal in made(tmp_path).refused] == [f"{place} is a link out of the task's folder"]


def made(folder: Path) -> ImportReport:
    report = import_suite("s", folder / "s", "harbor", harbor.read(ImportOptions(suite="s", source=folder / "tasks")))
    json.loads((folder / "s" / "import.json").read_bytes())
    return report
