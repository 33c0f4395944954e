"""Plain JSONL: a prompt, and how the answer is graded.

Without a sandbox: ``{"prompt": ..., "answer": "42"}``, with ``"checker": "exact" | "number" | "pattern" | name`` and
``"reference": {...}`` where the answer alone does not say it. With one: ``"files"`` (path to text) or ``"image"``, and
``"test_command"``; `"hidden"` files are the judge's alone. The exit code decides, or ``"reward_file"``, or the named
tests ``"fail_to_pass"`` and ``"pass_to_pass"`` in the log that ``"log_parser"`` reads. ``"solution"`` (path to text) or
``"solution_script"`` is the known solution. ``"vcpus"``, ``"memory_mib"``, ``"disk_mib"`` and ``"time_s"`` limit the
sandbox and the episode.
"""

import math
import shlex
from collections.abc import Iterable, Iterator
from typing import Any

from msgspec import UNSET

from headrace.archives.members import both_file_and_folder, safe_path
from headrace.messages.tasks import HOST_FOLDER, Grading, Oracle, Task, TestPlan
from headrace.tasks.importing.base import (
    ImportOptions,
    ImportRefused,
    MadeTask,
    SourceEntry,
    limits_of,
    names_of,
    row_entries,
    test_seconds,
    text_of,
)

KNOWN = frozenset(
    "id prompt answer checker reference passes_at lowest files image repository test_command test_timeout_s hidden "
    "reward_file fail_to_pass pass_to_pass log_parser solution solution_script allowed system tools family template "
    "network vcpus memory_mib disk_mib time_s".split()
)


def read(options: ImportOptions) -> Iterator[SourceEntry]:
    """The rows of a JSONL file."""
    return row_entries(options, "id", _made)


def _made(row: dict[str, Any], id: str, options: ImportOptions) -> MadeTask:
    if unknown := sorted(row.keys() - KNOWN):
        raise ImportRefused(f"unknown field {unknown[0]}; expected some of {', '.join(sorted(KNOWN))}")
    prompt = text_of(row, "prompt")
    common: dict[str, Any] = {
        "ref": options.ref(id),
        "family": text_of(row, "family", options.suite),
        "prompt": prompt,
        "system": text_of(row, "system", options.system),
    }
    if "test_command" not in row:
        return _message(row, common)
    files, image = _files(row, "files"), text_of(row, "image", "")
    _together(files | _files(row, "hidden"), "files and hidden")
    _together(files | _files(row, "solution"), "files and solution")
    if not files and not image:
        raise ImportRefused("a task with a test_command needs files or an image")
    parser, file = text_of(row, "log_parser", ""), text_of(row, "reward_file", "")
    to_pass, to_keep = names_of(row, "fail_to_pass"), names_of(row, "pass_to_pass")
    command = text_of(row, "test_command")
    log = f"{HOST_FOLDER}test.log"
    grading = Grading(kind="exit_code")
    if file:
        if not file.startswith(HOST_FOLDER):
            raise ImportRefused(f"reward_file: expected a path under {HOST_FOLDER}, where the agent cannot write")
        passes_at, lowest = _number(row, "passes_at", 1.0), _number(row, "lowest", 0.0)
        if lowest >= passes_at:
            raise ImportRefused(f"lowest: expected a number below passes_at, which is {passes_at:g}, got {lowest:g}")
        grading = Grading(kind="reward_file", file=file, passes_at=passes_at, lowest=lowest or UNSET)
    elif to_pass:
        if not parser and "--junitxml" not in command:
            raise ImportRefused("fail_to_pass needs a log_parser, or a test_command with --junitxml=PATH")
        trust: Any = "log" if parser else "report"
        grading = Grading(kind="f2p_p2p", pass_to_pass=to_keep, parser=parser, file=log if parser else "", trust=trust)
        command = f"{{ {command}\n}} > {log} 2>&1" if parser else command
    elif parser:
        grading = Grading(kind="all_tests", parser=parser, file=log, trust="log")
        command = f"{{ {command}\n}} > {log} 2>&1"
    junit = grading.kind == "f2p_p2p" and not parser
    argv = tuple(shlex.split(command)) if junit else ("sh", "-c", f"mkdir -p {HOST_FOLDER}; {command}")
    plan = TestPlan(
        kind="command", argv=argv, timeout_s=test_seconds("test_timeout_s", row.get("test_timeout_s", 600.0))
    )
    solution = _files(row, "solution")
    oracle = Oracle(
        ref=common["ref"],
        hidden=_files(row, "hidden"),
        tests=plan,
        expected=to_pass,
        solution=solution,
        script=text_of(row, "solution_script", ""),
        grading=grading,
    )
    visible = ("sh", "-c", text_of(row, "test_command"))
    task = Task(
        files=files,
        image=image,
        repository=text_of(row, "repository", ""),
        allowed=names_of(row, "allowed") or ("**",),
        tests=TestPlan(kind="command", argv=visible, timeout_s=plan.timeout_s),
        tools=names_of(row, "tools") or options.tools,
        template=text_of(row, "template", options.template or "light"),
        network=names_of(row, "network"),
        trust=grading.trust,
        limits=limits_of({key: row.get(key) for key in ("vcpus", "memory_mib", "disk_mib", "time_s")}),
        **common,
    )
    return MadeTask(task=task, oracle=oracle)


def _message(row: dict[str, Any], common: dict[str, Any]) -> MadeTask:
    """A task without a sandbox."""
    if odd := sorted(row.keys() & {"files", "image", "hidden", "solution", "tools", "reward_file", "log_parser"}):
        raise ImportRefused(f"{odd[0]} needs a test_command; without one the task is a message and a checker")
    answer = row.get("answer")
    text = answer if isinstance(answer, str) else "" if answer is None else str(answer)
    reference = row.get("reference", {})
    if not isinstance(reference, dict):
        raise ImportRefused("reference: expected an object")
    checker = text_of(row, "checker", "exact")
    if not text and not reference:
        raise ImportRefused("expected a test_command, or an answer (or a reference) that a checker compares with")
    plan = TestPlan(kind="command", argv=("true",))
    oracle = Oracle(
        ref=common["ref"],
        hidden={},
        tests=plan,
        expected=(),
        solution={},
        answer=f"answer: {text}" if text else "",
        grading=Grading(
            kind="checker",
            checker=checker,
            reference={"answer": text} | {str(key): str(value) for key, value in reference.items()},
            passes_at=_number(row, "passes_at", 1.0),
        ),
    )
    return MadeTask(task=Task(files={}, allowed=(), tests=plan, sandbox=False, **common), oracle=oracle)


def _files(row: dict[str, Any], key: str) -> dict[str, bytes]:
    value = row.get(key) or {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ImportRefused(f"{key}: expected an object of paths and texts")
    for path in value:
        if not safe_path(path):
            raise ImportRefused(f"{key}: expected paths inside the workspace, got {path!r}")
    _together(value, key)
    return {path: text.encode() for path, text in value.items()}


def _together(paths: Iterable[str], what: str) -> None:
    """ImportRefused where no workspace can hold all of these paths."""
    if path := both_file_and_folder(paths):
        raise ImportRefused(f"{what}: {path!r} is a file and the folder of another one; no workspace can hold both")


def _number(row: dict[str, Any], key: str, default: float) -> float:
    value = row.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ImportRefused(f"{key}: expected a number, got {value!r:.80}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ImportRefused(f"{key}: expected a finite number, got {value!r:.80}")
    return number
