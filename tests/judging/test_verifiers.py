"""The checker `verifiers` starts the interpreter and the taskset that the configuration names, never a task's own."""

import sys
from pathlib import Path

import pytest

from headrace.judging import verifiers
from headrace.judging.checkers import check
from headrace.messages.tasks import Grading, Oracle, TaskRef
from headrace.registry import PluginError, admit
from tests.support.records import of

pytestmark = pytest.mark.anyio


async def test_a_tasks_data_starts_no_program(tmp_path: Path) -> None:
    file = tmp_path / "started"
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\ntouch {file}\n")
    program.chmod(0o700)
    for seam, name in (
        ("tools", f"{program}:sums"),
        ("checkers", f"{sys.executable}:sums"),
        ("checkers", str(program)),
    ):
        admit(seam, [name])
    reference = {"python": str(program), "taskset": "sums", "config": "{}", "source": "", "data": "{}"}
    oracle = of(
        Oracle, ref=TaskRef("rows", "1"), grading=Grading(kind="checker", checker="verifiers", reference=reference)
    )
    with pytest.raises(PluginError, match="unknown here"):
        await check(oracle, "", "2")
    assert not file.exists() and not verifiers._workers
    admit("checkers", [f"{program}:sums"])
    with pytest.raises(PluginError, match="ended with code"):
        await check(oracle, "", "2")
    assert file.exists()
