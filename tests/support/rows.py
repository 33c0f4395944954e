"""A git repository of a small package, and rows of SWE-bench and SWE-smith over it."""

import os
import subprocess
from pathlib import Path
from typing import Any

CALC = "def add(a, b):\n    return a - b\n\n\ndef scale(a):\n    return a * 2\n"
FIXED = CALC.replace("a - b", "a + b")
OLD = "from calc.core import add\n"
VISIBLE = "from calc.core import scale\n\n\ndef test_scale():\n    assert scale(2) == 4\n"
HIDDEN = """import pytest

from calc.core import add, scale


def test_scale():
    assert scale(2) == 4


@pytest.mark.parametrize("a, b, c", [(1, 2, 3), (2, 2, 4)])
def test_add(a, b, c):
    assert add(a, b) == c


def test_known_to_fail():
    assert add(1, 1) == 3
"""
F2P = ["tests/test_core.py::test_add[1-2-3]", "tests/test_core.py::test_add[2-2-4]"]
P2P = ["tests/test_core.py::test_scale"]


def git(folder: Path, *arguments: str) -> str:
    who = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments],
        check=True,
        text=True,
        capture_output=True,
        env=os.environ | who | {"GIT_CONFIG_GLOBAL": "/dev/null"},
    )
    return done.stdout


def write(folder: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def repository(repos: Path) -> dict[str, Any]:
    """A checkout `owner__calc` below `repos`; the row of its bug, whose fix deletes a file."""
    folder = repos / "owner__calc"
    folder.mkdir(parents=True)
    git(folder, "init", "-q")
    files = {"calc/__init__.py": "", "calc/core.py": CALC, "calc/old.py": OLD, "tests/test_core.py": VISIBLE}
    write(folder, files)
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "base")
    base = git(folder, "rev-parse", "HEAD").strip()
    write(folder, {"calc/core.py": FIXED})
    (folder / "calc" / "old.py").unlink()
    patch = git(folder, "diff")
    git(folder, "checkout", "-q", ".")
    write(folder, {"tests/test_core.py": HIDDEN})
    test_patch = git(folder, "diff")
    git(folder, "checkout", "-q", ".")
    return {
        "instance_id": "owner__calc-1",
        "repo": "owner/calc",
        "base_commit": base,
        "problem_statement": "add should add",
        "patch": patch,
        "test_patch": test_patch,
        "FAIL_TO_PASS": str(F2P).replace("'", '"'),
        "PASS_TO_PASS": str(P2P).replace("'", '"'),
        "version": "1.0",
    }


def bug(repos: Path) -> dict[str, Any]:
    """A row of SWE-smith: its patch puts the bug in."""
    folder = repos / "owner__calc.12345678"
    folder.mkdir(parents=True)
    write(folder, {"calc/__init__.py": "", "calc/core.py": FIXED, "tests/test_core.py": HIDDEN})
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "base")
    commit = git(folder, "rev-parse", "HEAD").strip()
    write(folder, {"calc/core.py": CALC})
    patch = git(folder, "diff")
    git(folder, "checkout", "-q", ".")
    return {
        "instance_id": "owner__calc.12345678.func_1",
        "repo": "swesmith/owner__calc.12345678",
        "base_commit": commit,
        "problem_statement": "add should add",
        "patch": patch,
        "FAIL_TO_PASS": F2P,
        "PASS_TO_PASS": P2P,
        "image_name": "swebench/swesmith.x86_64.owner_1776_calc.12345678",
    }
