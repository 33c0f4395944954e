"""Claim checks: a payload over 1 MiB travels as chunks on HR_BLOB, and the message becomes a small reference.

The idea: chunks of 1 MiB lie under the payload's sha256, so storing the same content twice costs nothing, and the last
chunk is awaited before the reference is published. Why not the client's Object Store: its `get` is quadratic (128 MiB
never finished in a minute). Publishing keeps a window of chunks in flight; reading asks for chunks by subject, several
at once, without making a consumer. Trade-off: a blob must fit into memory, as the message that it carries must anyway.

What a user owns (`subjects.owner`) lies under the user's hash, named by an HMAC under it: no two users share a blob,
and one purge of ``hr.blob.<user>.>`` removes all of a user's, those too that no record refers to.
"""

import asyncio
import hashlib
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from headrace.bus import reading
from headrace.bus.errors import BusError, WrongSequence
from headrace.bus.link import Link
from headrace.messages.codec import ENCODING_HEADER, TYPE_HEADER, decode
from headrace.messages.operations import BlobRef

if TYPE_CHECKING:
    from headrace.bus.connection import Bus

CHUNK = 1 << 20
WINDOW = 8
"""Chunks in flight."""
STREAM = "HR_BLOB"

Store = Callable[[str, bytes, str], Awaitable[int]]
"""(subject, chunk, message id) -> sequence; WrongSequence when that chunk is there already."""


def chunks(size: int) -> int:
    """Chunks of a payload of so many bytes."""
    return -(-size // CHUNK)


def place(name: str, n: int) -> str:
    """The subject of a blob's n-th chunk."""
    owner, _, own = name.rpartition(".")
    return f"hr.blob.{owner}.{own}-{n}" if owner else f"hr.blob.{name}.{n}"


async def put(
    store: Store, payload: bytes, headers: Mapping[str, str], owner: str = "", *, digest: str = ""
) -> BlobRef:
    """Store a payload. With `owner`, a user's hash, the blob is that user's alone.

    digest: the content's sha256, where somebody has made it already.
    """
    if owner:
        digest = f"{owner}.{hmac.new(owner.encode(), payload, hashlib.sha256).hexdigest()}"
    digest = digest or hashlib.sha256(payload).hexdigest()
    count = chunks(len(payload))
    gate = asyncio.Semaphore(WINDOW)

    async def one(n: int) -> None:
        async with gate:
            try:
                await store(place(digest, n), payload[n * CHUNK : (n + 1) * CHUNK], f"{digest}.{n}")
            except WrongSequence:
                pass  # stored before, by us or by another

    tasks = [asyncio.create_task(one(n)) for n in range(count)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return BlobRef(
        sha256=digest,
        bytes=len(payload),
        chunks=count,
        type=headers[TYPE_HEADER],
        encoding=headers.get(ENCODING_HEADER, ""),
        keyed=bool(owner),
    )


async def get(link: Link, ref: BlobRef) -> bytes:
    """Fetch and verify. MessageGone when a chunk was purged, BusError when the content is not what it claims to be."""
    parts = [part async for part in _chunks(link, ref)]
    payload = b"".join(parts)
    if len(payload) != ref.bytes or (not ref.keyed and hashlib.sha256(payload).hexdigest() != ref.sha256):
        raise BusError(f"blob {ref.sha256} is damaged: {len(payload)} of {ref.bytes} bytes, or other content")
    return payload


async def _chunks(link: Link, ref: BlobRef) -> AsyncIterator[bytes]:
    waiting: list[asyncio.Task[bytes]] = []
    try:
        for n in range(ref.chunks):
            waiting.append(asyncio.ensure_future(_chunk(link, place(ref.sha256, n))))
            if len(waiting) == WINDOW:
                yield await waiting.pop(0)
        while waiting:
            yield await waiting.pop(0)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _chunk(link: Link, subject: str) -> bytes:
    """By direct get, which any replica answers; one that lags says 404, and then the leader has the last word."""
    ask = f"$JS.API.DIRECT.GET.{STREAM}.{subject}"
    reply = await link.patiently(lambda: link.call(ask, timeout=10.0))
    if not (reply.headers and reply.headers.get("Status")):
        return reply.data
    return (await reading.from_leader(link, STREAM, {"last_by_subj": subject})).data


async def purge(bus: "Bus", stream: str, subject: str, before: int) -> int:
    """Purge a stream's records below a sequence, and the payloads that they refer to; how many records. Denied."""
    found: set[str] = set()
    if before > 1:
        async for message, _ in reading.Reader(bus.link, stream, [subject], until=before - 1).messages():
            if (message.headers or {}).get(TYPE_HEADER, "").partition("/")[0] == BlobRef.type_name:
                ref = decode(message.data, message.headers)
                assert isinstance(ref, BlobRef)
                found |= {place(ref.sha256, n) for n in range(ref.chunks)} if ref.keyed else {f"hr.blob.{ref.sha256}.>"}
    purged = await bus.purge(stream, subject=subject, before=before)  # first, so that a crash leaves no dangling name
    for subject in sorted(found):
        await bus.purge(STREAM, subject=subject)
    return purged
