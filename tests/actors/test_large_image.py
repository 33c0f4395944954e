"""A task in an image of 3 GiB with a git repository of 20,000 files, through rollout, environment and judge.

The known solution deletes, renames and links files, changes a mode, writes binaries, commits and removes `.git`. The
verifier looks for all changes in the judge's fresh clone, which gets the diff alone. Changes of `.git` are not part of
a diff, so the clone has the repository as it was.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.images import EDIT, FILES, Layers, base_layer, large_image
from headrace.vmhost.backends.container.backend import unavailable
from headrace.vmhost.images import imported
from tests.support.commands import headrace

pytestmark = [pytest.mark.slow, pytest.mark.vm, pytest.mark.timeout(3600)]

FILLER_MIB, MEMORY_MIB = 2400, 512
GIT = "git -c gc.auto=0 -c safe.directory=/testbed -c user.name=a -c user.email=a@b"
SOLUTION = f"""{EDIT}
sha256sum new/* > sums
{GIT} add -A && {GIT} commit -qm all && rm -rf .git
"""
VERIFIER = f"""cd /testbed
check() {{ "$@" || {{ echo "not so: $*"; wrong=1; }}; }}
check test "$(find . -name 'module*.py' | wc -l)" = {FILES - 21}
check test ! -e pkg00/module00100.py
check test ! -e pkg50/module00050.py
check grep -q 'return 50$' renamed.py
check test "$(stat -c %a pkg60/module00060.py)" = 755
check test "$(readlink link)" = renamed.py
check sha256sum --quiet -c sums
check test "$(grep -lx x pkg*/module000[0-2]?.py | wc -l)" = 30
check test "$({GIT} rev-list --count HEAD)" = 1
check python3 -m pytest -q -p no:cacheprovider test_two.py
echo $((1 - ${{wrong:-0}})) > /logs/verifier/reward.txt
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which image and task are imported."""
    folder = tmp_path_factory.mktemp("large")
    layout = Layers(folder / "layout")
    large_image(layout, base_layer(layout, folder), folder, FILLER_MIB)
    image = imported.take(folder / "cache", layout.folder, "large")
    assert image.bytes >= 3000 << 20 and image.memory_mb == MEMORY_MIB
    task = folder / "tasks" / "large"
    for path, text in {
        "task.toml": 'version = "1.0"\n[environment]\ndocker_image = "large"\nworkdir = "/testbed"\n'
        f"memory_mb = {MEMORY_MIB}\n[agent]\ntimeout_sec = 1800.0\n[verifier]\ntimeout_sec = 900.0\n",
        "instruction.md": "Clean the repository up.",
        "solution/solve.sh": SOLUTION,
        "tests/test.sh": VERIFIER,
    }.items():
        (task / path).parent.mkdir(parents=True, exist_ok=True)
        (task / path).write_text(text)
    headrace(folder, "tasks", "import", "harbor", str(task.parent), "--name", "large", "--tools", "terminal")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("backend", ["container", "qemu"])
@pytest.mark.parametrize(("policy", "passed"), [("oracle", 1), ("idle", 0)])
def test_every_kind_of_change_reaches_the_judge(place: Path, policy: str, passed: int, backend: str) -> None:
    if backend == "container" and (why := unavailable()):
        pytest.skip(f"no containers here: {why}")
    settings = {"environment.backend": backend, "run.min_free_mb": 64, "limits.wall_s": 1800}
    limits = {"limits.max_tokens": 40_000, "limits.context_tokens": 40_000}
    lines = headrace(place, "eval", "--policy", f"scripted:{policy}", "--suite", "large", **settings, **limits)
    told = json.loads(lines.splitlines()[-1])
    assert (told["tasks"], told["passed"], told["infra_failures"]) == (1, passed, 0), told
