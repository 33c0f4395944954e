"""A suite as Harbor task folders (schema 1.4): instruction, environment, tests, known solution.

Every Python task becomes a Dockerfile over `IMAGE` with the repository copied in. The tests run by pytest with the
expected names as arguments, so that a missing test fails; known-failing tests of the same files do not count.
"""

import json
import shlex
from collections.abc import Iterable
from pathlib import Path

import msgspec

from headrace.errors import HeadraceError
from headrace.messages.tasks import HOST_FOLDER, Change, Oracle, Task, interpreter
from headrace.tasks.base import Suite
from headrace.tasks.diff import WorkspaceTree

IMAGE = "python:3.11-slim"
WORKDIR = "/app"
SCHEMA = "1.4"


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of an export."""

    tasks: int
    refused: dict[str, str]
    """Task id to the reason."""


class ExportRefused(HeadraceError):
    """A task has no form in the other format; the text says why."""


def export(suite: Suite, ids: Iterable[str], folder: Path, organisation: str = "headrace") -> Exported:
    """Write tasks of a suite as folders. Tasks that Harbor cannot hold are named in the result."""
    count, refused = 0, dict[str, str]()
    for id in ids:
        try:
            files = folder_of(suite.task(id), suite.oracle(id), organisation)
        except ExportRefused as error:
            refused[id] = str(error)
            continue
        _write(folder / id, files)
        count += 1
    return Exported(tasks=count, refused=refused)


def _write(folder: Path, tree: WorkspaceTree) -> None:
    for path, data in tree.files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    for entry in tree.entries:
        place = folder / entry.path
        if entry.kind == "folder":
            place.mkdir(parents=True, exist_ok=True)
        elif entry.kind == "link":
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(entry.target)
        else:
            place.chmod(entry.mode)


def folder_of(task: Task, oracle: Oracle, organisation: str = "headrace") -> WorkspaceTree:
    """The files of one Harbor folder. ExportRefused."""
    if not task.sandbox:
        raise ExportRefused("a task without a sandbox has no environment")
    if oracle.steps or oracle.verifier:
        raise ExportRefused("steps, and a verifier with an image of its own, are not exported")
    if oracle.grading.trust == "log" or oracle.grading.parser:
        raise ExportRefused("a log that headrace parses has no place in a Harbor verifier")
    tests = {f"tests/files/{path}": data for path, data in oracle.hidden.items()}
    tests["tests/test.sh"] = _script(oracle).encode()
    solution = {f"solution/files/{path}": data for path, data in oracle.solution.items()}
    solution["solution/solve.sh"] = _solve(oracle).encode()
    if oracle.script:
        solution["solution/program"] = oracle.script.encode()
    environment = {f"environment/repository/{path}": data for path, data in task.files.items()}
    environment["environment/Dockerfile"] = _dockerfile(task).encode()
    text = {"instruction.md": _instruction(task).encode(), "task.toml": _toml(task, oracle, organisation).encode()}
    parts = {
        "environment/repository": task.entries,
        "tests/files": [entry for entry in oracle.entries or () if entry.kind != "gone"],
        "solution/files": oracle.solution_entries,
    }
    entries = [
        msgspec.structs.replace(entry, path=f"{place}/{entry.path}")
        for place, part in parts.items()
        for entry in part or ()
    ]
    return WorkspaceTree(text | environment | tests | solution, entries)


def _instruction(task: Task) -> str:
    system = f"{task.system}\n\n" if task.system else ""
    return f"{system}{task.prompt}\n\nThe repository is in {WORKDIR}.\n"


def _dockerfile(task: Task) -> str:
    image = task.image or IMAGE
    install = "" if task.image else "RUN pip install --no-cache-dir pytest==9.0.2\n"
    copy = f"COPY repository/ {WORKDIR}/\n" if task.files or task.entries else ""
    return f"FROM {image}\n{install}WORKDIR {task.repository or WORKDIR}\n{copy}"


def _toml(task: Task, oracle: Oracle, organisation: str) -> str:
    name = "".join(char if char.isalnum() or char in "._-" else "-" for char in task.ref.task).strip(".-_") or "task"
    quoted = json.dumps
    hosts = sorted({address.rpartition(":")[0] for address in task.network})
    network = f'network_mode = "allowlist"\nallowed_hosts = {quoted(hosts)}' if hosts else 'network_mode = "no-network"'
    limits = task.sandbox_limits
    sizes = {"cpus": limits.vcpus, "memory_mb": limits.memory_mib, "storage_mb": limits.disk_mib}
    asked = "".join(f"{key} = {value}\n" for key, value in sizes.items() if value)
    return f"""schema_version = "{SCHEMA}"
artifacts = []

[task]
name = {quoted(f"{organisation}/{name}")}
description = {quoted(task.prompt[:200])}

[metadata]
suite = {quoted(task.ref.suite)}
category = {quoted(task.family)}

[verifier]
timeout_sec = {max(60.0, 4 * oracle.tests.timeout_s)}

[agent]
timeout_sec = {limits.time_s or 600.0}

[environment]
{network}
workdir = {quoted(task.repository or WORKDIR)}
{asked}"""


def _script(oracle: Oracle) -> str:
    """The verifier: the host's files, the tests, the reward."""
    plan, grading = oracle.tests, oracle.grading
    copy = _cleared((), oracle.entries or ())
    copy += 'cp -r /tests/files/. "$PWD"/\n' if oracle.hidden else ""
    if plan.kind == "command":
        command = shlex.join(plan.argv)
        if grading.kind == "reward_file":
            ending = f"mkdir -p /logs/verifier\ncp {shlex.quote(grading.file)} /logs/verifier/reward.txt\n"
            return f"#!/bin/bash\nexport PYTHONPATH=$PWD\n{copy}{command}\n{ending}"
    else:
        named = [*oracle.expected, *grading.pass_to_pass] if grading.kind in ("exact", "f2p_p2p") else plan.paths
        command = shlex.join(["python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", *named])
    return (
        f"#!/bin/bash\nexport PYTHONPATH=$PWD\n{copy}mkdir -p /logs/verifier\n"
        f"if {command}; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi\n"
    )


def _cleared(removed: Iterable[str], entries: Iterable[Change]) -> str:
    """A command that removes paths which are gone, and those in whose place a copy makes a link or another mode."""
    paths = [*removed, *(entry.path for entry in entries if entry.kind != "folder")]
    return f"rm -rf -- {shlex.join(paths)}\n" if paths else ""


def _solve(oracle: Oracle) -> str:
    gone = _cleared(oracle.removed, oracle.solution_entries or ())
    copy = 'cp -r /solution/files/. "$PWD"/\n' if oracle.solution or oracle.solution_entries else ""
    if not oracle.script:
        return f"#!/bin/bash\n{gone}{copy}"
    program = f"{shlex.join(interpreter(oracle.script))} /solution/program"
    return f"#!/bin/bash\n{gone}{copy}{program}\ncode=$?\nrm -rf {HOST_FOLDER}\nexit $code\n"
