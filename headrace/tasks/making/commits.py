"""Tasks from a repository's commits: each that changes source and tests, where tests fail before and pass after.

The agent gets the repository of the parent commit and the commit's message; the hidden tests are the test files as the
commit left them. To pass are the tests that fail over the parent's code and pass over the commit's, to keep are those
that pass over both. Files are read from git's objects: nothing is checked out, and no task carries ``.git``.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import msgspec

from headrace import timed_commands
from headrace.archives.commits import GIT_S, environment
from headrace.archives.commits import command as git_command
from headrace.messages.tasks import Grading, Oracle, Task, TaskRef
from headrace.tasks.importing import trees
from headrace.tasks.importing.base import ImportRefused
from headrace.tasks.making.journal import NoTask
from headrace.tasks.packages.fetch import Package, PackageError, is_test, read
from headrace.tasks.packages.lab import Exam, Lab, passed
from headrace.tasks.packages.sdist import first_error, first_plan, limit, sealed

_PROMPT = 4_000
"""Characters of a commit's message that a prompt holds."""
_FILES = 20
"""Most source files that a commit may change; a larger one is probably a rename or a reformatting."""


class Commit(NamedTuple):
    """A commit that changes source and tests."""

    id: str
    parent: str
    message: str
    tests: tuple[str, ...]
    """Paths of the tests that it adds, changes or removes, as far as they count."""


def commits(repository: Path, only: Sequence[str] = ()) -> Iterator[Commit]:
    """Commits with one parent that change Python source and Python tests, the newest first. only: globs of the tests
    that count; all of them without any. NoTask where git cannot read the repository."""
    log = _git(repository, "log", "--no-merges", "--format=%x01%H %P", "--name-only", "--diff-filter=ACDMR")
    for entry in log.split("\1")[1:]:
        head, *paths = entry.split("\n")
        id, *parents = head.split()
        code = [path for path in paths if path.endswith(".py")]
        tests = [path for path in code if is_test(path)]
        counting = tuple(path for path in tests if not only or any(fnmatchcase(path, glob) for glob in only))
        if len(parents) == 1 and counting and 0 < len(code) - len(tests) <= _FILES:
            yield Commit(id, parents[0], _git(repository, "log", "-1", "--format=%B", id).strip(), counting)


def _git(repository: Path, *arguments: str) -> str:
    argv = git_command(repository, "-c", "core.quotePath=false", *arguments)
    try:
        done = timed_commands.run(argv, GIT_S, env=environment())
    except subprocess.TimeoutExpired:
        raise NoTask(f"git did not read {repository} within {GIT_S:g} s: name a clone on a local disk") from None
    if done.returncode:
        raise NoTask(f"git cannot read {repository}: {done.stderr.decode('utf-8', 'replace').strip()[:300]}")
    return done.stdout.decode("utf-8", "replace")


def tree(repository: Path, commit: str, name: str) -> Package:
    """The package of a commit. NoTask where it has no tests or no code, or is too large."""
    try:
        files = trees.archive(repository, commit).files
        with tempfile.TemporaryDirectory() as folder:
            for path, content in files.items():
                target = Path(folder) / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
            return read(Path(folder), name)
    except (ImportRefused, PackageError, OSError) as error:
        raise NoTask(str(error)) from None


async def attempt(
    lab: Lab,
    repository: Path,
    commit: Commit,
    suite: str,
    say: Callable[[str], None],
    changed: bool = False,
    bare: bool = False,
) -> tuple[Task, Oracle]:
    """Both sides of a commit's task. changed: only the test files that the commit adds or changes decide, as in
    SWE-bench (arXiv 2310.06770), and of those the ones that count; the others do not run. bare: the prompt is the
    message alone. NoTask."""
    name = repository.resolve().name
    before, after = tree(repository, commit.parent, name), tree(repository, commit.id, name)
    if changed:
        after = msgspec.structs.replace(after, tests=tuple(path for path in after.tests if path in commit.tests))
        if not after.tests:
            raise NoTask("it adds and changes no file of tests")
    right = await lab.run(after.files, first_plan(after))
    good = passed(right)
    if right.timed_out or not good:
        raise NoTask(f"no test passes over the commit: {first_error(right)[:300]}")
    plan = msgspec.structs.replace(first_plan(after), timeout_s=limit(right.wall_ms / 1e3))
    hidden = {path: after.files[path] for path in sorted({*after.tests, *after.support})}
    wrong = await lab.run(_code(before) | hidden, plan)
    deciding = tuple(name for name in good if name in set(passed(wrong)))
    fixed = tuple(name for name in good if name not in set(deciding))
    if wrong.timed_out or not fixed:
        raise NoTask("its tests pass over the parent, too")
    exam = await sealed(lab, after, Exam(plan=plan, expected=good), say)
    ref = TaskRef(suite, id_of(name, commit))
    task = Task(
        ref=ref,
        family=f"commit:{name}",
        prompt=_prompt(commit.message, bare),
        files=before.files,
        allowed=tuple(sorted({*before.sources, *after.sources})),
        tests=msgspec.structs.replace(plan, paths=visible(before.tests, after.tests) if changed else before.tests),
        template="debian",
    )
    oracle = Oracle(
        ref=ref,
        hidden=hidden,
        tests=plan,
        expected=fixed,
        grading=Grading(kind="f2p_p2p", pass_to_pass=deciding),
        sealed=exam.sealed,
        answers=exam.answers,
        solution={path: after.files[path] for path in after.sources if before.files.get(path) != after.files[path]},
        removed=tuple(sorted(path for path in before.sources if path not in after.files)),
    )
    return task, oracle


def visible(tests: tuple[str, ...], deciding: tuple[str, ...]) -> tuple[str, ...]:
    """The parent's tests that the agent runs where only the changed ones decide: the changed ones among them; where a
    commit adds them all, those in the nearest folder that has tests."""
    if known := tuple(path for path in tests if path in deciding):
        return known
    for folder in PurePosixPath(deciding[0]).parents:
        if beside := tuple(path for path in tests if PurePosixPath(path).parent == folder):
            return beside
    return tests


def _code(package: Package) -> dict[str, bytes]:
    return {path: content for path, content in package.files.items() if not is_test(path)}


def _prompt(message: str, bare: bool) -> str:
    """The message without its trailers, which name people; with a request before it unless `bare`."""
    lines = [line for line in message.splitlines() if not re.match(r"[A-Z][\w-]+-[Bb]y: ", line)]
    text = "\n".join(lines).strip()
    return text[:_PROMPT] if bare else f"Make this change:\n\n{text}"[:_PROMPT] + "\n"


def id_of(name: str, commit: Commit) -> str:
    """The task's id."""
    return f"{name}--{commit.id[:12]}"
