"""Sections of the policy and of who runs it: shape, engine, numerics, published weights."""

from typing import Literal

from headrace.config.base import Section


class Policy(Section, frozen=True, kw_only=True):
    """The tiny default; a Hugging Face folder in `checkpoint` replaces all of it."""

    checkpoint: str = ""
    dim: int = 96
    layers: int = 2
    heads: int = 3
    kv_heads: int = 1
    head_dim: int = 32
    experts: int = 8
    top_k: int = 2
    expert_dim: int = 96
    vocab: int = 640
    dtype: Literal["float32", "bfloat16"] = "float32"
    expert_format: Literal["", "mxfp8"] = ""
    """How experts are served and multiplied; empty is `dtype`. The table is in headrace/kernels/mxfp8.py."""


class Engine(Section, frozen=True, kw_only=True):
    """What samples."""

    kind: Literal["embedded", "sglang"] = "embedded"
    exact: bool = True
    """Same bits as the trainer's scoring, whatever the batch; refused where the numerics probe finds no way."""
    max_batch: int = 64
    threads: int = 1
    url: str = ""
    """An SGLang server that runs already. One rollout actor per server."""
    python: str = ""
    """Starts a server instead: the interpreter of the environment that has SGLang (docs/sglang.md)."""
    args: tuple[str, ...] = ()
    """Further arguments of the server that is started."""
    swap: Literal["in_place", "abort"] = "in_place"
    """Change weights under running requests, or take them back and send the rest of them again."""
    sparse: bool = False
    """Write only what differs between versions into the server's weights (headrace/engines/sglang_sparse.py)."""
    deadline_s: float = 600.0
    """For one turn on a server."""
    start_s: float = 600.0
    """For a server to come up."""
    stage_dir: str = "/dev/shm"
    """Memory in which the checkpoint lies that a server loads."""


class Numerics(Section, frozen=True, kw_only=True):
    """Differences between sampler and trainer: limits per engine, as in EngineMismatch; 0 is no limit."""

    on_mismatch: Literal["warn", "mask", "stop", "roll_back"] = "warn"
    """Above a limit: say so; let tokens whose ratio is beyond `mask_ratio`, either way up, teach nothing; refuse the
    step; or refuse it and go back to the last version that bound + 1 further batches within the limits followed."""
    limit_max_abs_dlp: float = 0.0
    limit_k3: float = 0.0
    limit_differ: float = 0.0
    limit_flips: float = 0.0
    mask_ratio: float = 2.0
    replay_plausible: float = 0.0
    """Share of the weakest live choice's score below which a recorded expert is not replayed; 0 replays all."""
    recompute: bool = False
    """Keep no activations inside layers and compute them again in backward: less memory, the same bits."""


class Weights(Section, frozen=True, kw_only=True):
    """How versions are published, and what a node takes of them."""

    codec: Literal["d8-zstd", "d8-lz4", "d10-zstd"] = "d8-zstd"
    """d10 is a quarter to a half smaller and half as fast: for thin links."""
    anchor_every: int = 32
    """Versions after which an anchor is laid beside the deltas, for late joiners."""
    keep: int = 4
    """Newest versions that a node keeps as files, besides pinned ones; at least staleness + 2."""
    precision: Literal["as_trained", "bf16", "mxfp8"] = "as_trained"
    """What is published: the trainer's bytes, or those rounded once by the sender. Engines serve exactly these."""
    shards: int = 1
    """Parts of a version that are encoded and fetched apart."""
    encoders: int = 1
    """Threads of the sender that encode shards; the bytes do not depend on it."""
    want: tuple[str, ...] = ()
    """Tensors that this node needs, such as model.layers.3.*: it stages their shards alone. Empty: all."""
    fold_every: int = 0
    """Versions that the sender folds into one delta, for who lags; 0 folds nothing."""
    collect_chains: int = 0
    """Newest chains (an anchor and what follows it) that stay in the stream, at least 2; 0 keeps all versions."""
    publishers: tuple[str, ...] = ()
    """Public keys (U...) whose versions are taken; empty: weight_publisher.pub of the credentials folder."""
    unsigned: bool = False
    """Take versions that nobody signed."""
    region: str = "local"

    def __post_init__(self) -> None:
        if self.collect_chains == 1 or self.collect_chains < 0:
            raise ValueError("collect_chains is 0 or at least 2: joiners may still read the last chain but one")
