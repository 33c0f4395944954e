"""The host's side of a hostile guest: whatever comes over the wire costs only the channel that it came over."""

import asyncio
import gc
import socket
import struct
import tracemalloc
from typing import Any

import pytest

from headrace.messages.sandbox import Exec, SandboxLost
from headrace.vmhost import protocol
from headrace.vmhost.channel import Channel
from headrace.vmhost.guest.frames import Garbage, Reader, pack

pytestmark = pytest.mark.anyio


async def connected() -> tuple[Channel, socket.socket]:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    return await Channel.connect(ours, "guest"), theirs


async def test_answers_may_come_in_any_order() -> None:
    channel, guest = await connected()
    first = asyncio.ensure_future(channel.call({"op": "a"}))
    second = asyncio.ensure_future(channel.call({"op": "b"}, [b"body"]))
    loop, reader = asyncio.get_running_loop(), Reader()
    heard: list[tuple[dict[str, Any], list[bytes]]] = []
    while len(heard) < 2:
        heard += reader.feed(await loop.sock_recv(guest, 4096))
    assert [header["op"] for header, _ in heard] == ["a", "b"] and heard[1][1] == [b"body"]
    for header, _ in reversed(heard):
        await loop.sock_sendall(guest, pack({"i": header["i"], "echo": header["op"]}, [b"x"]))
    assert (await first)[0] == {"echo": "a"} and (await second) == ({"echo": "b"}, [b"x"])
    channel.close("done")
    await channel.ended
    guest.close()


async def test_a_large_body_is_sent_without_a_copy_and_read_with_one() -> None:
    size = 8 << 20
    channel, guest = await connected()
    loop, frame = asyncio.get_running_loop(), b""
    tracemalloc.start()
    try:
        waiting = asyncio.ensure_future(channel.call({"op": "a"}, [bytes(size), b"", b"end"]))
        await asyncio.sleep(0)
        sent = tracemalloc.get_traced_memory()[1] - size
        while not frame.endswith(b"end"):
            frame += await loop.sock_recv(guest, 4 << 20)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        ((header, bodies),) = Reader().feed(frame)
        read = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert ([len(body) for body in bodies], bodies[0].count(0)) == ([size, 0, 3], size)
    assert sent < size / 4 and read < 2.5 * size, "the reader's buffer, and each body once"
    await loop.sock_sendall(guest, pack({"i": header["i"]}))
    assert await waiting == ({}, [])
    channel.close("done")
    await channel.ended
    guest.close()


@pytest.mark.parametrize(
    "wire_bytes",
    [
        struct.pack("!II", 1 << 31, 4),
        struct.pack("!II", 8, 100) + b"xxxx",
        struct.pack("!II", 8, 4) + b"null",
        struct.pack("!II", 8, 4) + b"}{}{",
        struct.pack("!II", 13, 9) + b'{"#":[9]}',
        struct.pack("!II", 20, 16) + b'{"#":[-1],"i":1}',
        pack({"i": 77}),
        pack({"i": "x"}),
        pack({"i": 1})[:-1] + b"\xff",
    ],
)
async def test_garbage_ends_the_channel(wire_bytes: bytes) -> None:
    channel, guest = await connected()
    waiting = asyncio.ensure_future(channel.call({"op": "a"}))
    await asyncio.sleep(0)
    await asyncio.get_running_loop().sock_sendall(guest, wire_bytes)
    with pytest.raises(SandboxLost, match="broke the protocol"):
        await waiting
    with pytest.raises(SandboxLost, match="broke the protocol"):
        await channel.call({"op": "b"})
    await channel.ended
    guest.close()


async def test_a_guest_that_speaks_unasked_is_cut_off() -> None:
    channel, guest = await connected()
    guest.send(b"hello")
    assert await channel.lost == "it sent data although no call was open"
    await channel.ended
    guest.close()


async def test_a_guest_that_stays_silent_is_given_up() -> None:
    channel, guest = await connected()
    with pytest.raises(SandboxLost, match=r"no answer within 0\.05 s"):
        await channel.call({"op": "a"}, timeout=0.05)
    await channel.ended
    guest.close()


async def test_a_closed_guest_is_lost_at_once() -> None:
    channel, guest = await connected()
    waiting = asyncio.ensure_future(channel.call({"op": "a"}))
    await asyncio.sleep(0)
    guest.close()
    with pytest.raises(SandboxLost, match="its channel closed"):
        await waiting
    assert channel.hung_up
    await channel.ended


def test_answers_are_read_strictly() -> None:
    assert protocol.to_result({"stdout": 0}, [b"\xffx"], 1.0).stdout == "�x"
    assert protocol.to_result({"stdout": 9}, [], 1.0).stdout == ""
    for lie in ({"ok": "yes"}, {"code": 1.5}, {"tests": [["a", "great", ""]]}, {"paths": ["a"]}, {"stdout": "x"}):
        with pytest.raises(Garbage):
            protocol.to_result(lie, [], 1.0)
    assert protocol.to_result({"error": "\ud800"}, [], 1.0).error.encode()


def test_deadlines_outlast_the_guests_own_limits() -> None:
    assert protocol.deadline_s(Exec(argv=("x",), timeout_s=100.0)) > 100.0


async def test_a_caller_that_gave_up_leaves_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    channel, guest = await connected()
    waiting = asyncio.ensure_future(channel.call({"op": "a"}))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    channel.close("over")
    await channel.ended
    del channel, waiting
    gc.collect()
    assert "never retrieved" not in caplog.text
    guest.close()
