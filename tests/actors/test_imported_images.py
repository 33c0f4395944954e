"""Ten SWE-bench rows and seven Harbor folders with images, imported and tried by every scripted policy.

The images, rows and folders are made by tests/support/image_rows.py of packages of PyPI and Debian; the judge, the
rollout actor and the environment are those of `headrace eval`. A known solution passes, no change and changed tests do
not. All of them are certified.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.vmhost.backends.container.backend import unavailable
from tests.support import image_rows
from tests.support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.vm, pytest.mark.timeout(7200)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with everything imported."""
    if shutil.which("mmdebstrap") is None:
        pytest.skip("mmdebstrap is missing, which makes the images")
    folder = tmp_path_factory.mktemp("images")
    image_rows.make(folder / "made")
    for number, tag in enumerate((folder / "made" / "tags").read_text().split()):
        words = ["images", "import", str(folder / "made" / "layout"), "--tag", tag, "--name", f"row{number}"]
        headrace(folder, *words)
    headrace(folder, "tasks", "import", "swebench", str(folder / "made" / "rows.jsonl"), "--name", "rows")
    headrace(folder, "tasks", "import", "harbor", str(folder / "made" / "harbor"), "--name", "folders")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def headrace(folder: Path, *words: str, **settings: object) -> str:
    places = {"environment.cache_dir": folder / "cache", "tasks.dir": folder / "suites", "run.dir": folder / "runs"}
    values = {key: str(value) for key, value in places.items()} | settings
    options = [word for key, value in values.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    command = [sys.executable, "-m", "headrace.cli", *words, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.parametrize("backend", ["container", "qemu"])
@pytest.mark.parametrize(("policy", "passes"), [("oracle", True), ("idle", False), ("edit-tests", False)])
@pytest.mark.parametrize(("suite", "tasks"), [("rows", 10), ("folders", 7)])
def test_only_the_known_solution_passes(
    place: Path, suite: str, tasks: int, policy: str, passes: bool, backend: str
) -> None:
    if backend == "container" and (why := unavailable()):
        pytest.skip(f"no containers here: {why}")
    limits = {"limits.max_tokens": 40_000, "limits.context_tokens": 40_000, "limits.wall_s": 1800}
    settings = limits | {"environment.backend": backend, "run.min_free_mb": 64}
    told = json.loads(
        headrace(place, "eval", "--policy", f"scripted:{policy}", "--suite", suite, **settings).splitlines()[-1]
    )
    assert (told["tasks"], told["passed"], told["infra_failures"]) == (tasks, tasks * passes, 0), told


@pytest.mark.parametrize(("suite", "tasks"), [("rows", 10), ("folders", 5)])
def test_all_are_certified(place: Path, suite: str, tasks: int) -> None:
    if why := unavailable():
        pytest.skip(f"no containers here: {why}")
    told = headrace(place, "tasks", "certify", suite, **{"environment.backend": "container"})
    assert f"{tasks} of {tasks} tasks are certified" in told, told
