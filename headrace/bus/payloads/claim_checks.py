"""Claim checks: a payload over 1 MiB travels as chunks on HR_BLOB, and the message becomes a small reference.

The idea: chunks of 1 MiB lie under the payload's sha256, so storing the same content twice costs nothing, and the last
chunk is awaited before the reference is published. Why not the client's Object Store: its `get` is quadratic (128 MiB
never finished in a minute). Publishing keeps a window of chunks in flight; reading asks for chunks by subject, several
at once, without making a consumer. Trade-off: a blob must fit into memory, as the message that it carries must anyway.

A user's payloads (`subjects.owner`) lie under the user's hash, named by an HMAC with that hash as key: no two users
share a blob, and one purge of ``hr.blob.<user>.>`` removes all blobs of a user, also those that no record refers to.
The key is in the name, so every reader can verify the content, and a name without its user's hash tells nothing.

Content is verified when it is read, and when a chunk is there already: another role may have stored other bytes first.

A payload expires with what refers to it, where no purge of records finds it: those of requests and answers, to which no
record refers, and those of records that the broker itself deletes, by age or once they are handled
(`subjects.Stream.payloads_s`). The broker deletes them, too. The name of such a payload holds its lifetime and the
time, so that a repeat finds its chunks, and so that no payload of a record that stays is ever stored under a name that
expires.
"""

import asyncio
import hashlib
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from headrace.bus.errors import CorruptPayload, WrongSequence
from headrace.bus.nats import ordered_reader
from headrace.bus.nats.connection import NatsConnection
from headrace.messages.codec import ENCODING_HEADER, TYPE_HEADER
from headrace.messages.operations import BlobRef

CHUNK = 1 << 20
WINDOW = 8
"""Chunks in flight."""
STREAM = "HR_BLOB"
REQUEST_S = 3600
"""A payload of a request or an answer lives so long at least; it is read within minutes, or never."""
_PERIOD_S = 86_400
"""Equal payloads share a name for so many seconds, or for their lifetime where that is shorter."""

Store = Callable[[str, bytes, str, int], Awaitable[int]]
"""(subject, chunk, message id, seconds to live or 0) -> sequence; WrongSequence when that very chunk is there already,
CorruptPayload when another is."""


def chunks(size: int) -> int:
    """Chunks of a payload of so many bytes."""
    return -(-size // CHUNK)


def place(name: str, n: int) -> str:
    """The subject of a blob's n-th chunk."""
    owner, _, mac = name.rpartition(".")
    return f"hr.blob.{owner}.{mac}-{n}" if owner else f"hr.blob.{name}.{n}"


def subjects(ref: BlobRef) -> set[str]:
    """Subjects, or one filter, that cover all chunks of a blob."""
    if "." in ref.sha256:
        return {place(ref.sha256, n) for n in range(ref.chunks)}
    return {f"hr.blob.{ref.sha256}.>"}


async def put(
    store: Store,
    payload: bytes,
    headers: Mapping[str, str],
    owner: str = "",
    *,
    digest: str = "",
    lives_s: int = 0,
) -> BlobRef:
    """Store a payload. With `owner`, a user's hash, the blob is that user's alone.

    CorruptPayload when other bytes lie on a subject of its chunks. digest: the content's sha256, if the caller has it
    already. lives_s: seconds that it is needed; 0: until a purge
    removes it with the records that refer to it.
    """
    period_s = min(lives_s, _PERIOD_S)
    expiry = f"for{lives_s}-{int(time.time() // period_s)}" if lives_s else ""
    if owner:
        digest = f"{owner}.{_keyed(owner, expiry, payload)}"
    digest = digest or hashlib.sha256(payload).hexdigest()
    if expiry and not owner:
        digest = f"{expiry}.{digest}"
    count = chunks(len(payload))
    gate = asyncio.Semaphore(WINDOW)

    async def one(n: int) -> None:
        async with gate:
            try:
                await store(place(digest, n), payload[n * CHUNK : (n + 1) * CHUNK], f"{digest}.{n}", lives_s + period_s)
            except WrongSequence:
                pass  # the same bytes were stored before, by this process or another

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
        expiry=expiry if owner else "",
    )


def _keyed(owner: str, expiry: str, payload: bytes) -> str:
    return hmac.new(f"{owner}{expiry}".encode(), payload, hashlib.sha256).hexdigest()


async def get(connection: NatsConnection, ref: BlobRef) -> bytes:
    """Fetch and verify. MessageGone when a chunk was purged, CorruptPayload when the content is not what `ref` says."""
    parts: list[bytes] = []
    size = 0
    if ref.chunks != chunks(ref.bytes):
        raise CorruptPayload(f"blob {ref.sha256}: {ref.bytes} bytes do not make {ref.chunks} chunks")
    async for part in _chunks(connection, ref):
        size += len(part)
        if size > ref.bytes:  # a forged reference to larger chunks must not fill the memory
            raise CorruptPayload(f"blob {ref.sha256} has more than the {ref.bytes} bytes that its reference names")
        parts.append(part)
    payload = b"".join(parts)
    if size != ref.bytes:
        raise CorruptPayload(f"blob {ref.sha256} has {size} of {ref.bytes} bytes")
    owner, _, name = ref.sha256.rpartition(".")
    if (_keyed(owner, ref.expiry, payload) if ref.keyed else hashlib.sha256(payload).hexdigest()) != name:
        raise CorruptPayload(f"blob {ref.sha256} has other content than its name says")
    return payload


async def _chunks(connection: NatsConnection, ref: BlobRef) -> AsyncIterator[bytes]:
    waiting: list[asyncio.Task[bytes]] = []
    try:
        for n in range(ref.chunks):
            waiting.append(asyncio.ensure_future(chunk(connection, place(ref.sha256, n))))
            if len(waiting) == WINDOW:
                yield await waiting.pop(0)
        while waiting:
            yield await waiting.pop(0)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def chunk(connection: NatsConnection, subject: str) -> bytes:
    """Direct get of a chunk from any replica. A replica that lags answers 404; then the leader is asked."""
    ask = f"$JS.API.DIRECT.GET.{STREAM}.{subject}"
    reply = await connection.patiently(lambda: connection.call(ask, timeout=10.0))
    if not (reply.headers and reply.headers.get("Status")):
        return reply.data
    return (await ordered_reader.from_leader(connection, STREAM, {"last_by_subj": subject})).data
