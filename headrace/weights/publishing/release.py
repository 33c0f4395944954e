"""Publishes a version: chunks, then the manifest, then the head record with an expected sequence.

The idea: receivers act on head records alone, so a sender that dies before the head leaves nothing visible. The head is
written with the sequence of the head before it as the expected one; the broker refuses the head of a sender that missed
another sender's commit, and no head refers to its chunks and manifest. Manifest and head are signed.

Chunk ids are hashes of the content, so a sender that starts again after a crash stores no chunk twice within the
stream's de-duplication window.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec

from headrace.messages import subjects
from headrace.messages.base import Message
from headrace.messages.weights import ChunkInfo, WeightChunk, WeightHead, WeightManifest
from headrace.weights import chain
from headrace.weights.full.snapshots import name_of
from headrace.weights.publishing.encoding import Encoding, describe
from headrace.weights.signing import Signer, Trust, sealed
from headrace.weights.state import WeightError

AHEAD = 8
"""Number of chunks that are sent to the broker at once."""
FULL_AFTER_BYTES = 4.0
"""A new full snapshot is due when the deltas since the last one have more than this many times its bytes."""


class Sink(Protocol):
    """The part of a bus that publishing needs."""

    def publish(
        self, subject: str, message: Message, *, msg_id: str | None = None, expect: int | None = None
    ) -> Awaitable[int]:
        """Store a message and return its sequence. Raises when `expect` is not the subject's last sequence."""


Keep = Callable[[Encoding, int], Awaitable[list[ChunkInfo]]]
"""Stores the encoding of a full snapshot of a version as an object; the entries of its chunks, in their order there."""


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """The newest version in the stream: its head record, the head's sequence, and its manifest."""

    seq: int
    head: WeightHead
    manifest: WeightManifest
    since_full: int = 0
    """Wire bytes of the deltas since the newest full snapshot."""
    full_bytes: int = 0
    full_object: str = ""
    """Name of the newest full snapshot's object; empty where the stream has its chunks."""


class NewVersion(msgspec.Struct, frozen=True):
    """A version to publish, as the trainer announced it."""

    run: str
    version: int
    state_hash: str
    """Of the file that is published."""
    learning_rate: float = 0.0
    """Of the step that made it."""
    precision: str = ""
    """Rounding from the trainer's file to the published one; empty when the trainer's file is published unchanged."""
    source_hash: str = ""
    """State hash of the trainer's file where the published one is rounded."""


async def upload(sink: Sink, encoding: Encoding, run: str, version: int) -> list[ChunkInfo]:
    """Encode a delta in a thread and store the chunks as they are encoded, several at once. Returns their manifest
    entries, ordered by shard and number."""
    pieces = encoding.pieces()
    storing: deque[tuple[int, int, bytes, asyncio.Task[int]]] = deque()
    out: list[ChunkInfo] = []
    numbers: dict[int, int] = {}

    async def finish_first() -> None:
        shard, seq, data, task = storing[0]
        out.append(describe(data, shard, seq, await task))
        storing.popleft()

    try:
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            if len(storing) == AHEAD:
                await finish_first()
            shard, data = piece
            seq = numbers.get(shard, 0)
            numbers[shard] = seq + 1
            task = asyncio.ensure_future(_store(sink, run, version, shard, seq, data))
            storing.append((shard, seq, data, task))
        while storing:
            await finish_first()
    finally:
        for *_, task in storing:
            task.cancel()
        await asyncio.gather(*(task for *_, task in storing), return_exceptions=True)
    return sorted(out, key=lambda info: (info.shard, info.seq))


async def _store(sink: Sink, run: str, version: int, shard: int, seq: int, data: bytes) -> int:
    subject = subjects.WEIGHT_CHUNK.at(run=run, version=version, shard=shard, seq=seq)
    message = WeightChunk(run=run, version=version, shard=shard, seq=seq, data=data)
    return await sink.publish(subject, message, msg_id=f"{subject}-{describe(data, shard, seq, 0).sha256}")


async def release(
    sink: Sink,
    encoding: Encoding,
    new: NewVersion,
    before: Commit | None,
    keep: Keep,
    *,
    signer: Signer | None = None,
    after: int = 0,
) -> Commit:
    """Publish a version after `before`: a delta when the encoding has a base (the state of `before`), otherwise a full
    snapshot. WeightError, and no commit, when the file has another state hash than the trainer announced.

    after: the sequence of the last record on the head's subject, used when `before` is None. keep: stores a full
    snapshot.
    """
    run, version = new.run, new.version
    if encoding.base is None:
        chunks = await keep(encoding, version)
    else:
        chunks = await upload(sink, encoding, run, version)
    if encoding.state_hash != new.state_hash:
        raise WeightError(
            f"the file of version {version} has state {encoding.state_hash}, the trainer announced {new.state_hash}"
        )
    base = before if encoding.base is not None else None
    manifest = sealed(
        encoding.manifest(
            run,
            version,
            chunks,
            base=base.manifest if base is not None else None,
            base_seq=base.head.manifest_seq if base is not None else 0,
            step=version,
            learning_rate=new.learning_rate,
            precision=new.precision,
            source_hash=new.source_hash,
        ),
        signer,
    )
    seq = await sink.publish(subjects.WEIGHT_MANIFEST.at(run=run, version=version), manifest)
    after = before.seq if before is not None else after
    head = sealed(
        WeightHead(
            run=run,
            version=version,
            manifest_seq=seq,
            state_hash=new.state_hash,
            full_version=version if base is None else base.head.full_version,
            full_seq=seq if base is None else base.head.full_seq,
            after=after,
            source_hash=new.source_hash,
        ),
        signer,
    )
    at = await sink.publish(subjects.WEIGHT_HEAD.at(run=run), head, expect=after)
    return Commit(
        seq=at,
        head=head,
        manifest=manifest,
        since_full=0 if base is None else base.since_full + manifest.wire_bytes,
        full_bytes=manifest.wire_bytes if base is None else base.full_bytes,
        full_object=_object(manifest) if base is None else base.full_object,
    )


def full_snapshot_due(commit: Commit, every: int) -> bool:
    """Whether this version needs a full snapshot: the last one is `every` versions old, or too many bytes of deltas
    were published since."""
    age = commit.head.version - commit.head.full_version
    return age >= every or (age > 0 and commit.since_full > FULL_AFTER_BYTES * commit.full_bytes > 0)


async def add_full_snapshot(
    sink: Sink,
    encoding: Encoding,
    commit: Commit,
    keep: Keep,
    *,
    signer: Signer | None = None,
) -> Commit:
    """Store a full snapshot of the committed version beside its delta; the next head names it. keep: as in `release`.

    It follows the head, so receivers that are up to date do not wait for it. A sender that dies before the next head
    finds the snapshot's manifest after its restart (`recover`), or publishes the snapshot again when it is not
    complete. WeightError when the encoding has another state.
    """
    run, version = commit.head.run, commit.head.version
    chunks = await keep(encoding, version)
    if encoding.state_hash != commit.head.state_hash:
        raise WeightError(
            f"the full snapshot of version {version} has state {encoding.state_hash}, expected {commit.head.state_hash}"
        )
    made = commit.manifest
    manifest = encoding.manifest(
        run,
        version,
        chunks,
        base=None,
        step=version,
        precision=made.precision,
        source_hash=made.source_hash,
    )
    seq = await sink.publish(subjects.WEIGHT_MANIFEST.at(run=run, version=version), sealed(manifest, signer))
    return with_full_snapshot(commit, manifest, seq, signer)


def with_full_snapshot(commit: Commit, full: WeightManifest, seq: int, signer: Signer | None) -> Commit:
    """A commit whose version has a full snapshot, at sequence `seq`, that its stored head does not name."""
    # Signed again, because a node that builds this version from the kept head verifies its signature.
    head = sealed(msgspec.structs.replace(commit.head, full_version=full.version, full_seq=seq), signer)
    return msgspec.structs.replace(
        commit, head=head, since_full=0, full_bytes=full.wire_bytes, full_object=_object(full)
    )


def _object(full: WeightManifest) -> str:
    return name_of(full.version, full.chunks) if full.detached else ""


async def recover(
    source: chain.StreamSource, newest: WeightHead | None, trust: Trust, signer: Signer | None, seq: int
) -> Commit | None:
    """The newest version in the stream as its sender knew it, from its valid head; None before the first.

    seq: the sequence of the last record on the head's subject. A full snapshot of that version that was stored after
    its head counts. BrokenVersion, Untrusted and LookupError as `chain.manifest`.
    """
    if newest is None:
        return None
    run = newest.run
    manifest = await chain.manifest(source, run, newest.manifest_seq, trust)
    full = await chain.manifest(source, run, newest.full_seq, trust)
    since, delta = 0, manifest
    while delta.base_version >= 0 and (delta.version, delta.state_hash) != (full.version, full.state_hash):
        since += delta.wire_bytes
        try:
            delta = await chain.manifest(source, run, delta.base_seq, trust)
        except LookupError:
            break
    commit = Commit(
        seq=seq,
        head=newest,
        manifest=manifest,
        since_full=since,
        full_bytes=full.wire_bytes,
        full_object=_object(full),
    )
    beside = subjects.WEIGHT_MANIFEST.at(run=run, version=newest.version)
    async for stored in source.history(chain.STREAM, beside, start=newest.manifest_seq + 1):
        try:
            other = await chain.manifest(source, run, stored.seq, trust)
        except (WeightError, LookupError):
            continue
        if other.base_version < 0 and other.state_hash == newest.state_hash:
            commit = with_full_snapshot(commit, other, stored.seq, signer)
    return commit
