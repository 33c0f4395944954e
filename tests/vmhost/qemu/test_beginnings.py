"""Clones of an image that had clones before begin with the image attached: only the cost differs."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headrace.messages.sandbox import Acquire, CheckIntegrity, Exec, PullChanges
from headrace.messages.tasks import SandboxLimits
from headrace.vmhost.images import base
from headrace.vmhost.node.host import Host
from tests.support.hosts import ask, backend, clone_of, environment
from tests.vmhost.backends.test_conformance import IMAGE, make_image

pytestmark = [pytest.mark.anyio, pytest.mark.vm, pytest.mark.slow, pytest.mark.timeout(600)]


def request(number: int, **limits: int) -> Acquire:
    fields: dict[str, Any] = {
        "group": f"g{number}",
        "isolation": "episode",
        "template": IMAGE,
        "workdir": "/work",
        "files": {},
    }
    return ask(limits=SandboxLimits(**limits), **fields)


async def test_later_clones_begin_with_their_image_attached(tmp_path: Path) -> None:
    section = environment(warm=0)
    await asyncio.to_thread(base.ensure, section)
    await asyncio.to_thread(make_image, tmp_path)
    told: list[str] = []
    host = await Host.open(section, on_event=lambda kind, text, data: told.append(f"{kind}: {text}"))
    try:
        drawn = set()
        for number in range(4):
            sandbox = await host.acquire(request(number))
            began = backend(host)._beginnings.find(clone_of(host, sandbox).template)
            assert (began is not None) == (number > 0), told
            look = "cat kept; id -u; ls -a; head -c 16 /dev/urandom | base64; cat /proc/sys/kernel/hostname"
            seen = (await sandbox.call(Exec(argv=("sh", "-c", look)))).stdout.splitlines()
            drawn.add(seen.pop(-2))
            assert seen == ["as it was", "1000", ".", "..", "gone", "kept", "sandbox"]
            assert (await sandbox.call(PullChanges())).changes == ()
            await sandbox.call(Exec(argv=("sh", "-c", f"echo {number} > own; rm gone")))
            changes = (await sandbox.call(PullChanges())).changes
            assert {(change.path, change.kind) for change in changes} == {("own", "file"), ("gone", "gone")}
            checked = await sandbox.call(CheckIntegrity(thorough=True))
            assert checked.ok and not checked.tampered, checked
            host.release(sandbox.id)
        assert len(drawn) == 4
        limited = await host.acquire(request(9, disk_mib=8))  # another class: it must not begin with the larger layer
        full = await limited.call(
            Exec(argv=("sh", "-c", "dd if=/dev/zero of=full bs=1M; wc -c < full"), timeout_s=60.0)
        )
        assert int(full.stdout) <= 8 << 20 and not told
    finally:
        await host.close()
