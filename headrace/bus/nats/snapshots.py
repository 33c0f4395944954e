"""Copies whole streams out of a broker and into another: messages with their sequences, and the state of consumers.

The broker makes and reads the copy (`$JS.API.STREAM.SNAPSHOT`, `RESTORE`) and waits for acknowledgements of chunks.
"""

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from secrets import token_hex
from typing import Any

import msgspec
from nats.aio.msg import Msg

from headrace.bus.errors import ApiError, BusError
from headrace.bus.nats.connection import NatsConnection, check

CHUNK = 128 << 10
IDLE_S = 60.0
"""A copy fails when the broker sends nothing, or answers nothing, for this time."""


async def save(connection: NatsConnection, stream: str, file: Path) -> dict[str, Any]:
    """Write a stream's copy to a file; the stream's configuration and state. BusError."""
    chunks: asyncio.Queue[Msg] = asyncio.Queue()
    inbox = f"hr.copy.{stream}.{token_hex(12)}"  # the broker sends it in the stream's account, which has no inboxes
    subscription = await connection.subscribe(inbox, chunks.put)
    try:
        request = {"deliver_subject": inbox, "chunk_size": CHUNK}
        answer = msgspec.json.decode(await connection.api(f"STREAM.SNAPSHOT.{stream}", request, timeout=IDLE_S))
        ending: Mapping[str, str] = {}
        with file.open("xb") as sink:
            while True:
                try:
                    async with asyncio.timeout(IDLE_S):
                        chunk = await chunks.get()
                except TimeoutError:
                    raise BusError(f"the copy of {stream} stopped: the broker sent nothing for {IDLE_S:g} s") from None
                if not chunk.data:
                    ending = chunk.headers or {}
                    break
                sink.write(chunk.data)
                if chunk.reply:  # the broker asks for it when its window is half used
                    await connection.send(chunk.reply)
        if ending.get("Status", "204") != "204":
            raise BusError(f"the broker broke the copy of {stream} off: {ending.get('Description', ending['Status'])}")
    finally:
        await connection.unsubscribe(subscription)
    return {"config": answer["config"], "state": answer["state"]}


async def load(connection: NatsConnection, stream: str, about: dict[str, Any], file: Path) -> None:
    """Make a stream from its copy. about: what `save` returned. BusError when the broker has the stream already."""
    try:
        answer = await connection.api(f"STREAM.RESTORE.{stream}", about, timeout=IDLE_S)
    except ApiError as error:
        raise BusError(f"{stream} cannot be restored: {error}; a restore needs a broker without it") from None
    subject = msgspec.json.decode(answer)["deliver_subject"]
    for chunk in _chunks(file):
        reply = await connection.call(subject, chunk, timeout=IDLE_S)
        if reply.data:
            check(reply.data)


def _chunks(file: Path) -> Iterator[bytes]:
    """The pieces of a file, then the empty one that ends a copy."""
    with file.open("rb") as source:
        while chunk := source.read(CHUNK):
            yield chunk
    yield b""
