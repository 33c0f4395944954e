"""A version's way into the stream: chunks, then the manifest, then the head record with an expected sequence.

The idea: receivers act on head records alone, so whatever dies before the head leaves nothing that anyone sees. The
head is written against the sequence of the one it was based on; a sender that slept through another's commit is
refused there, and its chunks and manifest stay orphans that no chain names.

Chunk ids are made from content, so a sender that starts again after a crash stores no chunk twice within the stream's
de-duplication window.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable
from typing import Protocol

import msgspec

from headrace.messages import subjects
from headrace.messages.base import Message
from headrace.messages.weights import ChunkInfo, WeightChunk, WeightHead, WeightManifest
from headrace.weights.encoding import Encoding, describe
from headrace.weights.state import WeightError

AHEAD = 8
"""Chunks on their way to the broker at once."""
ANCHOR_AFTER_BYTES = 4.0
"""A new anchor is due when the deltas since the last one hold this many times its bytes."""


class Sink(Protocol):
    """What this room needs of a bus to write."""

    def publish(
        self, subject: str, message: Message, *, msg_id: str | None = None, expect: int | None = None
    ) -> Awaitable[int]:
        """Store a message; its sequence. Raises when `expect` is not the subject's last sequence."""


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """The newest version in the stream: its head record, the head's sequence, and its manifest."""

    seq: int
    head: WeightHead
    manifest: WeightManifest
    since_anchor: int = 0
    """Wire bytes of the deltas since the newest anchor."""
    anchor_bytes: int = 0


async def upload(sink: Sink, encoding: Encoding, run: str, version: int, *, first: int = 0) -> list[ChunkInfo]:
    """Encode in a thread and store the chunks as they come out, several at once; numbered from `first`."""
    chunks = encoding.chunks()
    storing: deque[tuple[int, bytes, asyncio.Task[int]]] = deque()
    out: list[ChunkInfo] = []

    async def settle() -> None:
        seq, data, task = storing[0]
        out.append(describe(data, 0, seq, await task))
        storing.popleft()

    try:
        seq = first
        while (data := await asyncio.to_thread(next, chunks, None)) is not None:
            if len(storing) == AHEAD:
                await settle()
            task = asyncio.ensure_future(_store(sink, run, version, seq, data))
            storing.append((seq, data, task))
            seq += 1
        while storing:
            await settle()
    finally:
        for _, _, task in storing:
            task.cancel()
        await asyncio.gather(*(task for _, _, task in storing), return_exceptions=True)
    return out


async def _store(sink: Sink, run: str, version: int, seq: int, data: bytes) -> int:
    subject = subjects.WEIGHT_CHUNK.at(run=run, version=version, shard=0, seq=seq)
    message = WeightChunk(run=run, version=version, shard=0, seq=seq, data=data)
    return await sink.publish(subject, message, msg_id=f"{subject}-{describe(data, 0, seq, 0).sha256}")


async def release(
    sink: Sink, encoding: Encoding, run: str, version: int, before: Commit | None, *, state_hash: str, rate: float = 0.0
) -> Commit:
    """Publish a version after `before`: as a delta when the encoding has a base (which is `before`'s state), else as an
    anchor. WeightError when the bits are not what the trainer announced: then nothing was committed.
    """
    chunks = await upload(sink, encoding, run, version)
    if encoding.state_hash != state_hash:
        raise WeightError(
            f"the file of version {version} has state {encoding.state_hash}, the trainer announced {state_hash}"
        )
    base = before if encoding.base is not None else None
    manifest = encoding.manifest(
        run,
        version,
        chunks,
        base=base.manifest if base is not None else None,
        base_seq=base.head.manifest_seq if base is not None else 0,
        step=version,
        learning_rate=rate,
    )
    seq = await sink.publish(subjects.WEIGHT_MANIFEST.at(run=run, version=version), manifest)
    head = WeightHead(
        run=run,
        version=version,
        manifest_seq=seq,
        state_hash=state_hash,
        anchor_version=version if base is None else base.head.anchor_version,
        anchor_seq=seq if base is None else base.head.anchor_seq,
    )
    at = await sink.publish(subjects.WEIGHT_HEAD.at(run=run), head, expect=before.seq if before is not None else 0)
    return Commit(
        seq=at,
        head=head,
        manifest=manifest,
        since_anchor=0 if base is None else base.since_anchor + manifest.wire_bytes,
        anchor_bytes=manifest.wire_bytes if base is None else base.anchor_bytes,
    )


def anchor_due(commit: Commit, every: int) -> bool:
    """Whether an anchor for this version should follow it: by age in versions, or by the bytes of deltas since."""
    age = commit.head.version - commit.head.anchor_version
    return age >= every or (age > 0 and commit.since_anchor > ANCHOR_AFTER_BYTES * commit.anchor_bytes > 0)


async def add_anchor(sink: Sink, encoding: Encoding, commit: Commit) -> Commit:
    """Store an anchor of the committed version beside its delta; the next head names it.

    It comes after the head, so receivers that are up to date never wait for it. Dying before the next head leaves an
    orphan and the anchor due again.
    """
    run, version = commit.head.run, commit.head.version
    chunks = await upload(sink, encoding, run, version, first=len(commit.manifest.chunks))
    if encoding.state_hash != commit.head.state_hash:
        raise WeightError(f"the anchor of version {version} does not have its state")
    manifest = encoding.manifest(run, version, chunks, base=None, step=version)
    seq = await sink.publish(subjects.WEIGHT_MANIFEST.at(run=run, version=version), manifest)
    head = msgspec.structs.replace(commit.head, anchor_version=version, anchor_seq=seq)
    return msgspec.structs.replace(commit, head=head, since_anchor=0, anchor_bytes=manifest.wire_bytes)
