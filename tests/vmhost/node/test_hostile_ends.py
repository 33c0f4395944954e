"""End states of a sandbox are outcomes of its attempt: its changes are read, or known to be unreadable, and it is never
lost."""

import asyncio
import json
import os
import subprocess
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.config import Environment
from headrace.messages.sandbox import Acquire, Exec, GroupKey, SandboxLost
from headrace.messages.tasks import Task
from headrace.tasks import open_suite
from headrace.tasks.diff import pull
from headrace.vmhost.backends.container.backend import unavailable
from headrace.vmhost.guest import walks
from headrace.vmhost.images import base, imported, packages
from headrace.vmhost.node.host import Host
from headrace.vmhost.qemu.clone import Clone
from tests.support.hostile_ends import FOLDER, MACHINE, program, python_image, states
from tests.support.hosts import CACHE

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(7200)]
SLOTS = 8
ACT_S = 20.0


def plain_task() -> Task:
    suite = open_suite("generated/train")
    return suite.task(suite.ids()[0])


def image_task(image: str) -> Task:
    return msgspec.structs.replace(plain_task(), image=image, repository="/work", allowed=("**",))


@asynccontextmanager
async def hosted(backend: str, place: Path, user: str) -> AsyncIterator[tuple[Host, Task]]:
    """A host, and a task whose sandboxes it makes. user: of the programs of an image; none: the task has no image."""
    environment = Environment(backend=backend, cache_dir=CACHE, warm=0, judge_share=0, production_share=0, max_busy=100)
    task = plain_task()
    if user:
        await asyncio.to_thread(base.ensure, environment)
        name = f"hostile-{user}"
        folder = packages.folder(Path(CACHE))
        image = await asyncio.to_thread(python_image, folder, place, name, "" if user == "root" else user)
        await asyncio.to_thread(imported.take, Path(CACHE), image, name)
        task = image_task(name)
    host = await Host.open(environment)
    try:
        yield host, task
    finally:
        await host.close()


async def ends(host: Host, task: Task, chosen: list[tuple[str, str]]) -> Counter[str]:
    """Act, read the changes, release, once for every state. The counts of how the attempts ended."""
    counts: Counter[str] = Counter()
    for number, (name, code) in enumerate(chosen):
        group = f"h{number // SLOTS}"
        fields: dict[str, Any] = {"run": "r", "lane": "train", "role": "rollout", "attempt": 0, "isolation": "group"}
        files = {"f.txt": b"1\n"} if task.image else task.files
        machine: dict[str, Any] = {"template": task.machine, "workdir": task.repository, "files": files}
        request = Acquire(group=group, slot=number % SLOTS, **fields, **machine)
        try:
            sandbox = await host.acquire(request)
            done = await sandbox.call(Exec(argv=("/usr/bin/python3", "-c", code), timeout_s=ACT_S), "act")
            pulled = await pull(sandbox, task, "end")
        except SandboxLost as lost:
            counts[f"lost: {name}: {lost}"] += 1
            continue
        how = "ended" if done.ended or sandbox.own_end else "over" if pulled.over else "read"
        counts[how] += 1
        print(json.dumps([name, how, done.error[:80], done.stdout[-200:]]))
        host.release(sandbox.id)
        if number % SLOTS == SLOTS - 1 or number == len(chosen) - 1:
            host.release_group(GroupKey("r", "train", "rollout", group))
    await host.settle()
    return counts


BACKENDS = [
    pytest.param("process", "", id="process"),
    pytest.param("container", "dev", id="container", marks=pytest.mark.vm),
    pytest.param("container", "root", id="container-root", marks=pytest.mark.vm),
    pytest.param("qemu", "", id="qemu", marks=pytest.mark.vm),
    pytest.param("qemu", "root", id="qemu-image-root", marks=pytest.mark.vm),
]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "user"), BACKENDS)
async def test_five_hundred_hostile_ends_are_outcomes(backend: str, user: str, tmp_path: Path) -> None:
    if backend == "container" and (why := unavailable()):
        pytest.skip(f"no containers here: {why}")
    async with hosted(backend, tmp_path, user) as (host, task):
        counts = await ends(host, task, list(states(500, backend != "process")))
    print(json.dumps({"backend": backend, "user": user} | counts))
    assert counts["read"] + counts["over"] + counts["ended"] == 500, counts


SAMPLE = (
    *("sparse files", "many long names", "a deep tree", "a path over PATH_MAX", "a lease", "a closed workspace"),
    *("a folder that becomes a link", "names of control characters", "a killed agent", "no workspace"),
)
IN_A_MACHINE = ("sparse files", "full everywhere", "a closed workspace")


@pytest.mark.parametrize(("backend", "user"), BACKENDS[:2] + BACKENDS[3:4])
async def test_hostile_ends_are_outcomes(backend: str, user: str, tmp_path: Path) -> None:
    if backend == "container" and (why := unavailable()):
        pytest.skip(f"no containers here: {why}")
    names = SAMPLE if backend == "process" else IN_A_MACHINE
    async with hosted(backend, tmp_path, user) as (host, task):
        counts = await ends(host, task, [(name, program((FOLDER | MACHINE)[name])) for name in names])
    assert counts["read"] + counts["over"] + counts["ended"] == len(names), counts
    assert counts["ended"] == (backend == "process")


async def test_a_killed_agent_ends_the_sandbox_and_nothing_of_it_stays(tmp_path: Path) -> None:
    """Its programs would run on, and its folder stay, if the host did not end what the agent cannot end any more."""
    stays = program(FOLDER["a writer"], FOLDER["an immutable file"], FOLDER["a mount"], FOLDER["a killed agent"])
    async with hosted("process", tmp_path, "") as (host, task):
        fields: dict[str, Any] = {"run": "r", "lane": "train", "role": "rollout", "group": "g", "slot": 0, "attempt": 0}
        request = Acquire(isolation="group", files=task.files, **fields)
        sandbox = await host.acquire(request)
        folder = (await sandbox.call(Exec(argv=("pwd",)), "first")).stdout.strip()
        assert (await sandbox.call(Exec(argv=("python3", "-c", stays)))).ended
        assert (await sandbox.call(Exec(argv=("pwd",)), "first")).stdout.strip() == folder, "the recorded answer stays"
        assert (await sandbox.call(Exec(argv=("true",)))).ended and await host.acquire(request) is sandbox
        assert (await pull(sandbox, task, "end")).over
        host.release(sandbox.id)
        await host.settle()
        assert not Path(folder).exists() and folder not in Path("/proc/self/mountinfo").read_text()
        left = [path for path in Path("/proc").glob("[0-9]*/cwd") if _names(path, folder)]
        assert left == []
        assert (await host.acquire(msgspec.structs.replace(request, attempt=1))).id != sandbox.id


def _names(link: Path, folder: str) -> bool:
    try:
        return str(link.readlink()).startswith(folder)
    except OSError:
        return False


def test_a_folder_is_removed_without_what_is_mounted_or_linked_there(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting takes root")
    mounted, root, here = tmp_path / "mounted", tmp_path / "root", Path.cwd()
    for place in (mounted, root, root / "bound"):
        place.mkdir()
    (mounted / "file").write_text("1")
    (root / "link").symlink_to(mounted)
    os.chdir(root)
    for _ in range(1500):
        os.mkdir("d")
        os.chdir("d")
    os.chdir(here)
    subprocess.run(["mount", "--bind", str(mounted), str(root / "bound")], check=True)
    walks.remove(str(root))
    assert [path.name for path in tmp_path.iterdir()] == ["mounted"] and (mounted / "file").exists()


@pytest.mark.vm
async def test_a_guest_that_ends_its_machine_is_blamed_only_when_it_was_alone(tmp_path: Path) -> None:
    async with hosted("qemu", tmp_path, "") as (host, _):
        fields: dict[str, Any] = {"run": "r", "lane": "train", "role": "rollout", "attempt": 0, "isolation": "group"}
        alone = await host.acquire(Acquire(group="alone", slot=0, **fields))
        both = [await host.acquire(Acquire(group="both", slot=slot, **fields)) for slot in range(2)]
        for sandbox in (alone, both[0]):
            machine = host.machine(sandbox.id)
            assert isinstance(machine, Clone) and machine._control is not None and machine._control._transport
            machine._control._transport.write(b"\xff" * 64)  # the first process ends, and the kernel with it
            await machine.gone
        assert (await alone.call(Exec(argv=("true",)))).ended
        for sandbox in both:
            with pytest.raises(SandboxLost):
                await sandbox.call(Exec(argv=("true",)))
