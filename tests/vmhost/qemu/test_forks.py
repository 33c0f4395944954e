"""A running sandbox is forked, kept as a blob and restored: files, processes and memory as they were, identity new."""

import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headrace.config import Environment
from headrace.messages.sandbox import Acquire, Exec, GroupKey, NoCapacity, ReadFile, SandboxLost, WriteFiles
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.node.host import Host, VmSandbox
from headrace.vmhost.qemu import snapshot
from headrace.vmhost.qemu.clone import Clone
from tests.support.hosts import backend
from tests.support.paths import ROOT

pytestmark = [pytest.mark.anyio, pytest.mark.vm]

CACHE = str(ROOT / ".cache" / "headrace")
COUNTER = "n=0; while :; do n=$((n+1)); echo $n > count; sleep 0.2; done"


def ask(group: str, slot: int = 0, **changes: Any) -> Acquire:
    fields: dict[str, Any] = {"run": "r", "lane": "train", "role": "rollout", "attempt": 0, "isolation": "episode"}
    return Acquire(group=group, slot=slot, **(fields | changes))


@pytest.fixture(scope="module")
async def host() -> AsyncIterator[Host]:
    opened = await Host.open(Environment(backend="qemu", cache_dir=CACHE, max_vms=6, warm=0))
    yield opened
    await opened.close()


@pytest.fixture
async def sandbox(host: Host) -> AsyncIterator[VmSandbox]:
    """One that counts in the background."""
    taken = await host.acquire(ask(secrets.token_hex(4), files={"a.txt": b"one\n"}))
    started = await taken.call(Exec(argv=("sh", "-c", f"({COUNTER}) > /dev/null 2>&1 & echo $!")))
    await taken.call(WriteFiles(files={"pid": started.stdout.strip().encode()}))
    yield taken
    host.release(taken.id)


async def text(sandbox: VmSandbox, script: str) -> str:
    return (await sandbox.call(Exec(argv=("sh", "-c", script)))).stdout.strip()


async def goes_on(sandbox: VmSandbox) -> bool:
    """Whether the counter of the parent counts here."""
    wait = 'c=$(cat count); for i in $(seq 100); do sleep 0.1; test "$(cat count)" != "$c" && exit 0; done; exit 1'
    return (await sandbox.call(Exec(argv=("sh", "-c", wait)))).ok


async def test_a_fork_goes_on_where_its_parent_was(host: Host, sandbox: VmSandbox) -> None:
    await sandbox.call(WriteFiles(files={"a.txt": b"two\n", "deep/b": b"b"}))
    children = await host.fork(sandbox.id, [ask("fork", slot) for slot in range(2)])
    family = [sandbox, *children]
    pid = await text(sandbox, "cat pid")
    for one in family:
        assert await text(one, "cat a.txt deep/b; kill -0 $(cat pid) && echo lives") == "two\nblives"
        assert await text(one, "cat pid") == pid and await goes_on(one)
    draws = {await text(one, "head -c 16 /dev/urandom | od -An -tx1") for one in family}
    assert len(draws) == 3, "a fork must not draw what its parent draws"
    await children[0].call(WriteFiles(files={"a.txt": b"mine"}))
    assert (await children[1].call(ReadFile(path="a.txt"))).data == b"two\n"
    assert (await sandbox.call(ReadFile(path="a.txt"))).data == b"two\n"
    grandchild = (await host.fork(children[0].id, [ask("fork", 9)]))[0]
    assert (await grandchild.call(ReadFile(path="a.txt"))).data == b"mine" and await goes_on(grandchild)
    for one in (*children, grandchild):
        machine = host._sandboxes[one.id][1].machine
        assert isinstance(machine, Clone) and machine.private_mb() < 128, "a fork shares its template's memory"
        host.release(one.id)


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])  # all of its memory: 10 CPU-s
async def test_a_sandbox_comes_back_from_a_blob(host: Host, sandbox: VmSandbox, whole: bool) -> None:
    await sandbox.call(WriteFiles(files={"a.txt": b"kept"}))
    blob = await host.checkpoint(sandbox.id, whole=whole)
    assert not whole or len(await host.checkpoint(sandbox.id)) < len(blob) / 4
    await sandbox.call(WriteFiles(files={"a.txt": b"later"}))
    back = await host.restore(blob, ask("restored"))
    assert (await back.call(ReadFile(path="a.txt"))).data == b"kept" and await goes_on(back)
    host.release(back.id)


@pytest.mark.slow
async def test_a_whole_checkpoint_fits_another_nodes_template(host: Host, sandbox: VmSandbox) -> None:
    """The template of the other node has other bytes: here, those of this one with pages changed behind its back."""
    checkpoint = snapshot.unpack(await host.checkpoint(sandbox.id, whole=True))
    template = await backend(host).template("light")
    changed = Path(CACHE).parent / f"making-{secrets.token_hex(4)}"
    try:
        changed.write_bytes(template.ram.read_bytes())
        with changed.open("r+b") as ram:
            ram.seek(snapshot.PAGE * 7)
            ram.write(b"other" * 3000)
        plain, other = snapshot.rebase(checkpoint.snapshot, template.ram), snapshot.rebase(checkpoint.snapshot, changed)
        assert len(plain.numbers) < len(checkpoint.snapshot.numbers) / 4 and len(other.numbers) > len(plain.numbers)
        for base, delta in ((template.ram, plain), (changed, other)):
            laid = bytearray(base.read_bytes())
            for at in range(len(delta.numbers) // 4):
                page = int.from_bytes(delta.numbers[4 * at : 4 * at + 4], "little") * snapshot.PAGE
                laid[page : page + snapshot.PAGE] = delta.pages[at * snapshot.PAGE : (at + 1) * snapshot.PAGE]
            full = bytearray(len(laid))
            for at in range(len(checkpoint.snapshot.numbers) // 4):
                page = int.from_bytes(checkpoint.snapshot.numbers[4 * at : 4 * at + 4], "little") * snapshot.PAGE
                full[page : page + snapshot.PAGE] = checkpoint.snapshot.pages[
                    at * snapshot.PAGE : (at + 1) * snapshot.PAGE
                ]
            assert laid == full
    finally:
        changed.unlink()


async def test_what_cannot_be_forked_says_why(host: Host, sandbox: VmSandbox) -> None:
    shared = [await host.acquire(ask("shared", slot, isolation="group")) for slot in range(2)]
    with pytest.raises(VmhostError, match="isolation = episode"):
        await host.fork(shared[0].id, [ask("x")])
    for one in shared:
        host.release(one.id)
    host.release_group(GroupKey("r", "train", "rollout", "shared"))
    with pytest.raises(SandboxLost, match="no such sandbox"):
        await host.fork("nobody", [ask("x")])
    with pytest.raises(VmhostError, match="new and unique"):
        await host.fork(sandbox.id, [ask("x"), ask("x")])
    vms = host.usage()["vms"]
    with pytest.raises(NoCapacity):
        await host.fork(sandbox.id, [ask("many", slot) for slot in range(8)])
    assert host.usage()["vms"] == vms
    blob = await host.checkpoint(sandbox.id)
    for damage, sentence in (
        (blob[:-7], "damaged"),
        (b"nonsense", "damaged"),
        (blob[:99] + bytes((blob[99] ^ 1,)) + blob[100:], "damaged"),
    ):
        with pytest.raises(VmhostError, match=sentence):
            await host.restore(damage, ask("y"))
    other = snapshot.unpack(blob)
    forged = snapshot.Checkpoint(
        template="light", key=other.key, ram_hash="0", slot=0, whole=False, snapshot=other.snapshot
    )
    with pytest.raises(VmhostError, match="needs a whole checkpoint"):
        await host.restore(snapshot.pack(forged), ask("y"))
    assert (await sandbox.call(ReadFile(path="a.txt"))).ok and await goes_on(sandbox)


async def test_the_process_backend_says_that_it_cannot() -> None:
    host = await Host.open(Environment(backend="process"))
    try:
        taken = await host.acquire(ask("p"))
        with pytest.raises(VmhostError, match="lacks the capability"):
            await host.fork(taken.id, [ask("q")])
    finally:
        await host.close()
