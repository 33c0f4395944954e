"""Acquires of an image reach the nodes that hold it, over a real broker and containers."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from headrace.actors.environment import actor
from headrace.actors.environment.actor import Environment
from headrace.config import Config
from headrace.config import Environment as Section
from headrace.messages.sandbox import ANY_RUN, Acquire, ReadFile
from headrace.sandboxes.client import Sandboxes
from headrace.vmhost.backends.container.backend import unavailable
from headrace.vmhost.images import base, imported, packages
from headrace.vmhost.qemu import probe
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.archives import docker_save, file, folder, link
from tests.support.hosts import CACHE

pytestmark = [pytest.mark.anyio, pytest.mark.vm]
TAG = "registry.example/org/box:1"


def image(place: Path) -> Path:
    """A docker archive of a shell."""
    base.ensure(Section(cache_dir=CACHE))
    shell = probe._busybox(packages.folder(Path(CACHE)))
    layer = [folder("bin"), file("bin/busybox", shell, mode=0o755), link("bin/sh", "busybox"), folder("work")]
    return docker_save(place / "box.tar", [layer], [TAG], WorkingDir="/work")


def wanted(number: int, template: str = TAG) -> Acquire:
    fields = {"run": "r1", "lane": "train", "role": "rollout", "slot": 0, "attempt": 0, "isolation": "episode"}
    return Acquire(group=f"g{number}", template=template, files={"a": b"one"}, **fields)  # type: ignore[arg-type]


async def test_an_acquire_goes_to_a_node_that_holds_the_image(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why := unavailable():
        pytest.skip(f"no containers here: {why}")
    monkeypatch.setattr(actor, "OFFER_EVERY_S", 0.05)
    archive = await asyncio.to_thread(image, tmp_path)
    await asyncio.to_thread(imported.take, tmp_path / "n1", archive, "box")
    async with AsyncExitStack() as stack:
        for node in ("n1", "n2", "n3"):
            section = Section(
                backend="container", cache_dir=str(tmp_path / node), warm=0, max_vms=3, judge_share=0, memory_mb=128
            )
            bus = await connect("environment", node=node)
            await stack.enter_async_context(living(Environment, Config(environment=section), bus, ANY_RUN))
        sandboxes = Sandboxes(await connect("rollout"), 30.0)
        names = (TAG, "box", imported.images(tmp_path / "n1")[0].digest)
        held = [await sandboxes.acquire(wanted(number, name)) for number, name in enumerate(names)]
        assert [sandbox.node for sandbox in held] == ["n1"] * 3
        # n1 is full: the next acquire waits, until another node has stored the image.
        fourth = asyncio.ensure_future(sandboxes.acquire(wanted(3)))
        done, _ = await asyncio.wait([fourth], timeout=0.3)
        assert not done
        await asyncio.to_thread(imported.take, tmp_path / "n2", archive, "box")
        sandbox = await fourth
        assert (sandbox.node, (await sandbox.call(ReadFile(path="a"))).data) == ("n2", b"one")
        (await asyncio.to_thread((tmp_path / "n1" / "image-box").unlink))
        assert (await sandboxes.acquire(wanted(4))).node == "n2"
        for taken in (*held, sandbox):
            await sandboxes.release(taken)
        await sandboxes.close()
