"""Harbor tasks in images whose programs run as a user that may not write to the root."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.config import Environment
from headrace.judging import HostMachines
from headrace.judging.certifying import certify
from headrace.tasks.importing import harbor
from headrace.tasks.importing.base import ImportOptions
from headrace.tasks.importing.writing import import_suite
from headrace.tasks.suites import FolderSuite
from headrace.vmhost.backends.container.backend import unavailable
from headrace.vmhost.node.host import Host
from tests.support import rows
from tests.support.archives import file, folder
from tests.support.bases import built
from tests.support.playing import played, report
from tests.support.programs import programs

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.vm,
    pytest.mark.slow,
    pytest.mark.skipif(bool(unavailable()), reason=f"no containers here: {unavailable()}"),
]
TOML = """schema_version = "1.4"
{top}
[environment]
docker_image = "user:1"
[verifier]
{verifier}
[solution.env]
WORD = "42"
"""
SOLVE = """#!/bin/bash
set -eu
parts=($(/solution/bin/say) "$WORD")
printf %s "${parts[@]}" > answer.txt
pwd > where.txt
"""
TEST = """#!/bin/bash
[ "$(cat {0}answer.txt)" = four42 ] && [ "$(cat {0}where.txt)" = /srv/work ] && [ -x /tests/bin/check ] && r=1 || r=0
id -u > /logs/verifier/user
[ "$(cat /logs/verifier/user)" = 1000 ] || r=0
echo $r > /logs/verifier/reward.txt
"""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with an image whose work folder belongs to its user, and one for verifiers."""
    place = tmp_path_factory.mktemp("users")
    names = ("bash", "cat", "chmod", "cp", "find", "id", "mkdir", "rm", "sed", "base64", "dirname", "sha256sum")
    members = [*programs(*names), file("etc/passwd", b"dev:x:1000:100::/home/dev:/bin/sh\n")]
    members += [folder("srv"), folder("srv/work", uid=1000, gid=100)]
    for tag, workdir in (("user", "/srv/work"), ("judge", "/")):
        built(place / "cache", place / tag, tag, f"{tag}:1", members, "USER dev", f"WORKDIR {workdir}")
    return place / "cache"


@pytest.fixture
async def host(images: Path) -> AsyncIterator[Host]:
    opened = await Host.open(Environment(backend="container", cache_dir=str(images), max_vms=8))
    yield opened
    await opened.close()


def write(place: Path, test: str, top: str = "", verifier: str = "") -> None:
    program = "#!/bin/sh\n"
    files = {"tests/test.sh": test, "tests/bin/check": program, "solution/solve.sh": SOLVE}
    files |= {"solution/bin/say": f"{program}echo four\n", "instruction.md": "Write four42."}
    rows.write(place, files | {"task.toml": TOML.format(top=top, verifier=verifier)})
    for path in ("tests/bin/check", "solution/bin/say"):
        (place / path).chmod(0o755)


async def test_a_verifier_works_beside_any_user(host: Host, images: Path, tmp_path: Path) -> None:
    write(tmp_path / "tasks" / "shared", TEST.format(""))
    artifacts = 'artifacts = ["/srv/work/answer.txt", "/srv/work/where.txt"]'
    own = '[verifier.environment]\ndocker_image = "judge:1"\n'
    write(tmp_path / "tasks" / "own", TEST.format("/srv/work/"), artifacts, own)
    toml = tmp_path / "tasks" / "own" / "task.toml"
    toml.write_text(toml.read_text().replace('"user:1"\n', '"user:1"\nworkdir = "/srv/work"\n', 1))
    copied = tmp_path / "tasks" / "copied"
    write(
        copied, TEST.format("").replace("[ -x /tests", "[ -x tool ] && [ -x latest ] && [ ! -x plain ] && [ -x /tests")
    )
    toml = copied / "task.toml"
    toml.write_text(toml.read_text().replace('docker_image = "user:1"\n', ""))
    dockerfile = "FROM user:1\nWORKDIR /srv/work\nCOPY . ./\nRUN test -x latest\n"
    rows.write(
        copied, {"environment/Dockerfile": dockerfile, "environment/tool": "#!/bin/sh\n", "environment/plain": "x"}
    )
    (copied / "environment/tool").chmod(0o755)
    (copied / "environment/latest").symlink_to("tool")
    options = ImportOptions(suite="s", source=tmp_path / "tasks", environment=Environment(cache_dir=str(images)))
    told = await asyncio.to_thread(import_suite, "s", tmp_path / "s", "harbor", harbor.read(options))
    assert not told.refused
    suite = FolderSuite("s", tmp_path / "s")
    assert suite.task("shared").repository == ""
    for id in suite.ids():
        gold = await played(host, suite, id, "oracle")
        assert (gold.decision, gold.value) == ("passed", 1.0), (id, gold)
        assert (await played(host, suite, id, "idle")).decision == "failed", id
        made = await certify(suite, id, HostMachines(host), report, backend=host.backend)
        assert (made.gold_passed, made.noop, made.leaks) == (5, "failed", ()), made
