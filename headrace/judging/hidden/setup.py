"""Files that decide how hidden tests run. In the judge's sandbox they are the task's, whatever the candidate made of
them: an attempt keeps them in its diff, and they do not reach the hidden run.

They are test folders of the hidden tests, ``conftest.py``, pytest's options and the plugins that those name, modules
that Python or a test runner loads by name, and metadata of distributions, which names plugins too. A file that the
known solution changes is the candidate's: then the repository itself is what the runner loads, and the certificate
says so (`Certificate.risks`).
"""

import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

import msgspec

from headrace.messages.sandbox import Snapshot
from headrace.messages.tasks import HOST_FOLDER, Oracle, Task

_TEST_FOLDERS = frozenset({"test", "tests", "testing"})
_LOADED = frozenset({"conftest", "sitecustomize", "usercustomize", "__pycache__"})
"""Names, without what follows the first dot, that Python or pytest loads wherever it finds them."""
_RUNNERS = frozenset({"pytest", "_pytest", "pluggy", "iniconfig", "unittest", "doctest"})
"""Modules that a folder on the import path would shadow."""
_OPTIONS = frozenset({"pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml"})
_PARTLY = ("pyproject.toml", "setup.cfg", "tox.ini")
"""Files of which pytest reads a part."""
DECLARE = (*_PARTLY, "setup.py", "entry_points.txt")
"""Files in which a repository declares that it is a plugin of pytest."""
_METADATA = (".pth", ".pyc", ".egg-info", ".dist-info")
_PLUGIN = re.compile(r"-p[\s=\"',]*([\w.]+)")
_PLUGINS = re.compile(r"pytest_plugins\s*=\s*([^)\]\n]*)")


class SetUp:
    """The set-up of a task's hidden tests."""

    def __init__(self, task: Task, oracle: Oracle, originals: Mapping[str, bytes] | None = None) -> None:
        """originals: what changed files of an image held before."""
        self._files = {**(originals or {}), **task.files}
        self._solved = frozenset((*oracle.solution, *oracle.removed))
        self._modules = {_module(PurePosixPath(path).parts) for path in self._files}
        keep = oracle.grading.pass_to_pass
        tested = {name.partition("::")[0] for name in (*oracle.expected, *keep) if "::" in name}
        named = {path for path in (*oracle.hidden, *oracle.tests.paths) if not path.startswith(HOST_FOLDER)}
        self._folders = {folder for path in tested | named if (folder := _test_folder(path))}
        self._packages = oracle.grading.kind not in ("exit_code", "reward_file")
        self._plugins = set(_plugins(self._files))

    def keeps(self, path: str, content: bytes | None) -> bool:
        """Whether a candidate's change of a path stays out of the hidden run. content: None for one that is no regular
        file, such as a removal."""
        parts = PurePosixPath(path).parts
        beside = path not in self._solved and any(parts[: len(folder)] == folder for folder in self._folders)
        return beside or self.decides(path, content)

    def decides(self, path: str, content: bytes | None) -> bool:
        """The same for files outside of test folders, and for those in them that are more than tests and helpers."""
        parts = PurePosixPath(path).parts
        if not parts or path in self._solved:
            return False
        return (
            any(part.partition(".")[0] in _LOADED or part.endswith(_METADATA) for part in parts)
            or (self._packages and "site-packages" in parts)
            or parts[-1] in _OPTIONS
            or (parts[-1] in _PARTLY and not self._same_options(path, content))
            or ((module := _module(parts)) in _RUNNERS and module not in self._modules)
            or path in self._plugins
        )

    def _same_options(self, path: str, content: bytes | None) -> bool:
        return content is not None and _options(path, content) == _options(path, self._files.get(path, b""))


def loads_itself(task: Task, oracle: Oracle, solved: Snapshot, declared: Mapping[str, bytes]) -> str:
    """Why the runner of a task's tests loads the repository's own code, in one sentence; empty where it does not.
    solved: the known solution; declared: the files `DECLARE` of an image."""
    unsolved = SetUp(task, msgspec.structs.replace(oracle, solution={}, removed=()), solved.originals)
    for path in (*solved.diff, *solved.deleted):
        if path not in oracle.hidden and unsolved.keeps(path, solved.diff.get(path)):
            return f"the known solution changes {path}, which decides how the tests run"
    for path, content in {**declared, **task.files}.items():
        if PurePosixPath(path).name in DECLARE and b"pytest11" in content:
            return f"{path} makes the repository a plugin of pytest, which the runner of its tests loads"
    return ""


def _test_folder(path: str) -> tuple[str, ...]:
    """The outermost folder of tests above a path; empty without one."""
    parts = PurePosixPath(path).parts
    for count, part in enumerate(parts[:-1], 1):
        if part in _TEST_FOLDERS:
            return parts[:count]
    return ()


def _module(parts: tuple[str, ...]) -> str:
    """The module at the root of an import path, which is the repository or its folder src."""
    parts = parts[1:] if parts[:1] == ("src",) else parts
    return parts[0].partition(".")[0] if parts else ""


def _options(path: str, content: bytes) -> object:
    """The part of a file that pytest reads. A file that cannot be read counts as a whole."""
    text = content.decode("utf-8", "replace")
    if path.endswith(".toml"):
        try:
            return tomllib.loads(text).get("tool", {}).get("pytest")
        except (tomllib.TOMLDecodeError, RecursionError, AttributeError):
            return text
    lines, inside = [], False
    for line in text.splitlines():  # as iniconfig splits it; a section begins in the first column
        inside = "pytest" in line if line.startswith("[") else inside
        lines += [line.strip()] * inside
    return [line for line in lines if line]


def _plugins(files: Mapping[str, bytes]) -> Iterable[str]:
    """Paths of the modules that the task's own set-up names as plugins."""
    for path, content in files.items():
        name = PurePosixPath(path).name
        text = content.decode("utf-8", "replace") if name in {"conftest.py", *_OPTIONS, *_PARTLY} else ""
        modules = _PLUGIN.findall(text) if name != "conftest.py" else []
        modules += [module for listed in _PLUGINS.findall(text) for module in re.findall(r"[\w.]+", listed)]
        for module in modules:
            stem = module.replace(".", "/")
            yield from (f"{root}{stem}{end}" for root in ("", "src/") for end in (".py", "/__init__.py"))
