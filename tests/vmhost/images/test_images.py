"""Imported images in real machines: their user, folder, environment and files, and templates by their parts."""

import fcntl
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from headrace.config import Environment
from headrace.messages.sandbox import (
    Acquire,
    CheckIntegrity,
    Exec,
    ListFiles,
    OpResult,
    PullTar,
    ReadFile,
    RunTests,
    SandboxLost,
    WriteFiles,
)
from headrace.messages.tasks import SandboxLimits, TestPlan
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.images import base, imported, packages
from headrace.vmhost.node.host import Host, VmSandbox
from headrace.vmhost.qemu import probe, process
from headrace.vmhost.templates import cache_gc, classes
from tests.support.archives import Layout, Members, file, folder, link
from tests.support.hosts import backend
from tests.support.paths import ROOT

pytestmark = [pytest.mark.anyio, pytest.mark.vm, pytest.mark.timeout(600)]

CACHE = ROOT / ".cache" / "headrace"
FRAIL = SandboxLimits(memory_mib=256)
"""A class of machines whose template no other test uses."""


@pytest.fixture(scope="module")
def cache() -> Path:
    """A cache of the tests' own that borrows the base image; what is made in it is found again by its contents."""
    base.ensure(Environment(cache_dir=str(CACHE)))
    image_cache = CACHE.parent / "headrace-tests"
    image_cache.mkdir(exist_ok=True)
    for source in (*CACHE.glob("base-*"), CACHE / "probe.json"):
        (image_cache / source.name).unlink(missing_ok=True)
        (image_cache / source.name).symlink_to(source)
    return image_cache


def environment(cache: Path, **changes: object) -> Environment:
    return Environment(backend="qemu", cache_dir=str(cache), slots_per_vm=2, warm=0, **changes)  # type: ignore[arg-type]


def ask(name: str, group: str, slot: int = 0, **changes: object) -> Acquire:
    fields: dict[str, object] = {"run": "r", "lane": "train", "role": "rollout", "attempt": 0, "isolation": "group"}
    return Acquire(group=group, slot=slot, template=name, **(fields | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def busybox(cache: Path) -> str:
    binary = probe._busybox(packages.folder(cache))
    names = ("sh", "id", "cat", "ls", "pwd", "env", "ln", "touch", "sleep", "chown", "mount", "stat", "rm", "mkfifo")
    below: Members = [
        folder("bin"),
        file("bin/busybox", binary, mode=0o755),
        *(link(f"bin/{name}", "busybox") for name in names),
        file("etc/passwd", b"root:x:0:0::/root:/bin/sh\ndev:x:1000:100::/home/dev:/bin/sh\n"),
        file("etc/group", b"users:x:100:\nwheel:x:10:dev\n"),
        file("etc/shadow", b"secret", mode=0o600),
        folder("srv/app", uid=1000, gid=100),
        folder("home/dev", uid=1000, gid=100),
        file("srv/app/gone"),
    ]
    above: Members = [file("srv/app/.wh.gone"), file("srv/app/main.txt", b"main\n", mode=0o640, uid=1000, gid=100)]
    layout = Layout()
    layout.image([below, above], "box:1", "zstd", User="dev", WorkingDir="/srv/app", Env=["GREETING=hello world"])
    path = layout.tar(cache / "making-box.tar")
    imported.take(cache, path, "box")
    path.unlink()
    return "box"


@pytest.fixture(scope="module")
async def host(cache: Path) -> AsyncIterator[Host]:
    opened = await Host.open(environment(cache))
    yield opened
    await opened.close()


async def sh(sandbox: VmSandbox, script: str, user: str = "") -> OpResult:
    return await sandbox.call(Exec(argv=("sh", "-c", script), user=user, timeout_s=20.0))


async def test_an_image_runs_as_its_configuration_says(host: Host, busybox: str) -> None:
    box = await host.acquire(ask(busybox, "box"))
    told = await sh(
        box, "id -u; id -G; pwd; echo $GREETING $HOME; cat main.txt; ls; cat /proc/1/root/etc/passwd | head -c 4"
    )
    assert told.stdout.splitlines()[:6] == ["1000", "100 10", "/srv/app", "hello world /home/dev", "main", "main.txt"]
    assert (await box.call(WriteFiles(files={"new/x": b"1"}))).ok
    assert (await sh(box, "stat -c '%u %a' new/x; echo 2 > new/x; cat new/x")).stdout == "1000 644\n2\n"
    for attack in (
        "cat /etc/shadow",
        "echo x > /etc/passwd",
        "ls /opt/headrace",
        "ls /dev/vport0p0",
        "mount -t tmpfs x /srv",
    ):
        assert not (await sh(box, attack)).ok, attack
    root = await sh(
        box,
        "id -u; cat /etc/shadow; echo; echo 1 > /proc/sys/kernel/sysrq || echo no; mount -t proc x /srv || echo no",
        "root",
    )
    assert root.stdout.split() == ["0", "secret", "no", "no"]
    assert "no user 'ghost'" in (await sh(box, "true", "ghost")).error
    assert "no user '²'" in (await sh(box, "true", "²")).error
    assert "is not the number of a user" in (await sh(box, "true", str((1 << 32) - 1))).error
    plan = TestPlan(kind="command", argv=("sh", "-c", "exit 3"))
    assert (await box.call(RunTests(plan=plan))).code == 3
    assert "by a command of its own" in (await box.call(RunTests(plan=TestPlan(paths=("t.py",))))).error
    pulled = await box.call(PullTar())
    assert b"main.txt" in pulled.data
    other = await host.acquire(ask(busybox, "box", 1, files={"pushed": b"yes"}))
    assert host.usage()["vms"] >= 2, "an imported image has its machine for itself"
    assert (await other.call(ReadFile(path="pushed"))).data == b"yes"
    assert (await other.call(ListFiles())).stdout.split() == ["main.txt", "pushed"]
    other = await host.acquire(ask(busybox, "elsewhere", files={"pushed": b"yes"}, workdir="/home/dev"))
    assert (await sh(other, "pwd; cat pushed")).stdout == "/home/dev\nyes"
    with pytest.raises(VmhostError, match="the image has no such folder"):
        await host.acquire(ask(busybox, "nowhere", workdir="/testbed"))
    with pytest.raises(VmhostError, match="light has one workspace"):
        await host.acquire(ask("light", "nowhere", workdir="/testbed"))
    for taken in (box, other):
        looked = await taken.call(CheckIntegrity(thorough=True))
        assert looked.ok and looked.tampered == ()
    assert (await sh(box, "rm /etc/passwd && mkfifo /etc/passwd", "root")).ok
    assert "no user 'dev'" in (await sh(box, "true", "dev")).error, "the agent does not wait for a writer"
    for taken in (box, other):
        host.release(taken.id)


async def test_what_a_template_is_made_of_decides_its_name(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = base.Parts(cache, next(cache.glob("base-*")), "7", "tcg", "microvm", print)
    keys = [
        base.plan(msgspec.structs.replace(environment(cache), **change), "light").key(parts)
        for change in ({}, {"memory_mb": 256}, {"slots_per_vm": 3})
    ]
    keys.append(base.plan(environment(cache), "light").key(parts._replace(version="8")))
    keys.append(base.plan(environment(cache), "debian").key(parts))
    assert base.plan(environment(cache), "light").key(parts) == keys[0]
    monkeypatch.setitem(process._ACCEL, "tcg", ("-accel", "tcg,tb-size=16", "-cpu", "max"))
    keys.append(base.plan(environment(cache), "light").key(parts))
    assert len({*keys}) == len(keys)


async def test_an_unknown_template_is_refused_and_costs_nothing(host: Host) -> None:
    vms = host.usage()["vms"]
    with pytest.raises((VmhostError, SandboxLost), match="no template 'nobody'"):
        await host.acquire(ask("nobody", "n"))
    assert host.usage()["vms"] == vms


async def test_what_nothing_refers_to_is_collected(host: Host, cache: Path, busybox: str) -> None:
    config = environment(cache)
    stale = cache / "template-light-0000000000000000"
    stale.mkdir(exist_ok=True)
    (stale / "manifest.json").write_text("{}")
    (cache / "making-dead").mkdir(exist_ok=True)
    held = {Path(holding.path).name: holding.why for holding in cache_gc.holdings(config)}
    assert held[stale.name] == held["making-dead"] == ""
    assert "a host has it open" in held.values()
    with pytest.raises(VmhostError, match="no image 'nobody'"):
        cache_gc.collect(config, ("nobody",))
    with stale.joinpath("manifest.json").open() as manifest:
        fcntl.flock(manifest, fcntl.LOCK_SH)
        cache_gc.collect(config)
        assert stale.exists(), "a template that a host has open stays"
    gone = {Path(holding.path).name for holding in cache_gc.collect(config)}
    assert stale.name in gone and not stale.exists() and not (cache / "making-dead").exists()
    assert imported.find(cache, busybox) is not None
    held_names = {Path(holding.path).name for holding in cache_gc.holdings(config)}
    assert any(name.startswith("template-light-") for name in held_names)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["truncated", "changed", "gone"])
async def test_a_template_damaged_under_a_living_host_is_made_again(cache: Path, damage: str) -> None:
    said: list[str] = []
    host = await Host.open(environment(cache), on_event=lambda kind, text, data: said.append(text))
    try:
        first = await host.acquire(ask("light", "one", limits=FRAIL, files={"a": b"one"}))
        assert (await first.call(ReadFile(path="a"))).data == b"one"
        host.release(first.id)
        await host.settle()
        folder = (await backend(host).template(classes.named("light", FRAIL))).folder
        ram = folder / "ram"
        ram.chmod(0o644)
        if damage == "gone":
            ram.unlink()
        else:
            with ram.open("r+b") as file:
                file.truncate(1 << 20) if damage == "truncated" else file.write(b"changed" * 5000)
        second = await host.acquire(ask("light", "two", limits=FRAIL, files={"a": b"two"}))
        assert (await second.call(ReadFile(path="a"))).data == b"two"
        assert any("were changed; it is checked again" in text for text in said) and any(
            "made again" in text for text in said
        )
    finally:
        await host.close()
