"""A task in an image, of several roots, for harnesses: a shell script must add."""

import os
import subprocess
from pathlib import Path

from headrace.messages.tasks import Oracle, Task, TaskRef, TestPlan
from headrace.vmhost.images import imported, packages
from headrace.vmhost.qemu import probe
from tests.support.archives import Members, docker_save, file, folder, link
from tests.support.client_engine import Said
from tests.support.folder_suites import write_suite
from tests.support.paths import ROOT

CACHE = ROOT / ".cache" / "headrace"
SUITE = "roots"
FIX = "echo 'echo $(($1 + $2))' > add.sh"
TURNS: list[Said] = [("I fix it.", [("bash", {"command": FIX})]), ("Fixed.", [])]


def debian() -> Members:
    """This machine's shells, with their loader and libraries, and the libraries that most programs need."""
    programs = [os.path.realpath(path) for path in ("/bin/sh", "/bin/bash", "/bin/cat", "/bin/ls", "/usr/bin/env")]
    usual = [f"/lib/x86_64-linux-gnu/{name}" for name in ("libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1")]
    told = subprocess.run(("ldd", *programs, *usual), check=True, capture_output=True, text=True).stdout
    libraries = {word for word in told.split() if word.startswith("/") and ".so" in word and not word.endswith(":")}
    members = [file(path[1:], Path(path).resolve().read_bytes(), mode=0o755) for path in sorted(libraries | {*usual})]
    for path in programs:
        members.append(file(f"bin/{Path(path).name}", Path(path).read_bytes(), mode=0o755))
    return [*members, link("bin/sh", "dash")]


def busybox() -> Members:
    """A static shell, and no C library."""
    return [file("bin/busybox", probe._busybox(packages.folder(CACHE)), mode=0o755), link("bin/sh", "busybox")]


def distroless() -> Members:
    return [file("bin/none", b"")]


ROOTS = {"debian": debian, "busybox": busybox, "distroless": distroless}


def image_task(root: str, tmp_path: Path) -> None:
    """Store the image, and write the suite `SUITE` with the task 1."""
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
    imported.take(
        CACHE, docker_save(tmp_path / "i.tar", [members], [name], User="dev", WorkingDir="/testbed"), f"root-{root}"
    )
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
