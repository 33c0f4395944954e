"""The parsers of PyPI's swebench beside ours: its own tests pass on ours, and random logs give the same outcomes."""

import importlib.util
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headrace.judging.logs.registry import PARSERS
from headrace.tasks.packages.fetch import unpack
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow
PACKAGE = "swebench==5.0.2"
CACHE = ROOT / ".cache" / "peers"
THEIRS = {
    "pytest": ("python", "parse_log_pytest"),
    "pytest_options": ("python", "parse_log_pytest_options"),
    "pytest_spaces": ("python", "parse_log_pytest_v2"),
    "matplotlib": ("python", "parse_log_matplotlib"),
    "seaborn": ("python", "parse_log_seaborn"),
    "django": ("python", "parse_log_django"),
    "sympy": ("python", "parse_log_sympy"),
    "go": ("go", "parse_log_gotest"),
    "cargo": ("rust", "parse_log_cargo"),
    "jest": ("javascript", "parse_log_jest"),
    "tap": ("javascript", "parse_log_tap"),
}
WORDS = {"PASSED": "passed", "FAILED": "failed", "ERROR": "error", "SKIPPED": "skipped", "XFAIL": "passed"}
SHIM = """
from headrace.judging.logs.registry import PARSERS
def _of(name):
    words = {"passed": "PASSED", "failed": "FAILED", "error": "ERROR", "skipped": "SKIPPED"}
    def parse(log, test_spec=None):
        return {test: words[outcome] for test, outcome in PARSERS[name](log).items()}
    parse.__name__ = name
    return parse
"""


@pytest.fixture(scope="module")
def sdist() -> Path:
    """The unpacked source distribution."""
    folder = CACHE / "unpacked" / PACKAGE.replace("==", "-")
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-build-isolation"]
        command += ["--no-binary", ":all:", "-d", str(CACHE), PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True)
        archives = list(CACHE.glob("swebench-5.0.2.tar.gz"))
        if not archives:
            pytest.skip(f"PyPI cannot be reached: {done.stderr[-200:]}")
        unpack(archives[0], folder.parent)
    return folder


def module(sdist: Path, name: str) -> ModuleType:
    """A file of their parsers, loaded without the package around it, which needs 84 others."""
    kinds = "PASSED FAILED SKIPPED ERROR XFAIL".split()
    stubs = {
        "swebench.harness.constants": f"import enum\nTestStatus = enum.Enum('TestStatus', {[(k, k) for k in kinds]})",
        "swebench.types": "class TestSpec: ...",
        "swebench.utils": "def ansi_escape(text): return text",
    }
    for dotted, text in stubs.items():
        stub = ModuleType(dotted)
        exec(text, vars(stub))
        sys.modules[dotted] = stub
    for dotted in ("swebench", "swebench.harness"):
        sys.modules.setdefault(dotted, ModuleType(dotted))
    spec = importlib.util.spec_from_file_location(
        f"peer_{name}", sdist / "swebench" / "harness" / "log_parsers" / f"{name}.py"
    )
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture
def peers(sdist: Path) -> Any:
    before = {name: part for name, part in sys.modules.items() if name.partition(".")[0] == "swebench"}
    yield {ours: getattr(module(sdist, file), function) for ours, (file, function) in THEIRS.items()}
    for name in [name for name in sys.modules if name.partition(".")[0] == "swebench"]:
        del sys.modules[name]
    sys.modules.update(before)


PIECES = [
    "PASSED a.py::test_x",
    "FAILED a.py::test_y[a b] - AssertionError: 1",
    "ERROR b.py",
    "SKIPPED [3] a.py:1: why",
    "XFAIL a.py::test_z",
    "a.py::test_w PASSED",
    "c.py::test_x PASSED [ 50%]",
    "PASSED a.py::test_p[/home/x/y.txt]",
    "PASSED a.py::test_q[//x/y]",
    "PASSED",
    "test_a (m.T) ... ok",
    "test_b (m.T) ... FAIL",
    "test_c (m.T) ... skipped 'x'",
    "test_d (m.T) ... output",
    "ok",
    "ERROR: test_e (m.T)",
    "FAIL: test_f (m.T)",
    "A docstring ... ERROR",
    "test_g ok",
    "test_h F",
    "test_i E",
    "________ sympy/core/tests/test_x.py:test_j ________",
    "--- PASS: TestA (0.00s)",
    "    --- FAIL: TestA/sub (0.10s)",
    "--- SKIP: TestB (0.00s)",
    "test a::b ... ok",
    "test a::c ... FAILED",
    "  ✓ adds (3 ms)",
    "  ✕ takes",
    "  ○ waits",
    "ok 1 opens",
    "not ok 2 closes",
    "    at Object.<anonymous> (x.js:1:1)",
    "",
]


@pytest.mark.parametrize("name", sorted(THEIRS))
def test_random_logs_give_the_same_outcomes(name: str, peers: Any) -> None:
    rng = random.Random(name)
    seen = 0
    for _ in range(300):
        log = "\n".join(rng.choice(PIECES) for _ in range(rng.randrange(1, 25)))
        # Theirs takes "ERROR:" for a status, and in sympy's parser any text around ".py:" for a headline.
        theirs = {test: WORDS[status] for test, status in peers[name](log, None).items() if status in WORDS}
        if name == "sympy":
            theirs = {test: word for test, word in theirs.items() if test.startswith(("test_", "sympy/"))}
        assert PARSERS[name](log) == theirs, log
        seen += len(theirs)
    assert seen > 100


def test_their_own_tests_pass_on_our_parsers(sdist: Path, tmp_path: Path) -> None:
    package = tmp_path / "swebench" / "harness"
    (package / "log_parsers").mkdir(parents=True)
    for folder in (package.parent, package, package / "log_parsers"):
        (folder / "__init__.py").write_text("")
    kinds = [(kind, kind) for kind in "PASSED FAILED SKIPPED ERROR XFAIL".split()]
    (package / "constants.py").write_text(f"import enum\nTestStatus = enum.Enum('TestStatus', {kinds})\n")
    for file in ("python", "javascript"):
        lines = [f"{function} = _of({ours!r})" for ours, (of, function) in THEIRS.items() if of == file]
        (package / "log_parsers" / f"{file}.py").write_text(SHIM + "\n".join(lines) + "\n")
    paths = [f"test_log_parsers_{name}.py" for name in ("python", "javascript", "pytest_v2", "skip_summary")]
    for path in paths:
        shutil.copy(sdist / "tests" / path, tmp_path)  # beside the folder that has the real package
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", *paths],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "13 passed" in done.stdout, done.stdout[-300:]
