"""Any value of a task's limits in a row or a Harbor folder becomes a limit within its range or one sentence."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.messages.codec import encode
from headrace.messages.tasks import SandboxLimits
from headrace.tasks.importing import harbor, jsonl
from headrace.tasks.importing.base import ImportOptions, ImportRefused, MadeTask
from tests.tasks.importing.test_importing import TASK_TOML

ROW: dict[str, Any] = {"prompt": "x", "test_command": "true", "files": {"a": "1"}}
NUMBERS = ("vcpus", "memory_mib", "disk_mib", "time_s", "test_timeout_s", "passes_at")
odd: st.SearchStrategy[Any] = st.sampled_from(
    [math.nan, math.inf, -math.inf, -1, -0.5, 0, 10**400, 1e308, 5e-324, True, None, "1", "nan", [], {}]
)
values = odd | st.integers() | st.floats()


def valid(made: MadeTask) -> None:
    """The limits that a task got are in their ranges, and the messages can be sent."""
    encode(made.task)
    encode(made.oracle)
    assert 0 < made.oracle.tests.timeout_s <= 86_400.0 and math.isfinite(made.oracle.grading.passes_at)
    limits = made.task.limits or SandboxLimits()
    assert 0 <= limits.vcpus <= 1024 and 0 <= limits.memory_mib <= 1 << 22 and 0 <= limits.time_s <= 1e9


def options(folder: Path) -> ImportOptions:
    return ImportOptions(source=folder, suite="s")


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.dictionaries(st.sampled_from(NUMBERS), values, min_size=1))
def test_any_limit_of_a_row_is_taken_or_refused(fields: dict[str, Any]) -> None:
    source = Path("rows.jsonl")
    try:
        valid(jsonl._made(json.loads(json.dumps(ROW | fields)), "a", options(source)))
    except ImportRefused as refused:
        assert "\n" not in str(refused) and len(str(refused)) < 400


TOML = [
    "nan",
    "inf",
    "-inf",
    "-1",
    "0",
    "1e400",
    "9" * 400,
    "9" * 5000,
    "true",
    '"x"',
    "[]",
    '"9e9"',
    '"' + "9" * 5000 + '"',
    "1.5",
]


@pytest.mark.parametrize("value", TOML)
@pytest.mark.parametrize(
    "key", ["environment.cpus", "environment.memory", "environment.storage_mb", "verifier", "agent"]
)
def test_any_limit_of_a_harbor_folder_is_taken_or_refused(tmp_path: Path, key: str, value: str) -> None:
    table, _, name = key.partition(".")
    text = TASK_TOML.replace("timeout_sec = 60.0\n", "") + 'docker_image = "app:1"\n'
    line = f"{name or 'timeout_sec'} = {value}\n"
    text = text.replace(f"[{table}]\n", f"[{table}]\n{line}") if f"[{table}]" in text else f"{text}[{table}]\n{line}"
    (tmp_path / "t" / "tests").mkdir(parents=True)
    for file, content in {"task.toml": text, "instruction.md": "x", "tests/test.sh": "true"}.items():
        (tmp_path / "t" / file).write_text(content)
    try:
        valid(harbor._made(tmp_path / "t", options(tmp_path)))
    except ImportRefused as refused:
        assert "\n" not in str(refused) and len(str(refused)) < 400
