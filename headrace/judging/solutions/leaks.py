"""Parts of the solution or of the hidden tests that the agent can read: in the prompt, in its files, in its image.

An image is searched in a fresh sandbox, as the agent's, with the image's own ``find`` and ``git``. Git is asked for
objects by their hash, so every branch, pack and unreachable object counts: a history that goes on after the task's
commit holds the repair, and an agent can read it there.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from headrace.messages.sandbox import Exec, Sandbox
from headrace.messages.tasks import HOST_FOLDER, Oracle, Task
from headrace.tasks import leaks as scan

SHORTEST = 40
"""Characters from which the solution's new text counts as leaked: shorter ones occur by chance."""
_LARGEST = 1 << 20
"""Bytes of a file that is compared line by line, or searched for in an image."""
_DATA = (
    ".csv",
    ".json",
    ".jsonl",
    ".txt",
    ".md",
    ".xml",
    ".yaml",
    ".yml",
    ".toml",
    ".tsv",
    ".dat",
    ".bin",
    ".npy",
    ".png",
)
"""Endings of hidden files that may be the tests' copy of what the agent gets: in an image one is a note."""
_SEARCH_S = 120.0
_SIZES = 2000
"""Sizes of files that are searched for."""
_OUTPUT = 1 << 20
_PATCHED = re.compile(
    rb"^diff --git a/\S.* b/(\S.*)\n(?:(?!diff --git |index ).*\n){0,6}index [0-9a-f]+\.\.([0-9a-f]{7,64})",
    re.MULTILINE,
)
"""A file of a git patch, and the hash of its content afterwards."""
_FIND = """command -v find > /dev/null && command -v sha256sum > /dev/null || exit 101
places=.
for folder in /tests /solution; do if [ -d "$folder" ]; then places="$places $folder"; fi; done
exec find $places -xdev -name .git -prune -o -type f "(" "$@" ")" -exec sha256sum {} +
"""
"""/tests and /solution are where Harbor has a task's tests and its solution while it uses them."""
_GIT = """d=$(pwd)
while [ -n "$d" ] && [ ! -e "$d/.git" ]; do d=${d%/*}; done
[ -e "$d/.git" ] || exit 100
command -v git > /dev/null || exit 101
export GIT_NO_LAZY_FETCH=1
exec git --git-dir="$d/.git" cat-file --batch-check
"""
"""Git reads a repository that is named in this way, also of another owner."""
_NO_REPOSITORY, _NO_PROGRAM = 100, 101


class Found(NamedTuple):
    """The result of a search."""

    leaks: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """Places that could not be searched."""


def told(
    task: Task,
    oracle: Oracle,
    before: Mapping[str, bytes],
    solution: Mapping[str, bytes],
    removed: Collection[str] = (),
) -> Found:
    """Leaks in the prompt and in the files that an attempt begins with, as far as they are known. removed: paths that
    the solution deletes: a new file that resembles one of them is that file under another name."""
    reasons, notes = [], []
    gone = {path: before[path] for path in removed if path in before}
    hidden = {content for content in _decisive(oracle).values() if len(content.strip()) >= SHORTEST}
    reasons += [f"{path} is a hidden test file" for path, content in sorted(task.files.items()) if content in hidden]
    reasons += _of_steps(task, oracle)
    reasons += [f"the prompt names the hidden test {name}" for name in oracle.expected if name in task.prompt]
    for path, content in sorted(solution.items()):
        original = before[path] if path in before else _renamed(content, gone)
        if content.strip() and len(content) >= SHORTEST and content != original:
            twins = [other for other, text in sorted(before.items()) if content.strip() in text]
            reasons += [f"{twin} holds the solution of {path}" for twin in twins]
        if min(len(content), len(original)) > _LARGEST:
            notes.append(f"{path} is too large: its changed lines were not searched for")
            continue
        others = {other: text for other, text in before.items() if other not in solution and other not in gone}
        blocks = scan.added(original, content)
        reasons += list(scan.remains(others | {path: original}, blocks))
        added = max(blocks, key=len, default="").strip()
        if len(added) >= SHORTEST and added in task.prompt:
            reasons.append(f"the prompt holds the solution of {path}")
    return Found(tuple(reasons), tuple(notes))


def _renamed(content: bytes, gone: Mapping[str, bytes]) -> bytes:
    """The removed file that a new one was made of: the one that shares most lines with it, and at least half; empty
    without one."""
    lines = Counter(content.split(b"\n"))

    def share(text: bytes) -> float:
        other = Counter(text.split(b"\n"))
        return 2 * (lines & other).total() / (lines.total() + other.total())

    nearest = max(gone.values(), key=share, default=b"")
    return nearest if nearest and share(nearest) >= 0.5 else b""


def _of_steps(task: Task, oracle: Oracle) -> list[str]:
    """Files of a step that are hidden tests of that step or of a later one."""
    reasons = []
    for number, step in enumerate(task.later if oracle.steps else (), 1):
        remaining = oracle.steps.tests[number:] if oracle.steps else ()
        hidden = {data for tests in remaining for data in tests.hidden.values() if len(data.strip()) >= SHORTEST}
        leaked = sorted(path for path, data in step.files.items() if data in hidden and not path.endswith(_DATA))
        reasons += [f"{path}, a file of the step {remaining[0].name}, is a hidden test file" for path in leaked]
    return reasons


def _decisive(oracle: Oracle) -> dict[str, bytes]:
    """The hidden files that the agent must not see. A file whose tests are all to be kept may be shown: it passes
    without the solution."""
    decisive = {path for path in oracle.hidden if any(name.startswith(f"{path}::") for name in oracle.expected)}
    return {path: content for path, content in oracle.hidden.items() if path in decisive or not decisive}


async def in_image(
    sandbox: Sandbox, oracle: Oracle, solution: Mapping[str, bytes], removed: Collection[str] = ()
) -> Found:
    """Leaks in a fresh sandbox of an image. solution: the files that the known solution repairs. removed: paths that it
    deletes; a file that only gets another name is no leak."""
    hidden = {content: path for path, content in sorted(_decisive(oracle).items())}
    programs = (oracle.script, *(step.script for step in oracle.steps.tests)) if oracle.steps else (oracle.script,)
    names = {program.encode(): "is the solution's program" for program in programs}
    beside = [oracle.solution, *(step.solution or {} for step in (oracle.steps.tests if oracle.steps else ()))]
    for part in beside:
        inner = {path.removeprefix(HOST_FOLDER): data for path, data in part.items() if path.startswith(HOST_FOLDER)}
        names |= {content: f"is the solution's file {path}" for path, content in sorted(inner.items())}
    names |= {content: f"holds the solution of {path}" for path, content in sorted(solution.items())}
    data = frozenset(content for content, path in hidden.items() if path.endswith(_DATA) and content not in names)
    names = {content: f"is the hidden file {path}" for content, path in hidden.items()} | names
    texts = {content: name for content, name in names.items() if SHORTEST <= len(content.strip()) <= _LARGEST}
    files, renamed = await _files(sandbox, texts, data, removed)
    changed = {path: content for path, content in solution.items() if content not in renamed}
    objects = await _objects(sandbox, oracle, changed)
    return Found((*files.leaks, *objects.leaks), (*files.notes, *objects.notes))


async def _files(
    sandbox: Sandbox, texts: Mapping[bytes, str], data: Collection[bytes], removed: Collection[str]
) -> tuple[Found, frozenset[bytes]]:
    """Files of the repository with one of these contents, of which `data` give nothing away; and the contents
    of removed files, which are in the repository by right."""
    sizes = sorted({len(content) for content in texts})
    if not sizes:
        return Found(), frozenset()
    wanted = [word for size in sizes[:_SIZES] for word in ("-o", "-size", f"{size}c")][1:]
    search = Exec(argv=("sh", "-c", _FIND, "find", *wanted), timeout_s=_SEARCH_S, output_cap=_OUTPUT)
    done = await sandbox.call(search)
    if done.code == _NO_PROGRAM:
        note = "the image's files were not searched: it has no find or no sha256sum"
        return Found(notes=(note,)), frozenset()
    in_part = done.timed_out or done.truncated or len(sizes) > _SIZES
    notes = ("the image's files were searched in part, because they are too many",) if in_part else ()
    contents = {hashlib.sha256(content).hexdigest(): content for content in texts}
    lines = (line.lstrip("\\").split("  ", 1) for line in done.stdout.splitlines() if "  " in line)
    places = [(path.removeprefix("./"), contents[digest]) for digest, path in lines if digest in contents]
    renamed = frozenset(content for path, content in places if path in removed)
    copies = [(f"{path} {texts[content]}", content in data) for path, content in places if content not in renamed]
    leaks = tuple(copy for copy, harmless in copies if not harmless)
    return Found(leaks, (*(copy for copy, harmless in copies if harmless), *notes)), renamed


async def _objects(sandbox: Sandbox, oracle: Oracle, solution: Mapping[str, bytes]) -> Found:
    """Repaired files, and the files of a hidden patch, in the object store of the repository."""
    wanted: dict[str, str] = {}
    for path, content in sorted(solution.items()):
        if len(content.strip()) >= SHORTEST:
            blob = b"blob %d\0" % len(content) + content
            for hashed in (hashlib.sha1(blob, usedforsecurity=False), hashlib.sha256(blob)):
                wanted[hashed.hexdigest()] = f"the repository's history holds the solution of {path}"
    for content in oracle.hidden.values():
        for path, name in _PATCHED.findall(content):
            if name.strip(b"0"):
                text = f"the repository's history holds the hidden tests of {path.decode('utf-8', 'replace')}"
                wanted.setdefault(name.decode(), text)
    if not wanted:
        return Found()
    asked = "".join(f"{name}\n" for name in wanted)
    done = await sandbox.call(Exec(argv=("sh", "-c", _GIT), stdin=asked.encode(), output_cap=_OUTPUT))
    if done.code == _NO_REPOSITORY:
        return Found()
    if done.code == _NO_PROGRAM:
        return Found(notes=("the repository's history was not searched: the image has no git",))
    if done.code or not done.ok:
        why = (done.stderr.strip() or done.error).partition("\n")[0]
        return Found(notes=(f"the repository's history was not searched: {why[:200]}",))
    return Found(_present(done.stdout.splitlines(), wanted))


def _present(lines: Iterable[str], wanted: Mapping[str, str]) -> tuple[str, ...]:
    """The texts of the names that git knows, each once. lines: git's answers in the order of the names."""
    held = (text for line, text in zip(lines, wanted.values(), strict=False) if line.split(" ")[1:2] == ["blob"])
    return tuple(dict.fromkeys(held))
