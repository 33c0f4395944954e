"""A policy trains on a suite of small images: imported, issued, judged, and every attempt accounted for."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.vmhost.images import packages
from headrace.vmhost.qemu import probe
from tests.launch.test_up import FEW, command, headrace, up
from tests.support.archives import Members, docker_save, file, folder, link
from tests.support.hosts import CACHE

pytestmark = [pytest.mark.anyio, pytest.mark.vm, pytest.mark.slow, pytest.mark.timeout(3600)]
NAMES, OPERATORS = ("first", "second"), ("+", "*", "%")
STEPS, ATTEMPTS = 3, 2 * 4


def make_image(place: Path, name: str) -> Path:
    """busybox, and a repository of three scripts, each with a bug."""
    owner = {"uid": 1000, "gid": 100}
    layer: Members = [
        folder("bin"),
        file("bin/busybox", probe._busybox(packages.folder(Path(CACHE))), mode=0o755),
        *(link(f"bin/{program}", "busybox") for program in ("sh", "cat", "ls", "mkdir", "test")),
        file("etc/passwd", b"dev:x:1000:100::/home/dev:/bin/sh\n"),
        folder("testbed", **owner),
        *(file(f"testbed/op{n}.sh", b"echo $(($1 - $2))\n", **owner) for n in range(len(OPERATORS))),
        file("testbed/about", name.encode(), **owner),
    ]
    return docker_save(place / f"{name}.tar", [layer], [f"{name}:1"], User="dev", WorkingDir="/testbed")


def rows() -> list[dict[str, Any]]:
    return [
        {
            "id": f"{name}-{number}",
            "prompt": f"op{number}.sh should print its first argument {operator} its second",
            "image": f"scripts-{name}",
            "repository": "/testbed",
            "test_command": "sh ./hidden.sh",
            "hidden": {"hidden.sh": f'test "$(sh ./op{number}.sh 7 3)" = "$((7 {operator} 3))"\n'},
            "allowed": ["*.sh"],
            "solution": {f"op{number}.sh": f"echo $(($1 {operator} $2))\n"},
        }
        for name in NAMES
        for number, operator in enumerate(OPERATORS)
    ]


async def test_a_policy_trains_on_images(tmp_path: Path) -> None:
    suites = {"tasks.dir": str(tmp_path / "suites"), "environment.cache_dir": str(CACHE)}
    settings = [word for key, value in suites.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    for name in NAMES:
        saved = make_image(tmp_path, name)
        code, _ = run(tmp_path, "images", str(saved), "--name", f"scripts-{name}", *settings)
        assert code == 0
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    code, told = run(tmp_path, "tasks", "import", "jsonl", "rows.jsonl", "--name", "scripts", *settings)
    assert code == 0 and "6 tasks (6 new), 0 refused" in told

    changes: dict[str, Any] = suites | {
        "environment.backend": "qemu",
        "environment.max_vms": 6,
        "environment.warm": 0,
        "tasks.suite": "scripts",
        "tasks.uncertified": True,  # tests/judging/test_certifying.py certifies tasks with an image
        "curriculum.steps": STEPS,
        "limits.wall_s": 1200.0,
    }
    async with up(tmp_path, **FEW, **changes) as started:
        code, said = await started.end(3000.0)
        assert code == 0, said
    code, audit = headrace(tmp_path, "audit", "latest")
    assert code == 0 and audit["trained"] >= STEPS * ATTEMPTS and not audit["in_flight"], audit


def run(place: Path, *words: str) -> tuple[int, str]:
    """A command's exit code and its output."""
    done = command(place, *words)
    return done.returncode, done.stdout + done.stderr
