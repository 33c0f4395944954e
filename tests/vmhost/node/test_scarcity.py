"""A host without memory or disk, and a sandbox in a full file system, answer with one sentence and lose nothing."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.config import Environment
from headrace.messages.sandbox import Acquire, Exec, NoCapacity, WriteFiles
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.images import base
from headrace.vmhost.node.capacity import OVERHEAD_MB, RESERVE_MB
from headrace.vmhost.node.host import Host, VmSandbox
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.vm

CACHE = ROOT / ".cache" / "headrace"


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A cache on a disk of 8 MiB, which borrows what is made already."""
    base.ensure(Environment(cache_dir=str(CACHE)))
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "small", str(folder)], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        for source in (*CACHE.glob("base-*"), *CACHE.glob("template-light-*"), CACHE / "probe.json"):
            (folder / source.name).symlink_to(source)
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk takes a mount")
def test_a_template_on_a_full_disk_is_one_sentence(small: Path) -> None:
    before = {path.name for path in small.iterdir()} | {"lock", "locks"}
    with pytest.raises(VmhostError, match=r"the guest image can't be made in .*No space left on device"):
        base.ensure(Environment(cache_dir=str(small), slots_per_vm=5))
    assert {path.name for path in small.iterdir()} == before


WITHOUT = """
import asyncio, resource, sys
from headrace.config import Environment
from headrace.messages.sandbox import Acquire, SandboxLost
from headrace.vmhost.node.host import Host

async def main():
    host = await Host.open(Environment(backend="qemu", cache_dir=sys.argv[1], warm=0))
    resource.setrlimit(resource.RLIMIT_AS, (300 << 20, -1))
    who = dict(run="r", lane="train", role="rollout", group="g", attempt=0, isolation="episode")
    for limit in (300 << 20, -1):
        resource.setrlimit(resource.RLIMIT_AS, (limit, -1))
        try:
            sandbox = await host.acquire(Acquire(slot=limit & 1, **who))
            print("made")
        except SandboxLost as lost:
            print(lost)
    await host.close()

asyncio.run(main())
"""


def test_a_machine_that_gets_no_memory_says_so_and_the_next_may() -> None:
    """A QEMU needs 256 MiB for its guest and some 150 for itself: it started in 400 MiB of addresses at times."""
    done = subprocess.run([sys.executable, "-c", WITHOUT, str(CACHE)], cwd=ROOT, capture_output=True, text=True)
    refused, made = done.stdout.splitlines()
    assert "QEMU" in refused and "allocate" in refused and made == "made", (done.stdout, done.stderr)


def test_a_burst_gets_what_fits_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """All memory is requested before the first machine has used any."""
    monkeypatch.setattr("headrace.vmhost.node.capacity.free_mb", lambda: RESERVE_MB + 2.5 * (224 + OVERHEAD_MB))

    async def body() -> None:
        host = await Host.open(Environment(backend="qemu", cache_dir=str(CACHE), warm=0, max_vms=40, memory_mb=224))
        try:
            who: dict[str, Any] = {"run": "r", "lane": "train", "role": "rollout", "attempt": 0, "isolation": "episode"}
            asked = [Acquire(group="burst", slot=slot, **who) for slot in range(30)]
            got = await asyncio.gather(*map(host.acquire, asked), return_exceptions=True)
            assert [type(outcome) for outcome in got] == [VmSandbox] * 2 + [NoCapacity] * 28
        finally:
            await host.close()

    asyncio.run(body())


async def text(sandbox: VmSandbox, script: str) -> str:
    done = await sandbox.call(Exec(argv=("sh", "-c", f"({script}) 2>&1"), timeout_s=PATIENCE_S))
    return done.stdout.strip()


def test_a_sandbox_that_writes_without_end_fills_what_is_its_own() -> None:
    """Files are in memory: a full sandbox must not use the memory that its siblings need."""

    async def body() -> None:
        host = await Host.open(Environment(backend="qemu", cache_dir=str(CACHE), warm=0))
        try:
            who: dict[str, Any] = {"run": "r", "lane": "train", "role": "rollout", "group": "full", "attempt": 0}
            asked = [Acquire(slot=slot, isolation="group", files={"a": b"1"}, **who) for slot in range(2)]
            one, two = [await host.acquire(request) for request in asked]
            for place in ("/workspace", "/tmp"):
                assert "No space left on device" in await text(one, f"cat /dev/zero > {place}/big")
            # Full file systems leave memory for a command, in every template.
            some = "/dev/shm/some"
            assert await text(one, f"cat a; head -c 3000000 /dev/zero > {some} && rm {some}; ls /tmp") == "1big"
            assert "No space left" in (await one.call(WriteFiles(files={"more": bytes(5000)}))).error
            assert (await one.call(WriteFiles(files={}, delete=("big",)))).ok
            assert (await one.call(WriteFiles(files={"more": bytes(5000)}))).ok
            # All of its file systems together hold more than it may take of the machine: the kernel ends the writer. It
            # is the only process of its command, because the kernel may as well choose a shell that waits for it.
            for place in ("/workspace", "/dev/shm"):
                done = await one.call(
                    Exec(argv=("sh", "-c", f"exec cat /dev/zero > {place}/again"), timeout_s=PATIENCE_S)
                )
            assert done.code == -signal.SIGKILL, done
            assert await text(two, "cat a; python3 -c 'print(sum(range(10)))'") == "145"
            assert (await two.call(WriteFiles(files={"b": bytes(1 << 20)}))).ok
        finally:
            await host.close()

    asyncio.run(body())
