"""Real packages: fetched by pip, unpacked, and split into sources and tests.

pip asks a source distribution for its metadata, which runs the package's own build script on this host: fetch only
packages that you would install. All other code of the package, its tests included, runs in sandboxes alone.
"""

import re
import subprocess
from pathlib import Path, PurePosixPath

import msgspec

from headrace import timed_commands
from headrace.archives import tars, zips
from headrace.archives.members import ArchiveLimits, ArchiveRefused, files_of
from headrace.errors import HeadraceError
from headrace.python_modules import module_command
from headrace.tasks.packages.requirements import PIP_S, named

_SKIP = frozenset(
    {"docs", "doc", "examples", "example", "build", "dist", "benchmarks", "scripts", "dev", "node_modules"}
)
_FILE_LIMIT, _TREE_LIMIT = 1 << 20, 6 << 20
_PYTHON_LIMIT = 16 << 20
"""Bytes of Python in a tree; one with more than `_TREE_LIMIT` bytes keeps its Python alone."""
_UNPACKED_LIMIT = 512 << 20
_MOST_FILES = 100_000


class PackageError(HeadraceError):
    """The package cannot be fetched or has no tests; one sentence says why."""


class Package(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a source tree that a sandbox needs. Paths are relative to its root."""

    name: str
    files: dict[str, bytes]
    sources: tuple[str, ...]
    """Modules that a bug may be put into: all but the tests."""
    tests: tuple[str, ...]
    """Files that pytest collects."""
    requires: tuple[str, ...] = ()
    """Requirements that the tree names and its tests may need (packages/requirements.py)."""

    @property
    def support(self) -> tuple[str, ...]:
        """Files beside the tests that tests need: conftest.py, helpers, data. The agent may see but not change them."""
        return tuple(path for path in self.files if is_test(path) and path not in self.tests)


def is_test(path: str) -> bool:
    """Whether a path is a test or a file beside the tests."""
    parts = PurePosixPath(path).parts
    name = parts[-1]
    return (
        any(part in ("tests", "test", "testing") for part in parts[:-1])
        or _is_test_file(name)
        or name in ("conftest.py", "tests.py")
    )


def _is_test_file(name: str) -> bool:
    return name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py"))


def fetch(requirement: str, folder: Path) -> Path:
    """The unpacked source distribution of ``NAME==VERSION``. PackageError when pip cannot download it."""
    project = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]  # its build backend may come as a wheel
    command = module_command("pip", "download", "--no-deps", "--no-binary", project, "-q", "-d", str(folder))
    try:
        done = timed_commands.run([*command, requirement], PIP_S)
    except subprocess.TimeoutExpired:
        raise PackageError(
            f"pip did not download {requirement} within {PIP_S:g} s: check that the index that `pip config list` shows "
            "answers, or unpack the source distribution and name its folder by --path"
        ) from None
    if done.returncode:
        errors = done.stderr.decode("utf-8", "replace").splitlines()
        lines = [line for line in errors if line.startswith("ERROR")] or ["pip failed"]
        raise PackageError(f"{requirement} cannot be downloaded as a source distribution: {lines[-1]}")
    return unpack(next(path for path in sorted(folder.iterdir()) if path.is_file()), folder / "unpacked")


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack the files of an archive, without modes and links; the root is its only folder where it has just one.

    PackageError for an archive that is none, whose members leave `folder`, or with more than `_UNPACKED_LIMIT` bytes.
    """
    folder.mkdir()
    reader = zips if archive.suffix == ".zip" else tars
    try:
        with archive.open("rb") as packed:
            for path, data in files_of(
                reader.members(packed, ArchiveLimits(_MOST_FILES, _UNPACKED_LIMIT)), skip_links=True
            ):
                target = folder / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)
    except (ArchiveRefused, OSError) as error:
        raise PackageError(f"{archive.name} cannot be unpacked: {error}") from None
    inside = list(folder.iterdir())
    return inside[0] if len(inside) == 1 and inside[0].is_dir() else folder


def read(root: Path, name: str) -> Package:
    """The code and the tests of a source tree. PackageError when one of the two is missing."""
    files: dict[str, bytes] = {}
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root)
        parts = relative.parts
        hidden = any(part.startswith(".") or part.endswith(".egg-info") or part == "__pycache__" for part in parts)
        if hidden or parts[0] in _SKIP or path.is_symlink() or not path.is_file():
            continue
        # Configuration is left out: it asks for plugins (coverage, random order) that a sandbox does not have.
        wanted = path.suffix == ".py" or len(parts) > 1
        if wanted and parts[-1] not in ("setup.py", "versioneer.py") and path.stat().st_size <= _FILE_LIMIT:
            files[relative.as_posix()] = path.read_bytes()
    if sum(map(len, files.values())) > _TREE_LIMIT:
        files = {path: data for path, data in files.items() if path.endswith(".py")}
    if sum(map(len, files.values())) > _PYTHON_LIMIT:
        raise PackageError(f"{name} is larger than {_PYTHON_LIMIT >> 20} MiB of Python")
    tests = tuple(path for path in files if _is_test_file(PurePosixPath(path).name))
    sources = tuple(path for path in files if path.endswith(".py") and not is_test(path))
    if not tests:
        raise PackageError(f"{name} has no test files in its source distribution")
    if not sources:
        raise PackageError(f"{name} has no Python modules")
    return Package(name=name, files=files, sources=sources, tests=tests, requires=named(root))
