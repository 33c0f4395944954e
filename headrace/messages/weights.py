"""A version on the wire: chunks, then the manifest, then the head record.

Some fields and one type keep an older name on the wire (`name=`, `@message`), so that recorded runs still decode and
their signatures still hold.
"""

import msgspec

from headrace.messages.base import Count, Finite, Message, Version, message


class TensorInfo(msgspec.Struct, frozen=True):
    """One published tensor: dtype as in safetensors (``BF16``), shape, and the shard that carries it."""

    name: str
    dtype: str
    shape: tuple[Count, ...]
    shard: Count = 0


class ChunkInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One chunk, named by its stream sequence; 0 in an object."""

    shard: Count
    seq: Count
    stream_seq: Count
    bytes: Count
    sha256: str


@message("weight_chunk")
class WeightChunk(Message, frozen=True, kw_only=True):
    """A chunk of packed frames; at most 1 MiB as a message."""

    run: str
    version: Count
    shard: Count
    seq: Count
    data: bytes


@message("weight_manifest")
class WeightManifest(Message, frozen=True, kw_only=True):
    """The parts of a version: tensors, chunks and hashes. Stored after its chunks."""

    run: str
    version: Count
    base_version: Version
    """-1 for a full snapshot, which needs no base."""
    base_seq: Count = 0
    """Stream sequence of the base version's manifest; 0 for a full snapshot."""
    step: Count
    tensors: tuple[TensorInfo, ...]
    chunks: tuple[ChunkInfo, ...]
    block_hashes: bytes = msgspec.field(name="slab_hashes")
    """16 bytes (xxh3-128) per block in tensor order: the state after this version."""
    state_hash: str
    base_hash: str
    parent: str = ""
    """sha256 of the base version's manifest: the chain can be audited."""
    raw_bytes: Count
    wire_bytes: Count
    changed: Count
    elements: Count
    learning_rate: Finite = 0.0
    encode_s: Finite = 0.0
    precision: str = ""
    """The rounding from the trainer's bytes to the published bytes; empty when the two are equal."""
    source_hash: str = ""
    """State hash of the trainer's file, where the published bytes are rounded."""
    detached: bool = False
    """Of a full snapshot: its chunks are no records of the stream. They follow each other, in the order of `chunks`, in
    one object at `[weights] full_snapshots_url`; `stream_seq` is 0."""
    signer: str = ""
    """Public key (an NKEY, ``U...``) of the publisher; empty: unsigned."""
    signature: bytes = b""
    """Ed25519 over `weights.signing.statement`, 64 bytes."""


@message("weight_head")
class WeightHead(Message, frozen=True, kw_only=True):
    """The commit point of a version: receivers act on head records alone. Written with an expected sequence."""

    run: str
    version: Count
    manifest_seq: Count
    state_hash: str
    full_version: Count = msgspec.field(name="anchor_version")
    full_seq: Count = msgspec.field(default=0, name="anchor_seq")
    """Stream sequence of the newest full snapshot's manifest: where a late joiner starts."""
    after: Version = -1
    """Stream sequence of the head record before it, 0 for the first: a signed head fits one place in the stream."""
    source_hash: str = ""
    """State hash of the trainer's file, where the published bytes are rounded."""
    signer: str = ""
    signature: bytes = b""


@message("weights_staged")
class WeightsStaged(Message, frozen=True, kw_only=True):
    """A receiver has a verified copy of a version on its node."""

    run: str
    node: str
    region: str
    version: Count
    path: str
    state_hash: str
    stage_s: Finite


@message("weights_swapped")
class WeightsSwapped(Message, frozen=True, kw_only=True):
    """An engine serves a version from now on."""

    run: str
    rollout: str
    node: str
    version: Count
    state_hash: str
    pause_ms: Finite
