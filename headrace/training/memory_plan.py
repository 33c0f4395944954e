"""Bytes that a trainer needs per device, by cause, computed from formulas: no allocation, no import of torch.

The idea: parameters are counted from the policy's shape; activations are the tensors that one layer's autograd graph
saves, written down term by term (`activation_bytes`). A test compares both with the model on the meta device. The
trainer actor refuses to start when its plan is larger than the device's memory, instead of failing hours later.

The plan is the larger of two phases: re-scoring, when rebuilt versions are in memory and gradients are not; and
backward, with activations, the gradients, and either the head's chunk of logits or the temporary tensors of one
operation. These are a small share of a deep policy's activations; of a policy of two layers they are a third.

Not counted: buffers of the communication library, fragmentation, imbalance between experts, the CUDA context. Leave a
fifth of the memory free for them.
"""

import time
from collections.abc import Callable
from typing import Literal, NamedTuple

from headrace.config import Config
from headrace.policy.adapters import shape
from headrace.policy.config import PolicyConfig

GIB = 1 << 30
_CHUNK = 1024
"""Rows of logits at once, `kernels.selected_logprob.CHUNK`."""
_BLOCK = 64
"""Keys of a block, `kernels.block_attention.BLOCK`."""
_DTYPES: dict[int, Literal["float32", "bfloat16"]] = {4: "float32", 2: "bfloat16"}
"""Bytes of a moment's element to its dtype."""


class Layout(NamedTuple):
    """The division of the work over devices, and the copies that are held."""

    devices: int = 1
    """Devices that share parameters, masters, moments and gradients (FSDP)."""
    context: int = 1
    """Devices that share the tokens of a sequence (context parallelism); it divides `devices`."""
    tokens: int = 8192
    """Inputs of a micro-batch, or of the longest sequence if that is longer."""
    recompute: bool = False
    """Only the inputs of layers are kept; backward recomputes the other activations, one layer at a time."""
    moment_bytes: int = 4
    """Bytes of an element of one of AdamW's two moments: 4, or 2 (`algorithm.moments`)."""
    versions: int = 1
    """Largest number of earlier versions that re-scoring rebuilds: the staleness bound."""
    reference: bool = False
    """A reference policy for the KL term."""
    rounded: bool = False
    """A float32 policy that is served as bfloat16: its masters are not its weights."""
    snapshots: int = 0
    """Copies of masters and moments: 2 with the guard, 1 more with several minibatches."""
    blocked: bool = False
    """Attention by blocks of keys, as in exact mode on a CPU: its backward pass holds a block's scores."""


class MemoryPlan(NamedTuple):
    """Bytes on each device, by cause."""

    weights: int
    masters: int
    moments: int
    gradients: int
    """Of one micro-batch, and their float32 sums."""
    gathered: int
    """Layers that are gathered from all devices for a forward or backward pass."""
    activations: int
    head: int
    """The chunk of logits and its gradients, before the layers' backward pass."""
    temporary: int
    """In the backward pass of one layer, after that of the head."""
    versions: int
    reference: int
    snapshots: int

    @property
    def total(self) -> int:
        """The larger of the two phases."""
        state = self.weights + self.masters + self.moments + self.gathered + self.reference + self.snapshots
        return state + max(self.versions, self.backward)

    @property
    def backward(self) -> int:
        """Bytes that a micro-batch adds."""
        return self.gradients + self.activations + max(self.head, self.temporary)


class Parameters(NamedTuple):
    """Counts of elements."""

    total: int
    frozen: int
    """Without gradient and master: corrections of routers; with an adapter, everything else."""
    experts: int
    """In mixtures, without shared experts."""
    largest_layer: int


def parameters(config: PolicyConfig) -> Parameters:
    """Numbers of elements of the parameters of `policy.model.Model`."""
    layers = [_layer(config, index) for index in range(config.layers)]
    outside = config.vocab * config.dim * (1 if config.tied else 2) + config.dim
    frozen = config.experts * config.sparse_layers if config.scores == "sigmoid" else 0
    experts = 3 * config.experts * config.expert_dim * config.dim * config.sparse_layers
    whole, adapter = sum(layers) + outside, shape.parameters(config)
    return Parameters(whole + adapter, whole if adapter else frozen, experts, max(layers, default=0))


def _layer(c: PolicyConfig, index: int) -> int:
    count = 2 * c.dim
    if c.latent:
        low, width = c.latent, c.heads * (c.latent.nope_dim + c.latent.rope_dim)
        count += low.q_rank * (c.dim + 1 + width) if low.q_rank else width * c.dim
        count += (low.kv_rank + low.rope_dim) * c.dim + low.kv_rank
        count += c.heads * (low.nope_dim + low.value_dim) * low.kv_rank + c.dim * c.heads * low.value_dim
    else:
        width = (c.heads + 2 * c.kv_heads) * c.head_dim
        count += width * c.dim + c.dim * c.heads * c.head_dim + (2 * c.head_dim if c.qk_norm else 0)
        count += (width if c.qkv_bias else 0) + (c.dim if c.out_bias else 0)
    if c.gpt_oss:
        count += c.heads + c.experts * (1 + 2 * c.expert_dim + c.dim)  # sinks, biases of router and experts
    if not c.sparse(index):
        return count + 3 * (c.dense_dim or c.expert_dim) * c.dim
    count += c.experts * c.dim + 3 * c.experts * c.expert_dim * c.dim + 3 * c.shared_experts * c.expert_dim * c.dim
    return count + (c.experts if c.scores == "sigmoid" else 0)


def element_bytes(config: PolicyConfig) -> int:
    """Bytes of one served weight and of one activation."""
    return {"float32": 4, "bfloat16": 2}[config.dtype]


def activation_bytes(config: PolicyConfig, sparse: bool, context: int = 1) -> int:
    """Bytes per token that one layer saves for backward, without `score_bytes`.

    context: devices that share a sequence. The bytes are then per token of one device, and attention's output counts
    twice, because it is kept by heads and by tokens.

    Each term is a saved tensor: inputs of norms and products, rotated queries and keys, values, attention's output and
    log-sum-exp, the MLP's inner width, and in float32 what norms and routing keep per row. An adapter saves the outputs
    of its A; the inputs of fixed weights stay counted, although few of them are saved then.
    """
    c, size = config, element_bytes(config)
    wide, row = 4 * c.dim, 2  # both norms' inputs and outputs; both norms' scales
    if c.latent:
        low, head = c.latent, c.latent.nope_dim + c.latent.rope_dim
        wide += 4 * c.heads * head + c.heads * low.value_dim + 2 * low.kv_rank + 2 * low.q_rank
        row += 1 + c.heads + (1 if low.q_rank else 0)
    else:
        wide += 2 * (c.heads + c.kv_heads) * c.head_dim  # queries, keys, values, the output
        row += c.heads
        if c.qk_norm:  # normalising queries and keys keeps the whole product
            wide += (c.heads + 2 * c.kv_heads) * c.head_dim
            row += c.heads + c.kv_heads
    if c.gpt_oss:  # copies of queries, keys, values and the output by sequence; the output in float32, its totals
        wide += 2 * (c.heads + c.kv_heads) * c.head_dim
        row += c.heads * (c.head_dim + 1)
    if context > 1 and not c.latent:  # latent values are cut out of the output in any case
        wide += c.heads * c.head_dim
    if c.adapter:
        wide += len(shape.targeted(c, 0)) * c.adapter.rank
    if not sparse:
        return size * (wide + 3 * (c.dense_dim or c.expert_dim)) + 4 * row
    if c.gpt_oss:  # autograd differentiates the experts: their input rows, nine inner tensors, the output in float32
        wide += c.top_k * (9 * c.expert_dim + c.dim)
        row += c.top_k * c.dim
    else:
        wide += c.top_k * 2 * c.expert_dim + 3 * c.shared_experts * c.expert_dim
    row += c.experts + 4 * c.top_k + 1  # scores; experts as int64, two tensors of gates; their sum
    if c.scores == "sigmoid":
        row += 3 * c.experts + (c.dim if c.dtype != "float32" else 0)  # the router's product is float32
    if c.expert_format == "mxfp8":
        wide += c.dim  # the rounded input of the experts
    return size * wide + 4 * row


def temporary_bytes(config: PolicyConfig, sparse: bool, blocked: bool = False) -> int:
    """Bytes per token of the temporary tensors that the backward pass of one layer holds at once.

    Of the experts: their gathered rows and the gradients of their inner width, each until its last use. Of attention:
    gradients and copies of queries, keys and values, and with `blocked` the scores of 64 keys and their gradients; the
    MLP's activations are freed before. Three gradients of the hidden state are alive in both.
    """
    c, size = config, element_bytes(config)
    inner, k = c.expert_dim if sparse else c.dense_dim or c.expert_dim, c.top_k if sparse else 1
    wide = (
        4 if size == 4 else 8
    )  # bytes of a float32 copy and a product of it; the copy is the tensor itself in float32
    mlp = size * k * max(5 * inner, 2 * (c.dim + inner) if sparse else 0)
    if sparse:
        mlp = max(mlp, size * k * (c.dim + 2 * inner) + wide * k * inner)
    freed = size * (2 * c.dim + (2 if sparse else 3) * k * inner) + 4 * (c.experts + 4 * k if sparse else 0)
    head = c.latent.nope_dim + c.latent.rope_dim if c.latent else c.head_dim
    attention = size * head * (2 * c.heads + 4 * c.kv_heads)
    if blocked:
        attention = head * (size * (4 * c.heads + 6 * c.kv_heads) + 4 * c.heads) + 2 * wide * _BLOCK * c.heads
    return max(mlp, attention - freed) + 3 * size * c.dim


def score_bytes(config: PolicyConfig, layer: int, tokens: int) -> int:
    """Bytes per token that a layer's attention saves for backward, in one sequence of `tokens`: 0 where it is fused.

    gpt_oss has no fused attention here. For each block of 64 keys that is not left out, masked keys included, a query
    saves its probabilities in float32 and, where that is another one, in the policy's dtype, a factor, and the mask.
    """
    c, window = config, config.seen(layer)
    if not c.gpt_oss:
        return 0
    blocks = 0  # for each query of a sequence
    for first in range(0, tokens, _BLOCK):
        seen = first // _BLOCK + 1 - (max(0, first - window + 1) // _BLOCK if window else 0)
        blocks += seen * min(_BLOCK, tokens - first)
    each = c.heads * (_BLOCK * (4 if c.dtype == "float32" else 6) + 4) + _BLOCK * c.heads // c.kv_heads
    return -(-blocks * each // tokens)


def plan(config: PolicyConfig, layout: Layout) -> MemoryPlan:
    """The plan of one device. ValueError when `layout.context` does not divide the devices or the key-value heads."""
    if layout.devices % layout.context:
        raise ValueError(f"context parallelism of {layout.context} does not divide {layout.devices} devices")
    if config.kv_heads % layout.context:
        raise ValueError(f"context parallelism of {layout.context} does not divide {config.kv_heads} key-value heads")
    count, size = parameters(config), element_bytes(config)
    share = -(-count.total // layout.devices)
    trained = -(-(count.total - count.frozen) // layout.devices)
    # Masters are the weights themselves, but for trained experts on the eight-bit grid.
    same = config.dtype == "float32" and not layout.rounded
    on_grid = config.expert_format == "mxfp8" and config.adapter is None
    mastered = -(-count.experts // layout.devices) if same else trained
    masters = 0 if same and not on_grid else 4 * mastered
    # In several processes the masters are the shards: rounded weights exist only while a layer is gathered, and a
    # micro-batch's gradients only until they are added to the float32 sums.
    sharded = layout.devices > 1
    weights, gradients = size * share, (4 if config.dtype == "float32" else 4 + size) * trained
    if sharded and config.dtype != "float32":
        weights, gradients = size * -(-count.frozen // layout.devices), 4 * trained
    moments = 2 * layout.moment_bytes * trained
    tokens = -(-layout.tokens // layout.context)
    per_layer = [
        activation_bytes(config, config.sparse(index), layout.context) + score_bytes(config, index, tokens)
        for index in range(config.layers)
    ]
    activations = tokens * sum(per_layer)
    if layout.recompute:
        activations = tokens * (config.layers * config.dim * size + max(per_layer, default=0))
    head = min(tokens, _CHUNK) * config.vocab * 4 * 3 + 4 * config.vocab * config.dim + tokens * config.dim * size * 3
    temporary = tokens * max(
        (temporary_bytes(config, config.sparse(index), layout.blocked) for index in range(config.layers)), default=0
    )
    gathered = 0
    if sharded:  # two layers ahead and one's gradient, and the embedding and the head
        outside = config.vocab * config.dim * (1 if config.tied else 2)
        gathered = 3 * size * count.largest_layer + size * outside
        gathered += 2 * 4 * max(count.largest_layer, outside)  # one's gradient in float32, sent and received
    return MemoryPlan(
        weights=weights,
        masters=masters,
        moments=moments,
        gradients=gradients,
        gathered=gathered,
        activations=activations,
        head=head,
        temporary=temporary,
        # Shards show another version while it is scored, so their masters are copied aside.
        versions=layout.versions * size * share + (4 * trained if sharded and layout.versions else 0),
        reference=size * share if layout.reference else 0,
        snapshots=layout.snapshots * (masters + moments + (4 * trained if same else 0)),
    )


def fitting(config: PolicyConfig, layout: Layout, available: int, spare: float = 0.2) -> Layout | None:
    """The cheapest layout whose plan leaves the share `spare` of the available bytes free; None when none does.

    Tried in order of their cost: recompute, context parallelism, smaller moments.
    """
    degrees = [n for n in range(1, layout.devices + 1) if layout.devices % n == 0 and config.kv_heads % n == 0]
    for moment_bytes in (4, 2):
        for context in degrees:
            for recompute in (False, True):
                tried = layout._replace(recompute=recompute, context=context, moment_bytes=moment_bytes)
                if plan(config, tried).total <= (1.0 - spare) * available:
                    return tried
    return None


def settings(layout: Layout) -> dict[str, str | int | bool]:
    """The configuration keys that give this layout."""
    return {
        "trainer.ranks": layout.devices,
        "trainer.micro_tokens": layout.tokens,
        "trainer.context_ranks": layout.context,
        "numerics.recompute": layout.recompute,
        "algorithm.moments": _DTYPES[layout.moment_bytes],
    }


def layout_of(config: Config) -> Layout:
    """The layout of the trainer actor under a configuration."""
    algorithm, numerics = config.algorithm, config.numerics
    guarded = algorithm.guard_k1 > 0.0 or numerics.on_mismatch == "roll_back"
    return Layout(
        devices=config.trainer.ranks,
        context=config.trainer.context_ranks,
        tokens=config.trainer.micro_tokens,
        recompute=numerics.recompute,
        moment_bytes=2 if algorithm.moments == "bfloat16" else 4,
        versions=config.curriculum.staleness,
        reference=algorithm.kl_weight > 0.0,
        rounded=config.weights.precision == "bf16",
        snapshots=(2 if guarded else 0) + (1 if algorithm.minibatches > 1 else 0),
        blocked=config.engine.exact and not config.trainer.device.startswith("cuda"),
    )


FREED_S = 10.0


def freed(needed: int, available: Callable[[], int]) -> int:
    """The available bytes as soon as they are enough, else after `FREED_S`: a trainer that was killed before this one
    may still hold them."""
    deadline = time.monotonic() + FREED_S
    while (free := available()) < needed and time.monotonic() < deadline:
        time.sleep(0.2)
    return free
