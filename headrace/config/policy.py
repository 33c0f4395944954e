"""Sections of the policy: shape, engine, numerics, published weights."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from headrace.config.base import (
    Amount,
    Count,
    Device,
    Option,
    OptionalPath,
    Path,
    Positive,
    Prompt,
    PublicKey,
    Section,
    Share,
    Text,
    Threads,
    Token,
)


class Policy(Section, frozen=True, kw_only=True):
    """The policy's shape. The default is tiny; a Hugging Face folder in `checkpoint` replaces all of it."""

    provider: Literal["native", "transformers", "auto"] = "native"
    """The code that computes the policy: ``native``, headrace's own model, the only one with exact mode;
    ``transformers``, any causal model of that library (headrace[models]). ``auto``: native where it knows the
    checkpoint's type and `engine.exact` is true, otherwise transformers."""
    checkpoint: OptionalPath = ""
    """Hugging Face folder with the weights that the run begins with; empty: a new policy of the dimensions below."""
    renderer: Text = "auto"
    """Format of conversations. ``auto`` uses the checkpoint's tokenizer and chat template; ``terse`` is the format of
    policies that headrace makes itself; otherwise the wire syntax of calls (``hermes``, ``qwen_xml``, ``glm``,
    ``kimi_k2``, ``deepseek``, ``dsml``, ``harmony``, ``mistral``, ``minimax``, ``llama3``, ``pythonic``) or
    ``module:attribute``."""
    chat_template: OptionalPath = ""
    """A Jinja file that replaces the checkpoint's chat template."""
    template_kwargs: dict[str, bool | int | float | str] = msgspec.field(default_factory=dict)
    """Variables for the chat template, such as ``enable_thinking = false``."""
    system: Prompt = ""
    """The system prompt in a chat format; empty: the built-in one (headrace/rendering/registry.py), which tasks without
    tools do not get."""
    unprotected: bool = False
    """Train a checkpoint also with a learning rate or beyond positions that `headrace check` refuses."""
    dim: Positive = 96
    """Width of the hidden state, in elements."""
    layers: Annotated[int, Meta(ge=1, le=1024)] = 2
    """Number of decoder layers, each with attention and a mixture of experts."""
    heads: Positive = 3
    """Query heads of a layer."""
    kv_heads: Positive = 1
    """Key-value heads of a layer, each shared by equally many query heads; a divisor of `heads`."""
    head_dim: Positive = 32
    """Width of one head, in elements; even, because of the rotary embedding."""
    experts: Positive = 8
    """Experts of a layer."""
    top_k: Positive = 2
    """Experts that each token uses in a layer; at most `experts`."""
    expert_dim: Positive = 96
    """Inner width of one expert, in elements."""
    vocab: Positive = 640
    """Number of token ids; the tokenizer that is trained for a new policy has at most as many."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the weights of a new policy; a checkpoint has its own."""
    expert_format: Literal["", "mxfp8", "nvfp4"] = ""
    """Number format in which experts are served and multiplied; empty is `dtype`. headrace/kernels/mxfp8.py has the
    table. nvfp4 is experimental: one process, the embedded engine."""


class Engine(Section, frozen=True, kw_only=True):
    """The engine that samples."""

    kind: Text = "embedded"
    """embedded, sglang, vllm, an installed plugin of ``headrace.engines``, or module:attribute."""
    exact: bool = True
    """Sample with exactly the bits of the trainer's scoring, for any batch. The engine refuses to start on a machine
    where the numerics probe finds no exact arithmetic."""
    max_batch: Annotated[int, Meta(ge=1, le=65536)] = 64
    """Most requests that an engine works on at once; the embedded engine counts those of users and all others apart."""
    device: Device = "auto"
    """Device of the embedded engine: auto (the first CUDA device, else the CPU), cpu, cuda or cuda:N. In exact mode it
    must be of the kind that `trainer.device` is. Several rollout actors of a machine may each name their own. Other
    engines choose their devices themselves."""
    cache_share: Share = 0.2
    """Share of a GPU's memory that the embedded engine takes for keys and values when it starts. The
    engine also holds two copies of the weights there. On a CPU the cache grows as it is used."""
    threads: Threads = 1
    """Torch threads of the embedded engine."""
    options: dict[str, Option | list[Option]] = {}
    """Options of the engine in a type of its own, [engine.options]; docs/engines.md has the keys of sglang and vllm."""


class Numerics(Section, frozen=True, kw_only=True):
    """Differences between sampler and trainer: limits per engine, as in EngineMismatch; 0 is no limit."""

    on_mismatch: Literal["warn", "mask", "stop", "roll_back"] = "warn"
    """The action above a limit. warn: an event. mask: tokens whose ratio is beyond `mask_ratio` in either direction
    have no gradient. stop: the step is refused. roll_back: the step is refused, and the weights return to the last
    version that was followed by bound + 1 batches within the limits."""
    limit_k3: Amount = 0.0
    """Limit of the mean of k3, an estimate of the KL divergence between sampler and trainer, in nats a token."""
    mask_ratio: Annotated[float, Meta(ge=1.0, le=1e12)] = 2.0
    """Factor between the trainer's and the sampler's probability beyond which `mask` takes a token's gradient away."""
    replay_plausible: Share = 0.0
    """Share of the weakest live choice's score below which a recorded expert is not replayed; 0 replays all."""
    recompute: bool = False
    """Keep no activations inside layers and compute them again in backward: less memory, the same bits."""


class Weights(Section, frozen=True, kw_only=True):
    """How versions are published, and which parts of them a node keeps."""

    codec: Literal["d8-zstd", "d10-zstd"] = "d8-zstd"
    """Encoding of deltas: d10 is a quarter to a half smaller and half as fast; it suits slow links."""
    anchor_every: Positive = 32
    """Versions from one full snapshot to the next. A node that joins late starts from a full snapshot."""
    keep: Annotated[int, Meta(ge=2, le=2**31 - 1)] = 2
    """Number of newest versions that a node keeps as files, besides pinned ones: requests are served by the newest."""
    precision: Literal["as_trained", "bf16", "mxfp8"] = "as_trained"
    """The published bytes: the trainer's, or those rounded once by the sender. Engines serve exactly these. With bf16
    a float32 trainer rounds its weights itself after every step: it computes in float32 on the numbers that are served,
    so exact mode holds and deltas are those of bf16, also on a CPU without bf16 instructions."""
    shards: Annotated[int, Meta(ge=1, le=65536)] = 1
    """Number of parts of a version that are encoded and fetched separately."""
    want: tuple[Path, ...] = ()
    """Tensors that this node needs, such as model.layers.3.*: it stages only their shards. Empty: all."""
    collect_chains: Count = 0
    """Number of newest chains (a full snapshot and the deltas after it) that stay in the stream, at least 2; 0 keeps
    all versions."""
    full_snapshots_url: Text = ""
    """Where full snapshots are, as a URL of fsspec that sender and receivers reach: /mnt/weights, s3://bucket/prefix or
    another; `<run>/` is added. Empty: a folder in the run's folder, for a run on one machine. s3 needs pip install
    'headrace[s3]'; keys and endpoints come from fsspec's and the store's own files and variables. Deltas, manifests and
    heads are in the stream HR_WEIGHTS."""
    memory_dir: OptionalPath = ""
    """Folder in memory, such as /dev/shm, for the files of versions on this node: the trainer's, the sender's, the
    receiver's and the servers', which are links to one file. `headrace-<run>/` is added. Empty: the run's folder."""
    region_dir: OptionalPath = ""
    """Folder that the nodes of this region share, for one copy of each full snapshot that they read; empty: every node
    reads `full_snapshots_url` itself. Its file system needs locks (flock)."""
    publishers: tuple[PublicKey, ...] = ()
    """Public keys (U...) whose versions are accepted; empty: weight_publisher.pub of the credentials folder."""
    unsigned: bool = False
    """Accept versions without a signature."""
    region: Token = "local"
    """Region of this node in the records of staged versions, on the live page and in traces."""
