"""The judge's part of a Harbor task, or of one of its steps: the verifier's script, tests, artifacts and image.

A shared verifier runs in a fresh sandbox with the agent's changes of the work folder and of the paths of ``--allow``. A
separate one gets the declared artifacts and ``/logs/artifacts`` alone: in a fresh sandbox of the task's image, or in an
image of its own, which ``docker_image`` names or a ``tests/Dockerfile`` makes.
"""

import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from headrace.messages.tasks import HOST_FOLDER, Artifact, SandboxLimits, TestPlan, Verifier
from headrace.tasks.importing import trees
from headrace.tasks.importing.base import ImportOptions, ImportRefused, limits_of, test_seconds
from headrace.tasks.importing.dockerfiles import NAME as DOCKERFILE
from headrace.tasks.importing.dockerfiles import built
from headrace.tasks.importing.tables import table_of
from headrace.tasks.importing.trees import Tree

TESTS, LOGS, VERIFY = f"{HOST_FOLDER}tests/", f"{HOST_FOLDER}logs/verifier/", f"{HOST_FOLDER}verify.sh"
SOLUTION, PREPARE = f"{HOST_FOLDER}solution/", f"{HOST_FOLDER}prepare.sh"
ROOT = f"{HOST_FOLDER}root"
"""Files of a verifier's own image, which its script copies to the root."""
REWARD = f"{LOGS}reward"
PUBLISHED = "/logs/artifacts"
"""The folder that is an artifact of every task."""
MISSING = {"gpus": "GPU", "tpu": "TPU", "mcp_servers": "tools behind MCP", "healthcheck": "health check"}
SERVICES = ("docker-compose.yaml", "docker-compose.yml", "singularity-compose.yaml")
_NO_CHANGES = ("/tmp", "/run", "/dev", "/proc", "/sys")
"""Folders whose changes no diff of an image holds (vmhost/guest/changes.py)."""
_DISK_MIB = 64 << 10
"""The largest disk of a sandbox (vmhost/node/capacity.py)."""
SIZES = {"memory": "memory_mib", "memory_mb": "memory_mib", "storage": "disk_mib", "storage_mb": "disk_mib"}


class VerifierPlace(NamedTuple):
    """Where the agent of a task works."""

    workdir: str
    image: str
    """Empty in a template."""
    environment: dict[str, Any]
    options: ImportOptions

    @property
    def mapped(self) -> bool:
        """Whether the folders of the task lie in the workspace of a template."""
        return not self.image


class Tests(NamedTuple):
    """The judge's part of a task or step."""

    hidden: Tree
    plan: TestPlan
    allowed: tuple[str, ...]
    separate: bool
    verifier: Verifier | UnsetType


def tests_of(
    verifier: dict[str, Any], contexts: Sequence[Path], declared: Sequence[Any], place: VerifierPlace, notes: list[str]
) -> Tests:
    """The tests of a task or step. verifier: its table. contexts: its folders of tests, later ones replace files of
    earlier ones. declared: its artifacts. ImportRefused."""
    if verifier.get("collect"):
        raise ImportRefused("verifier.collect: commands between agent and verifier do not run here")
    environment = table_of(verifier, "environment", "verifier.") if "environment" in verifier else None
    mode = verifier.get("environment_mode") or ("shared" if environment is None else "separate")
    if mode not in ("shared", "separate") or (mode == "shared" and environment is not None):
        raise ImportRefused(
            f"verifier.environment_mode = {mode!r:.80}: expected shared or separate, and separate with "
            "verifier.environment"
        )
    tree = Tree({}, {})
    for context in contexts:
        if context.is_dir():
            tree = trees.read(context).over(tree)
    files = tree.files
    notes += [f"tests: {note}" for note in tree.notes]
    plan = TestPlan(
        kind="command",
        argv=("bash", VERIFY),
        timeout_s=test_seconds("verifier.timeout_sec", verifier.get("timeout_sec", 600.0)),
    )
    exports = _exports(table_of(verifier, "env", "verifier."), "verifier.env")
    separate = mode == "separate"
    artifacts = _artifacts(declared, place) if separate else []
    allowed = _globs(artifacts, place) if separate else ("**", *place.options.allow)
    if separate and not place.mapped:
        image = _own_image(environment, contexts, tree, place, notes)
        if image is None and any(artifact.exclude for artifact in artifacts):
            raise ImportRefused("an artifact has exclude, which needs a verifier with an image of its own")
        if image is not None:
            placed = image.tree.below(ROOT)
            placed.files[VERIFY] = _verify(image.workdir or "/", False, image.exports + exports).encode()
            placed.files[PREPARE] = _prepare(ROOT, "/", image.workdir).encode()
            limits = machine_limits(environment or {}, notes, "verifier.environment.")
            judged = Verifier(image=image.image, artifacts=tuple(artifacts), limits=limits)
            return Tests(placed, msgspec.structs.replace(plan, prepare=("sh", PREPARE)), allowed, separate, judged)
    if separate and place.mapped and environment is not None:
        notes.append("verifier.environment: the template's sandbox takes its place")
    if "test.sh" not in files:
        raise ImportRefused(f"expected {' or '.join(f'{context.name}/test.sh' for context in contexts) or 'test.sh'}")
    if not (separate or place.mapped or place.options.allow):
        notes.append("the verifier gets the changes in the work folder; --allow '/etc/**' adds others")
    placed = tree.below(TESTS)
    placed.files[VERIFY] = _verify(place.workdir if place.mapped else "", place.mapped, exports).encode()
    if not place.mapped:
        placed.files[PREPARE] = _prepare(TESTS.rstrip("/"), "/tests/").encode()
        plan = msgspec.structs.replace(plan, prepare=("sh", PREPARE))
    return Tests(placed, plan, allowed, separate, UNSET)


class Solved(NamedTuple):
    """The known solution of a task or step."""

    script: str
    """Empty where there is none."""
    tree: Tree
    """Files that it needs."""


def solution_of(folder: Path, variables: dict[str, Any], place: VerifierPlace, notes: list[str]) -> Solved:
    """The solution in a folder ``solution``: all of its files, and a program that runs its solve.sh as Harbor does, at
    /solution. variables: of ``[solution] env``. ImportRefused."""
    if not (folder / "solve.sh").is_file():
        return Solved("", Tree({}, {}))
    if filled := sorted(name for name, value in variables.items() if "${" in str(value)):
        notes.append(f"the known solution, because solution.env.{filled[0]} is filled in from the host's environment")
        return Solved("", Tree({}, {}))
    tree = trees.read(folder)
    notes += [f"solution: {note}" for note in tree.notes]
    return Solved(_solve(place.workdir, place.mapped, _exports(variables, "solution.env")), tree.below(SOLUTION))


class _Own(NamedTuple):
    """An image of the verifier's own."""

    image: str
    workdir: str
    exports: str
    tree: Tree
    """By absolute path."""


def _own_image(
    environment: dict[str, Any] | None,
    contexts: Sequence[Path],
    tree: Tree,
    place: VerifierPlace,
    notes: list[str],
) -> _Own | None:
    """The verifier's image; None where it is the agent's. ImportRefused."""
    context = contexts[-1]  # the folder that Harbor builds
    for key, what in MISSING.items():
        if environment and environment.get(key):
            raise ImportRefused(f"verifier.environment.{key}: sandboxes here have no {what}")
    if services := next((name for name in SERVICES if (context / name).exists()), ""):
        raise ImportRefused(f"{context.name}/{services}: a verifier here has one machine")
    spec = place.environment if environment is None else environment
    image, folder = str(spec.get("docker_image") or ""), str(spec.get("workdir") or "")
    exports = _exports(table_of(environment or {}, "env", "verifier.environment."), "verifier.environment.env")
    if environment is not None and (environment.get("allowed_hosts") or environment.get("network_mode") == "public"):
        notes.append("verifier.environment network: the judge's sandbox reaches no host")
    if image:
        if environment is None:
            return None
        return _Own(image, folder, exports, tree.below("/tests/"))
    if (context / DOCKERFILE).is_file():
        made = built(context, place.options)
        return _Own(made.name, folder or made.workdir, exports, Tree({}, {}))
    if environment is not None:
        raise ImportRefused(
            f"verifier.environment names no docker_image, and there is no {context.name}/Dockerfile to make one of"
        )
    return None


def _artifacts(declared: Sequence[Any], place: VerifierPlace) -> list[Artifact]:
    """The artifacts of a separate verifier. ImportRefused."""
    artifacts = [] if place.mapped else [Artifact(path=PUBLISHED)]
    for entry in declared:
        options = entry if isinstance(entry, dict) else {"source": entry}
        source, exclude = options.get("source"), options.get("exclude") or []
        if not isinstance(source, str) or not source:
            raise ImportRefused(f"task.toml: expected artifacts that name a path, got {entry!r:.80}")
        if not isinstance(exclude, list) or not all(isinstance(pattern, str) for pattern in exclude):
            raise ImportRefused(f"the artifact {source}: expected a list of patterns exclude, got {exclude!r:.80}")
        if options.get("service") not in (None, "main"):
            raise ImportRefused(
                f"the artifact {source} is of service {options['service']!r:.80}; a task has one machine"
            )
        absolute = source if source.startswith("/") else f"{place.workdir}/{source}"
        parts = [part for part in absolute.split("/") if part not in ("", ".")]
        path = "/" + "/".join(parts)
        if ".." in parts or not parts:
            raise ImportRefused(f"the artifact {source}: expected a path below the root without ..")
        if any(path == folder or path.startswith(f"{folder}/") for folder in _NO_CHANGES):
            raise ImportRefused(f"the artifact {source} lies in /{parts[0]}, whose changes no diff of an image holds")
        if place.mapped and (exclude or not _below(path, place.workdir)):
            why = "has exclude" if exclude else f"lies outside of {place.workdir}"
            raise ImportRefused(f"the artifact {source} {why}, which is not possible in a template")
        artifacts.append(Artifact(path=path, exclude=tuple(exclude)))
    if not artifacts:
        raise ImportRefused("the verifier is separate and the task declares no artifacts, so it would see nothing")
    return artifacts


def _below(path: str, folder: str) -> bool:
    return path == folder.rstrip("/") or path.startswith(f"{folder.rstrip('/')}/")


def _globs(artifacts: Sequence[Artifact], place: VerifierPlace) -> tuple[str, ...]:
    """Globs of the changed paths that are artifacts. Those of the work folder are relative."""
    globs: list[str] = []
    for artifact in artifacts:
        if _below(place.workdir.rstrip("/"), artifact.path):
            globs.append("**")
        if artifact.path != place.workdir.rstrip("/"):
            inner = artifact.path.removeprefix(f"{place.workdir.rstrip('/')}/")
            globs += [inner, f"{inner}/**"]
    return tuple(dict.fromkeys(globs))


def _exports(variables: dict[str, Any], where: str) -> str:
    """Exports of variables. ImportRefused for one that the host has to fill in."""
    lines = []
    for name, value in variables.items():
        if "${" in str(value):
            raise ImportRefused(f"{where}.{name} is filled in from the host's environment")
        lines.append(f"export {name}={shlex.quote(str(value))}\n")
    return "".join(lines)


def machine_limits(environment: dict[str, Any], notes: list[str], where: str = "environment.") -> SandboxLimits:
    """The limits of a machine; what is left out of them goes to the notes. ImportRefused."""
    sizes: dict[str, Any] = {}
    for key, target in SIZES.items():
        if key in environment:
            sizes[target] = _mib(f"{where}{key}", environment[key])
    if sizes.get("disk_mib", 0) > _DISK_MIB:
        notes.append(f"{where}storage: a sandbox's disk has at most {_DISK_MIB} MiB")
        sizes["disk_mib"] = _DISK_MIB
    cpus = environment.get("cpus")
    if isinstance(cpus, float) and math.isfinite(cpus):  # limits_of refuses the others
        cpus = math.ceil(cpus)
    return limits_of({"vcpus": cpus} | sizes) or SandboxLimits()


def _mib(key: str, value: Any) -> int:
    """A size in MiB: a number, or a text such as 2G. ImportRefused."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", str(value), re.IGNORECASE)
    size = float(match[1]) * 1024.0 ** ("KMGT".index(match[2].upper() or "M") - 1) if match else math.inf
    if not math.isfinite(size):
        raise ImportRefused(f"{key}: expected a size such as 2048 or 2G, got {value!r:.80}")
    return math.ceil(size)


def _take(logs: str) -> str:
    """Commands that leave the reward at one path, as text or JSON."""
    return f"cat {logs}/reward.json > {REWARD} 2>/dev/null || cat {logs}/reward.txt > {REWARD} || rm -f {REWARD}\n"


def _prepare(source: str, target: str, workdir: str = "") -> str:
    """The script that makes, as root, what the tests need outside of the workspace. It fails where a hidden file cannot
    be placed, such as over a link that the agent made: the tests would read the agent's file."""
    return (
        f"mkdir -p {LOGS} /tests /logs/verifier {shlex.quote(workdir or '/')} || exit 1\n"
        f"rm -f {REWARD} /logs/verifier/reward.* && chmod 777 {LOGS} /logs/verifier || exit 1\n"
        f"[ ! -d {source} ] || cp -r {source}/. {target} || exit 1\nchmod +x /tests/test.sh\n"
    )


def _verify(workdir: str, mapped: bool, exports: str) -> str:
    """The script that runs the verifier: in an image after `_prepare`, or in a template. workdir: of an image, empty
    where the script begins there."""
    head = f"#!/bin/bash\nroot=$PWD\n{exports}"
    if not mapped:
        inside = f"cd {shlex.quote(workdir)}\n" if workdir else ""
        return f'{head}{inside}/tests/test.sh\ncd "$root"\n{_take("/logs/verifier")}'
    head += f"rm -rf {HOST_FOLDER}logs\nmkdir -p {LOGS}\n"
    # Longest first: the tests' own folder may lie below the work folder.
    moves = {"/logs/verifier": LOGS, "/tests": TESTS, workdir: ""}
    inside = f'{_edited(TESTS, moves)}chmod +x {TESTS}test.sh\n"$root"/{TESTS}test.sh\ncd "$root"\n'
    return head + inside + _take(LOGS.rstrip("/"))


def _edited(folder: str, moves: dict[str, str]) -> str:
    """A command that changes paths in the files of a folder. moves: absolute paths to those below ``$root``."""
    edits = " ".join(
        f'-e "s#\\(^\\|[^A-Za-z0-9_./-]\\){re.escape(old.rstrip("/"))}\\($\\|[^A-Za-z0-9_-]\\)'
        f'#\\1{f"$root/{new}".rstrip("/")}\\2#g"'
        for old, new in moves.items()
    )
    return f"find {folder} -type f -exec sed -i {edits} {{}} +\n"


def _solve(workdir: str, mapped: bool, exports: str) -> str:
    """The script that runs solve.sh at /solution; where its user may not make that folder, or in a template, the files
    stay where they are and their texts are changed."""
    head = f"#!/bin/bash\nroot=$PWD\n{exports}chmod +x {SOLUTION}solve.sh\n"
    at_home = f'"$root"/{SOLUTION}solve.sh\n'
    if mapped:
        return head + _edited(SOLUTION, {"/solution": SOLUTION, workdir: ""}) + at_home
    return (
        f"{head}if mkdir -p /solution 2>/dev/null && cp -r {SOLUTION}. /solution/; then\n"
        "/solution/solve.sh\ncode=$?\nrm -rf /solution\nexit $code\nfi\n"
        f"{_edited(SOLUTION, {'/solution': SOLUTION})}{at_home}"
    )
