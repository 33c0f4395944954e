"""Imported suites through every actor: `headrace eval` by scripted policies, and a run that trains on one."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tiny_run
from tests.support.commands import headrace
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow
ROWS: list[dict[str, Any]] = [
    {"id": "sum", "prompt": "1 + 1?", "answer": "2", "checker": "number"},
    {
        "id": "file",
        "prompt": "Write 42 to out.txt.",
        "files": {"README": "x"},
        "test_command": "grep -q 42 out.txt",
        "solution": {"out.txt": "42\n"},
    },
    {
        "id": "graded",
        "prompt": "Write a number to out.txt.",
        "files": {"README": "x"},
        "test_command": "cp out.txt .headrace/reward",
        "reward_file": ".headrace/reward",
        "solution_script": "echo 1 > out.txt",
    },
]
TINY = tiny_run.TINY | {"curriculum.steps": 2, "production.enabled": False}


def suite(folder: Path) -> str:
    rows = [row | {"id": f"{row['id']}{number}"} for number in range(6) for row in ROWS]
    file = folder / "mine.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--set", f"tasks.dir={folder / 'suites'}"]
    command = [sys.executable, "-m", "headrace.cli", "tasks", "import", "jsonl", str(file), *options]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return "mine"


@pytest.mark.parametrize(("policy", "passed"), [("oracle", 18), ("idle", 0)])
def test_scripted_policies_are_measured_on_an_imported_suite(tmp_path: Path, policy: str, passed: int) -> None:
    words = ["eval", "--policy", f"scripted:{policy}", "--suite", suite(tmp_path)]
    limits: dict[str, object] = {"limits.max_tokens": 20_000, "limits.context_tokens": 20_000}
    told = json.loads(
        headrace(tmp_path, *words, **{"environment.backend": "process"}, **limits).strip().splitlines()[-1]
    )
    assert (told["tasks"], told["passed"], told["infra_failures"]) == (18, passed, 0)


def test_a_run_trains_on_an_imported_suite(tmp_path: Path) -> None:
    headrace(
        tmp_path,
        "up",
        str(ROOT / "deploy" / "demo.toml"),
        **TINY,
        **{"tasks.suite": suite(tmp_path), "tasks.uncertified": True},
    )
    (report,) = (tmp_path / "runs").glob("r*/report.json")
    told = json.loads(report.read_text())
    assert (told["steps"], told["failed_steps"], told["unreadable_records"]) == (2, 0, 0), told
    words = [
        sys.executable,
        "-m",
        "headrace.cli",
        "export",
        str(report.parent),
        str(tmp_path / "out.jsonl"),
        "--as",
        "atif",
    ]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    documents = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(documents) >= 16 and {document["schema_version"] for document in documents} == {"ATIF-v1.8"}
    assert all("verdict" in document["extra"] for document in documents)
