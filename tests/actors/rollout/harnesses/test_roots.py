"""One bundle in a root of Debian, of busybox alone, and without any program: it needs nothing of them."""

import os
import subprocess
from pathlib import Path

import pytest

from headrace.harnesses import bundles
from headrace.messages.rollout import Trajectory
from headrace.messages.tasks import Oracle, Task, TaskRef, TestPlan
from headrace.vmhost.backends.container.backend import unavailable
from headrace.vmhost.images import imported, packages
from headrace.vmhost.qemu import probe
from tests.conftest import Connect
from tests.support import small_harness
from tests.support.archives import Members, docker_save, file, folder, link
from tests.support.client_engine import Said
from tests.support.folder_suites import write_suite
from tests.support.harness_run import harness_run
from tests.support.paths import ROOT

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(600)]

CACHE = ROOT / ".cache" / "headrace"
SUITE = "roots"
TURNS: list[Said] = [("I fix it.", [("bash", {"command": "echo 'echo $(($1 + $2))' > add.sh"})]), ("Fixed.", [])]


def debian() -> Members:
    """This machine's shell, with its loader and libraries."""
    shell = os.path.realpath("/bin/sh")
    told = subprocess.run(("ldd", shell), check=True, capture_output=True, text=True).stdout
    libraries = [word for word in told.split() if word.startswith("/")]
    members = [file("bin/sh", Path(shell).read_bytes(), mode=0o755)]
    return members + [file(path[1:], Path(path).resolve().read_bytes(), mode=0o755) for path in libraries]


def busybox() -> Members:
    """A static shell, and no library of any C library."""
    return [file("bin/busybox", probe._busybox(packages.folder(CACHE)), mode=0o755), link("bin/sh", "busybox")]


def distroless() -> Members:
    return [file("bin/none", b"")]


ROOTS = {"debian": debian, "busybox": busybox, "distroless": distroless}
BACKENDS = [
    pytest.param("container", marks=pytest.mark.skipif(bool(unavailable()), reason="no containers here")),
    pytest.param("qemu", marks=pytest.mark.vm),
]


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_bundle_runs_in_any_root(connect: Connect, tmp_path: Path, root: str, backend: str) -> None:
    owner = {"uid": 1000, "gid": 100}
    members: Members = [
        folder("bin"),
        *ROOTS[root](),
        folder("opt"),
        file("etc/passwd", b"dev:x:1000:100::/home/dev:/bin/sh\n"),
        folder("testbed", **owner),
        file("testbed/add.sh", b"echo $(($1 - $2))\n", **owner),
    ]
    name = f"registry.example/{root}:1"
    imported.take(CACHE, docker_save(tmp_path / "i.tar", [members], [name], User="dev", WorkingDir="/testbed"), f"root-{root}")
    ref = TaskRef(SUITE, "1")
    plan = TestPlan(kind="command", argv=("sh", "hidden.sh"), timeout_s=60.0)
    task = Task(
        ref=ref,
        family="image",
        prompt="add.sh should add",
        files={},
        allowed=("*.sh",),
        tests=plan,
        image=name,
        repository="/testbed",
    )
    hidden = {"hidden.sh": b'test "$(sh ./add.sh 1 2)" = 3\n'}
    oracle = Oracle(ref=ref, hidden=hidden, tests=plan, expected=("command",), solution={})
    write_suite(SUITE, tmp_path / "suites" / SUITE, [(task, oracle)], "made by a test")
    own = small_harness.with_interpreter()
    bundles.make(CACHE, own)
    run = f"r-{root}-{backend}"
    async with harness_run(connect, tmp_path, run, "small", TURNS, own=own, backend=backend) as there:
        made = await there.attempt(suite=SUITE, id="1", isolation="episode")
        assert isinstance(made, Trajectory), made
        assert made.outcome == "finished" and len(made.turns) == 2, made
        result = made.turns[0].results
        if root == "distroless":
            assert made.diff == {} and "/bin/sh" in result[0].output
        else:
            assert (await there.score()).verdict == "passed" and made.touched == ()
