"""Ten SWE-bench rows and eight Harbor folders with images, imported and tried by every scripted policy.

The images, rows and folders are made by tests/support/image_rows.py of packages of PyPI and Debian; the judge, the
rollout actor and the environment are those of `headrace eval`. A known solution passes, no change and changed tests do
not. All of them are certified.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.vmhost.backends.container.backend import unavailable
from tests.support import image_rows
from tests.support.commands import headrace

pytestmark = [pytest.mark.slow, pytest.mark.vm, pytest.mark.timeout(7200)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with everything imported."""
    if shutil.which("mmdebstrap") is None:
        pytest.skip("mmdebstrap is missing, which makes the images")
    folder = tmp_path_factory.mktemp("images")
    image_rows.make(folder / "made")
    headrace(folder, "images", str(folder / "made" / "base"), "--tag", image_rows.BASE)
    for number, tag in enumerate((folder / "made" / "tags").read_text().split()):
        words = ["images", str(folder / "made" / "layout"), "--tag", tag, "--name", f"row{number}"]
        headrace(folder, *words)
    headrace(folder, "tasks", "import", "swebench", str(folder / "made" / "rows.jsonl"), "--name", "rows")
    options = ["--name", "folders", "--allow", "/etc/greeting"]
    headrace(folder, "tasks", "import", "harbor", str(folder / "made" / "harbor"), *options)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("backend", ["container", "qemu"])
@pytest.mark.parametrize(("policy", "passes"), [("oracle", True), ("idle", False), ("edit-tests", False)])
@pytest.mark.parametrize(("suite", "tasks"), [("rows", 10), ("folders", 8)])
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


@pytest.mark.parametrize(("suite", "tasks"), [("rows", 10), ("folders", 8)])
def test_all_are_certified(place: Path, suite: str, tasks: int) -> None:
    if why := unavailable():
        pytest.skip(f"no containers here: {why}")
    told = headrace(place, "tasks", "certify", suite, **{"environment.backend": "container"})
    assert f"{tasks} of {tasks} tasks are certified" in told, told
