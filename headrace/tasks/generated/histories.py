"""A git repository whose history fixes generated bugs, one commit a bug: input of `headrace tasks make commits`.

Each task of a generated suite becomes three commits: the package with its broken function, the tests that the agent may
run, and the fix with the tests that decide in place of those. Only the third changes code and tests, so only it makes a
task; its message is the task's prompt. The package replaces that of the task before. Names and times are fixed, so one
suite and one count always give the same commits.
"""

import os
import subprocess
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

from headrace import timed_commands
from headrace.archives.commits import GIT_S, environment
from headrace.errors import HeadraceError
from headrace.tasks.base import both_sides
from headrace.tasks.generated.repositories import SEEDS
from headrace.tasks.suites import open_suite

_AUTHOR = b"headrace <headrace@example.invalid>"
_START, _STEP_S = 1_700_000_000, 60


class HistoryError(HeadraceError):
    """The repository cannot be written; the message says why."""


def write(folder: Path, suite: str, count: int) -> int:
    """Make a repository in a new folder; the number of tasks in its history. HistoryError."""
    name = suite.removeprefix("generated/")
    if name not in SEEDS:
        raise HistoryError(f"expected a generated suite such as generated/heldout, got {suite!r}")
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise HistoryError(f"{folder} cannot be made: {error.strerror}") from None
    _git(folder, "init", "-q", "--initial-branch=main")
    stages = list(_stages(suite, count))
    _git(folder, "fast-import", "--quiet", stdin=b"".join(_stream(stages)))
    _git(folder, "reset", "-q", "--hard")
    return len(stages) // 3


def _stages(suite: str, count: int) -> Iterator[tuple[str, Mapping[str, bytes]]]:
    """Message and all files of every commit."""
    opened = open_suite(suite)
    tests: dict[str, bytes] = {}
    for id in islice(opened.ids(), count):
        task, oracle = both_sides(opened, id)
        code = {path: data for path, data in task.files.items() if path not in task.tests.paths}
        yield f"Start {id}", code | tests
        tests = {path: task.files[path] for path in task.tests.paths}
        yield f"Tests of {id}", code | tests
        tests = oracle.hidden
        yield task.prompt, code | oracle.solution | tests


def _stream(stages: list[tuple[str, Mapping[str, bytes]]]) -> Iterator[bytes]:
    """The history in the format of git fast-import."""
    for number, (message, files) in enumerate(stages):
        text = message.encode()
        yield b"commit refs/heads/main\ncommitter %s %d +0000\n" % (_AUTHOR, _START + number * _STEP_S)
        yield b"data %d\n%s\ndeleteall\n" % (len(text), text)
        for path, data in sorted(files.items()):
            yield b"M 100644 inline %s\ndata %d\n%s\n" % (os.fsencode(path), len(data), data)
        yield b"\n"


def _git(folder: Path, *arguments: str, stdin: bytes = b"") -> None:
    try:
        done = timed_commands.run(["git", "-C", str(folder), *arguments], GIT_S, env=environment(), data=stdin)
    except FileNotFoundError:
        raise HistoryError("git is not installed") from None
    except subprocess.TimeoutExpired:
        raise HistoryError(f"git {arguments[0]} did not end within {GIT_S:g} s") from None
    if done.returncode:
        raise HistoryError(f"git {arguments[0]}: {done.stderr.decode('utf-8', 'replace').strip()[:300]}")
