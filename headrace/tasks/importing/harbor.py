"""Harbor task folders (task.toml 1.0 to 1.4): instruction, environment, tests, known solution, steps.

The verifier runs in the judge's fresh sandbox and its reward file decides. Harbor mounts tests at /tests and expects
the reward under /logs/verifier. In an image the script does the same; in a template (``--template``) these folders and
the work folder lie in the workspace, and the scripts' text is changed to say so, which the report notes.

verification.py has the rules for separate verifiers, artifacts and images of a verifier's own, stepwise.py those for
steps. Refused by name: several services, GPUs, tools behind MCP, health checks, commands of ``verifier.collect`` and of
a step's setup.sh, and Dockerfiles that run commands.
"""

import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from headrace.messages.tasks import Grading, Oracle, SandboxLimits, Task, TestPlan
from headrace.tasks.importing import stepwise, trees
from headrace.tasks.importing.base import (
    FORM,
    ImportOptions,
    ImportRefused,
    MadeTask,
    SourceEntry,
    SourceError,
    clean_id,
    digest,
    limits_of,
)
from headrace.tasks.importing.dockerfiles import NAME as DOCKERFILE
from headrace.tasks.importing.dockerfiles import built
from headrace.tasks.importing.tables import list_of, table_of, text_at
from headrace.tasks.importing.verification import (
    MISSING,
    REWARD,
    SERVICES,
    SIZES,
    VerifierPlace,
    machine_limits,
    solution_of,
    tests_of,
)

VERSIONS = ("1.0", "1.1", "1.2", "1.3", "1.4")


def read(options: ImportOptions) -> Iterator[SourceEntry]:
    """The task folders in a folder, or the folder itself. SourceError when there is none."""
    root = options.source
    folders = [root] if (root / "task.toml").exists() else sorted(path.parent for path in root.glob("*/task.toml"))
    if not folders:
        raise SourceError(f"{root} has no task.toml, and no folder in it has one; expected Harbor tasks")
    for number, folder in enumerate(folders, 1):
        settings = json.dumps([FORM, options.template, options.system, options.allow, *options.tools]).encode()
        try:
            files = sorted(path for path in folder.rglob("*") if path.is_symlink() or path.is_file())
            parts = [part for path in files for part in (os.fsencode(path.relative_to(folder)), _bytes(path))]
            make = _maker(folder, options)
        except OSError as error:
            parts, make = [], _unreadable(f"the folder cannot be read: {error}")
        try:
            id = clean_id(folder.resolve().name)
        except ImportRefused:
            id = f"{number:06d}"  # `_made` refuses it
        yield SourceEntry(id, digest(settings, *parts), make)


def _bytes(path: Path) -> bytes:
    return os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes()


def _maker(folder: Path, options: ImportOptions) -> Callable[[], MadeTask]:
    return lambda: _made(folder, options)


def _unreadable(reason: str) -> Callable[[], MadeTask]:
    def refuse() -> MadeTask:
        raise ImportRefused(reason)

    return refuse


def _made(folder: Path, options: ImportOptions) -> MadeTask:
    ref, root = options.ref(clean_id(folder.resolve().name)), folder.resolve()
    # A task from elsewhere must not carry this machine's files to the policy.
    if outside := next((path for path in folder.rglob("*") if not _resolved(path).is_relative_to(root)), None):
        raise ImportRefused(f"{outside.relative_to(folder)} is a link out of the task's folder")
    config = _config(folder)
    environment, verifier = table_of(config, "environment"), table_of(config, "verifier")
    notes = _refuse(folder, config, environment)
    if environment.get("env"):
        notes.append("environment variables: the agent's sandbox has those of its image alone")
    where, tree, image_folder = _place(folder, environment, options)
    workdir = _workdir(config, image_folder, options, notes)
    if not options.template:
        where["repository"] = workdir
    notes += tree.notes
    place = VerifierPlace(workdir, str(where.get("image", "")), environment, options)
    staged = stepwise.read(folder, config, place, notes)
    limits = _limits(config, environment, options, notes, staged)
    if place.mapped:
        notes.append(f"paths {workdir}, /tests, /solution and /logs moved into the workspace")

    def moved(text: str) -> str:
        return _moved(text, workdir) if place.mapped else text

    oracle = Oracle(
        ref=ref,
        hidden={},
        tests=TestPlan(kind="command", argv=("true",)),
        expected=(),
        solution={},
        grading=Grading(kind="reward_file", file=REWARD),
    )
    task = Task(
        ref=ref,
        family=f"harbor:{table_of(config, 'metadata').get('category', 'task')}",
        prompt="",
        files=tree.files,
        entries=tree.special,
        allowed=(),
        tests=TestPlan(kind="command", argv=("true",)),
        network=_hosts(environment),
        system=options.system,
        tools=options.tools,
        limits=limits,
        **where,
    )
    if staged is not None:
        first, *later = (msgspec.structs.replace(step, prompt=moved(step.prompt)) for step in staged.steps)
        allowed = dict.fromkeys(glob for step in staged.tests.tests for glob in step.allowed)
        begun = trees.Tree(first.files, {entry.path: entry for entry in first.entries or ()}).over(tree)
        task = msgspec.structs.replace(
            task,
            prompt=first.prompt,
            files=begun.files,
            entries=begun.special,
            allowed=tuple(allowed),
            steps=tuple(later) or UNSET,
        )
        oracle = msgspec.structs.replace(oracle, steps=staged.tests)
        return MadeTask(task=task, oracle=oracle, notes=tuple(dict.fromkeys(notes)))
    if not (folder / "instruction.md").is_file():
        raise ImportRefused("expected instruction.md and tests/test.sh")
    judged = tests_of(verifier, [folder / "tests"], list_of(config, "artifacts"), place, notes)
    variables = table_of(table_of(config, "solution"), "env", "solution.")
    solved = solution_of(folder / "solution", variables, place, notes)
    task = msgspec.structs.replace(task, prompt=moved(text_at(folder / "instruction.md")), allowed=judged.allowed)
    oracle = msgspec.structs.replace(
        oracle,
        hidden=judged.hidden.files,
        entries=judged.hidden.special,
        tests=judged.plan,
        script=solved.script,
        solution=solved.tree.files,
        solution_entries=solved.tree.special,
        separate=judged.separate,
        verifier=judged.verifier,
    )
    return MadeTask(task=task, oracle=oracle, notes=tuple(dict.fromkeys(notes)))


def _workdir(config: dict[str, Any], image_folder: str, options: ImportOptions, notes: list[str]) -> str:
    """The agent's folder; empty: the image's own. image_folder: the folder of an image that was built."""
    if named := str(table_of(config, "environment").get("workdir") or ""):
        return named
    if options.template:
        return "/app"
    if not _separate(config):
        return ""
    if not image_folder:
        notes.append("environment.workdir is not named: /app is taken, since the artifacts of a verifier depend on it")
    return image_folder or "/app"


def _separate(config: dict[str, Any]) -> bool:
    """Whether a verifier is separate, so that its artifacts are found by the agent's folder."""
    steps = [table for table in list_of(config, "steps") if isinstance(table, dict)]
    verifiers = [table_of(table, "verifier") for table in (config, *steps)]
    return any(table.get("environment_mode") == "separate" or "environment" in table for table in verifiers)


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = tomllib.loads(text_at(folder / "task.toml"))
    except RecursionError:
        raise ImportRefused("task.toml: its lists and tables are nested too deep") from None
    except ValueError as error:  # also of a number with more digits than Python reads
        raise ImportRefused(f"task.toml: {error}") from None
    version = str(config.get("schema_version", config.get("version", "1.0")))
    if version not in VERSIONS:
        raise ImportRefused(f"task.toml has schema {version}; expected one of {', '.join(VERSIONS)}")
    return config


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:  # links in a circle
        raise ImportRefused(f"{path.name}: {error}") from None


def _refuse(folder: Path, config: dict[str, Any], environment: dict[str, Any]) -> list[str]:
    """Settings that are left out of this task. ImportRefused for one that is not possible here."""
    if services := next((name for name in SERVICES if (folder / "environment" / name).exists()), ""):
        raise ImportRefused(f"environment/{services}: a task here has one machine")
    for key, what in MISSING.items():
        if environment.get(key):
            raise ImportRefused(f"environment.{key}: sandboxes here have no {what}")
    if str(environment.get("os", "linux")).lower() != "linux":
        raise ImportRefused(f"environment.os = {environment['os']}: sandboxes here run Linux")
    asked = [f"{table}.user" for table in ("agent", "verifier") if table_of(config, table).get("user")]
    if _public(environment):
        asked.append("public network: only listed hosts can be reached")
    return asked


def _limits(
    config: dict[str, Any],
    environment: dict[str, Any],
    options: ImportOptions,
    notes: list[str],
    staged: stepwise.Stepwise | None,
) -> SandboxLimits | UnsetType:
    """The limits of the agent and its machine; what is left out of them goes to the notes. ImportRefused."""
    time_s = table_of(config, "agent").get("timeout_sec") if staged is None else staged.time_s
    time = limits_of({"time_s": time_s}) or SandboxLimits()
    if options.template:  # the machine is another one than the task's
        notes += [f"environment.{key}" for key in ("cpus", *SIZES) if key in environment]
        return time if time != SandboxLimits() else UNSET
    limits = machine_limits(environment, notes).over(time)
    return limits if limits != SandboxLimits() else UNSET


def _public(environment: dict[str, Any]) -> bool:
    if "network_mode" in environment:
        return bool(environment["network_mode"] == "public")
    return bool(environment.get("allow_internet", True))


def _hosts(environment: dict[str, Any]) -> tuple[str, ...]:
    """The listed hosts, at the ports of HTTP."""
    hosts = list_of(environment, "allowed_hosts", "environment.")
    return tuple(f"{host}:{port}" for host in hosts for port in (80, 443))


def _place(folder: Path, environment: dict[str, Any], options: ImportOptions) -> tuple[dict[str, Any], trees.Tree, str]:
    """Where the task runs, the files that travel with it, and the folder of an image that was built. ImportRefused when
    it can run nowhere."""
    context, empty = folder / "environment", trees.Tree({}, {})
    if options.template:
        exported = context / "repository"  # `headrace tasks export` writes it
        tree = trees.read(exported if exported.is_dir() else context) if context.is_dir() else empty
        for name in (DOCKERFILE, ".dockerignore"):
            tree.files.pop(name, None)
            tree.entries.pop(name, None)
        return {"template": options.template}, tree, ""
    if image := str(environment.get("docker_image") or ""):
        return {"image": image}, empty, ""
    if not (context / DOCKERFILE).is_file():
        raise ImportRefused("the task names no docker_image and has no environment/Dockerfile")
    made = built(context, options)
    return {"image": made.name}, empty, made.workdir


def _moved(text: str, workdir: str) -> str:
    """A text whose paths lie in the workspace, which is the current folder."""
    text = re.sub(rf"(?<![\w./-]){re.escape(workdir.rstrip('/'))}/(?=\w)", "", text)
    return re.sub(rf"(?<![\w./-]){re.escape(workdir.rstrip('/'))}(?![\w/-])", ".", text)
