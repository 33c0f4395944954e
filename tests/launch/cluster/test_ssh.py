"""The call of ssh ends whole: also the commands that ssh itself starts, such as that of a ProxyCommand."""

import asyncio
import os
import select
from pathlib import Path

import pytest

from headrace.launch.cluster import ssh
from headrace.launch.cluster.file import Cluster, Node, Process

# Stands for ssh with a proxy that hangs: the child holds no pipe of the client and outlasts the limit of a test.
CLIENT = """#!/bin/sh
sleep 3600 <&- >/dev/null 2>&1 &
echo $! > {fifo}
wait
"""
NODE = Node(name="h1", address="127.0.0.1", folder="/h1", processes=(Process(broker=True),))

pytestmark = pytest.mark.anyio


@pytest.fixture
def fifo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Gives the process id of the client's child. The client is first on the path."""
    os.mkfifo(tmp_path / "fifo")
    client = tmp_path / "ssh"
    client.write_text(CLIENT.format(fifo=tmp_path / "fifo"))
    client.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path / "fifo"


async def child_of(fifo: Path, call: "asyncio.Task[str]") -> int:
    """A handle of the client's child. A call that ends before it has one fails the test with the call's error."""
    reading = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        arrived = asyncio.Event()
        asyncio.get_running_loop().add_reader(reading, arrived.set)
        waiting = asyncio.ensure_future(arrived.wait())
        await asyncio.wait({waiting, call}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        asyncio.get_running_loop().remove_reader(reading)
        if call.done():
            call.result()
        return os.pidfd_open(int(os.read(reading, 20)))
    finally:
        os.close(reading)


def ended(handle: int) -> None:
    try:
        assert select.select([handle], [], [], 20)[0], "a child outlived the call"
    finally:
        os.close(handle)


async def test_a_cancelled_call_leaves_no_child(fifo: Path) -> None:
    call = asyncio.create_task(ssh.call(Cluster(run="run.toml", hosts=(NODE,)), NODE, "true"))
    handle = await child_of(fifo, call)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    ended(handle)


async def test_a_call_without_an_answer_leaves_no_child(fifo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_s, handle = 0.3, -1
    while handle < 0:  # a busy machine has not started the child at the first limit
        monkeypatch.setattr(ssh, "ANSWER_S", limit_s)
        call = asyncio.create_task(ssh.call(Cluster(run="run.toml", hosts=(NODE,)), NODE, "true"))
        try:
            handle = await child_of(fifo, call)
        except ssh.HostError:
            limit_s *= 4
    with pytest.raises(ssh.HostError, match="no answer within"):
        await call
    ended(handle)
