"""A version on the wire: chunks, then the manifest, then the head record."""

import msgspec

from headrace.messages.base import Message, message


class TensorInfo(msgspec.Struct, frozen=True):
    """One published tensor: dtype as safetensors spells it (``BF16``), shape, and which shard carries it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: int = 0


class ChunkInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One chunk by its stream sequence."""

    shard: int
    seq: int
    stream_seq: int
    bytes: int
    sha256: str


@message("weight_chunk")
class WeightChunk(Message, frozen=True, kw_only=True):
    """Packed slab frames; at most 1 MiB as a message."""

    run: str
    version: int
    shard: int
    seq: int
    data: bytes


@message("weight_manifest")
class WeightManifest(Message, frozen=True, kw_only=True):
    """What a version consists of; published after its chunks."""

    run: str
    version: int
    base_version: int
    """-1 for an anchor, which needs no base."""
    base_seq: int = 0
    """Stream sequence of the base version's manifest; 0 for an anchor."""
    step: int
    tensors: tuple[TensorInfo, ...]
    chunks: tuple[ChunkInfo, ...]
    slab_hashes: bytes
    """16 bytes (xxh3-128) per slab in tensor order: the state after this version."""
    state_hash: str
    base_hash: str
    parent: str = ""
    """sha256 of the base version's manifest: the chain can be audited."""
    raw_bytes: int
    wire_bytes: int
    changed: int
    elements: int
    learning_rate: float = 0.0
    encode_s: float = 0.0
    precision: str = ""
    """How the published bytes were made of the trainer's; empty: they are the trainer's."""
    source_hash: str = ""
    """State hash of the trainer's file, where the published bytes were made of it."""
    signer: str = ""
    """Public key (an NKEY, ``U...``) of who published it; empty: nobody signed."""
    signature: bytes = b""
    """Ed25519 over `weights.signing.statement`, 64 bytes."""


@message("weight_head")
class WeightHead(Message, frozen=True, kw_only=True):
    """The commit point: receivers act on this alone. Written with an expected sequence."""

    run: str
    version: int
    manifest_seq: int
    state_hash: str
    anchor_version: int
    anchor_seq: int = 0
    """Stream sequence of the newest anchor's manifest: where a late joiner starts."""
    after: int = -1
    """Stream sequence of the head record before it, 0 for the first: a signed head fits one place in the stream."""
    source_hash: str = ""
    """State hash of the trainer's file, where the published bytes were made of it."""
    signer: str = ""
    signature: bytes = b""


@message("weight_fold")
class WeightFold(Message, frozen=True, kw_only=True):
    """A short cut: one delta from an older version straight to a later one. Whoever lags saves bytes by it."""

    run: str
    version: int
    state_hash: str
    base_version: int
    base_hash: str
    manifest_seq: int
    """Stream sequence of the manifest of the folded delta."""
    wire_bytes: int
    signer: str = ""
    signature: bytes = b""


@message("weights_staged")
class WeightsStaged(Message, frozen=True, kw_only=True):
    """A receiver holds a verified copy of a version on its node."""

    run: str
    node: str
    region: str
    version: int
    path: str
    state_hash: str
    stage_s: float


@message("weights_swapped")
class WeightsSwapped(Message, frozen=True, kw_only=True):
    """An engine serves a version from now on."""

    run: str
    rollout: str
    node: str
    version: int
    state_hash: str
    pause_ms: float
