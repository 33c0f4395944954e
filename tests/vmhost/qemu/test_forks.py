"""A running sandbox is forked: files, processes and memory as they were, identity new."""

import secrets
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headrace.config import Environment
from headrace.messages.sandbox import Acquire, Exec, GroupKey, NoCapacity, ReadFile, SandboxLost, WriteFiles
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.node.host import Host, VmSandbox
from headrace.vmhost.qemu.clone import Clone
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
    assert (await sandbox.call(ReadFile(path="a.txt"))).ok and await goes_on(sandbox)


async def test_the_process_backend_says_that_it_cannot() -> None:
    host = await Host.open(Environment(backend="process"))
    try:
        taken = await host.acquire(ask("p"))
        with pytest.raises(VmhostError, match="lacks the capability"):
            await host.fork(taken.id, [ask("q")])
    finally:
        await host.close()
