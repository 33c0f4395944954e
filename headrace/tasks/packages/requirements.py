"""Requirements of a package's tests: read from its own metadata, installed as files for the sandbox.

A sandbox has no network, so dependencies come in with the repository: pip unpacks wheels on the host (no code of theirs
runs there) and their files lie under ``src/``, which a test run puts on its path. Requirements are taken from
where packages name them: the runtime requirements, the extras and dependency groups called test, tests, testing or dev,
and requirement files for tests or development.

Trade-off: the agent sees those files too. Tools that tests do not import (coverage, linters) and pytest itself, which
the sandbox has, are left out.
"""

import re
import subprocess
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from headrace import timed_commands
from headrace.python_modules import module_command

FOLDER = "src"
"""Where the files lie; guest/testing/pytests.py puts it on the path of a test run."""
LARGEST = 16 << 20
"""Bytes of all dependencies of a package."""
PIP_S = 600.0

_EXTRAS = ("tests", "test", "testing", "dev")
_FILES = re.compile(
    r"(?:.*[-_/])?(?:test|tests|testing|dev)[-_]?requirements\.txt|"
    r"requirements[-_/](?:test|tests|testing|dev)\.txt"
)
_TOOLS = re.compile(
    r"pytest|pytest-(?:cov|xdist|mypy-plugins|codspeed|randomly|timeout|sugar)|coverage|mypy|ruff|black|flake8.*|isort|"
    r"pylint|tox|nox|pre-commit.*|pip|setuptools.*|wheel|build|twine|psutil|sphinx.*"
)
_MISSING = re.compile(r"No module named '([\w.]+)'")


def missing(messages: Iterable[str]) -> tuple[str, ...]:
    """The modules whose absence these error messages name, sorted."""
    return tuple(sorted({match.group(1) for message in messages for match in _MISSING.finditer(message)}))


def named(root: Path) -> tuple[str, ...]:
    """The requirements of a source tree that its tests may need, without tools and without the package itself."""
    metadata = _metadata(root)
    project = _project(root)
    excluded = {canonicalize_name(str(metadata.get("Name", ""))), canonicalize_name(str(project.get("name", "")))}
    chosen: dict[str, str] = {}
    for requirement in _requirements(root, metadata, project):
        name = canonicalize_name(requirement.name)
        if name not in excluded and not _TOOLS.fullmatch(name):
            requirement.marker = None  # evaluated already
            chosen.setdefault(name, str(requirement))
    return tuple(chosen[name] for name in sorted(chosen))


def _requirements(root: Path, metadata: Mapping[str, Any], project: Mapping[str, Any]) -> Iterator[Requirement]:
    lines = [*metadata.get("Requires-Dist", ()), *project.get("dependencies", ())]
    optional: Mapping[str, Any] = project.get("optional-dependencies", {})
    groups: Mapping[str, Any] = project.get("dependency-groups", {})
    for table in (optional, groups):
        for extra in _EXTRAS:
            lines += [line for line in table.get(extra, ()) if isinstance(line, str)]
    for path in sorted(root.rglob("*.txt")):
        if _FILES.fullmatch(path.relative_to(root).as_posix()):
            lines += path.read_text(encoding="utf-8", errors="replace").splitlines()
    for line in lines:
        try:
            requirement = Requirement(line.partition(" #")[0].strip())
        except InvalidRequirement:  # an option, a comment or a path of a requirement file
            continue
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *_EXTRAS)):
            yield requirement


def _metadata(root: Path) -> dict[str, Any]:
    try:
        text = (root / "PKG-INFO").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    parsed = HeaderParser().parsestr(text)
    return {"Name": parsed.get("Name", ""), "Requires-Dist": parsed.get_all("Requires-Dist", [])}


def _project(root: Path) -> dict[str, Any]:
    """The ``[project]`` table of pyproject.toml, with the dependency groups in it."""
    try:
        whole = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {**whole.get("project", {}), "dependency-groups": whole.get("dependency-groups", {})}


def install(requirements: Iterable[str]) -> tuple[dict[str, bytes], str]:
    """The files of wheels that satisfy the requirements, under `FOLDER`. Without files the text gives the reason."""
    wanted = list(requirements)
    with tempfile.TemporaryDirectory() as folder:
        command = module_command("pip", "install", "-q", "--only-binary", ":all:", "--no-compile")
        try:
            done = timed_commands.run([*command, "--target", folder, *wanted], PIP_S)
        except subprocess.TimeoutExpired:
            return {}, f"pip did not install {', '.join(wanted)} within {PIP_S:g} s"
        if done.returncode:
            lines = done.stderr.decode("utf-8", "replace").splitlines()
            errors = [line for line in lines if line.startswith("ERROR")] or ["ERROR: pip failed"]
            return {}, f"pip cannot install {', '.join(wanted)}: {errors[-1].removeprefix('ERROR: ')}"
        root = Path(folder)
        files = {
            f"{FOLDER}/{path.relative_to(root).as_posix()}": path.read_bytes()
            for path in sorted(root.rglob("*"))
            if path.is_file() and _needed(path.relative_to(root).parts)
        }
    size = sum(map(len, files.values()))
    if size > LARGEST:
        return {}, f"{', '.join(wanted)} are {size >> 20} MiB; at most {LARGEST >> 20} MiB go into a sandbox"
    return files, ""


def _needed(parts: tuple[str, ...]) -> bool:
    """Whether a file of the target folder is one that an import or an entry point reads."""
    top = parts[0].partition("-")[0].lower()
    if top in ("bin", "pytest", "_pytest", "pluggy", "iniconfig", "share", "pip", "setuptools", "pkg_resources"):
        return False
    return not any(part in ("tests", "test", "__pycache__") for part in parts[:-1]) and parts[-1] != "RECORD"
