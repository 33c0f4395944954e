"""Bytes that a trainer needs per device, by cause, computed from formulas: no allocation, no import of torch.

The idea: parameters are counted from the policy's shape; activations are the tensors that one layer's autograd graph
saves, written down term by term (`policy.layout.activations`). A test compares both with the model on the meta device.
Exact and ordinary mode keep other tensors of attention; the plan is that of the configuration's mode and of its device.
The trainer actor refuses to start when its plan is larger than the device's memory, instead of failing hours later.

The plan is the largest of three phases: re-scoring, when rebuilt versions are in memory and gradients are not;
backward, with activations, the gradients, and either the head's chunk of logits or the temporary tensors of one
operation, which are a small share of a deep policy's activations and a third of those of a policy of two layers; and
the update, with the gradients and one piece of widened moments.

With `trainer.offload` masters and moments are counted apart, as bytes of the host's memory for each process.

Not counted: buffers of the communication library, fragmentation, imbalance between experts, the CUDA context. Leave a
fifth of the memory free for them. In ordinary mode re-scoring holds the scores of a span over its cache, which grow
with the square of its tokens; they are not counted either (`policy.grouped_attention`).
"""

import time
from collections.abc import Callable
from typing import Literal, NamedTuple

from headrace.config import Config
from headrace.kernels import library
from headrace.policy.config import PolicyConfig
from headrace.policy.layout.activations import Attention, activation_bytes, score_bytes, temporary_bytes
from headrace.policy.layout.sizes import element_bytes, parameters, trained_matrices

GIB = 1 << 30
_CHUNK = 1024
"""Rows of logits at once, `kernels.selected_logprob.CHUNK`."""
_SCALED = 256
"""Elements that share a scale, `algorithms.eight_bit.BLOCK`."""
_PIECE, _PIECE_ROWS = 1 << 22, 64
"""Elements of an update's piece, `algorithms.adamw.PIECE`, and the number that divides its rows."""
Moments = Literal["float32", "bfloat16", "eight_bit"]
MOMENTS: dict[Moments, int] = {"float32": 4, "bfloat16": 2, "eight_bit": 1}
"""Formats of `algorithm.moments` to the bytes of an element, without scales."""
_WIDENED = {4: 0, 2: 8, 1: 18}
"""Bytes of temporary tensors for each element of a piece: both moments in float32; with codes also a quotient, an index
and the new codes."""


class Layout(NamedTuple):
    """The division of the work over devices, and the copies that are held."""

    devices: int = 1
    """Devices that share parameters, masters, moments and gradients (FSDP): those of one node."""
    context: int = 1
    """Devices that share the tokens of a sequence (context parallelism); it divides `devices`."""
    runs: int = 1
    """Runs of tokens that a device computes of each sequence (`policy.token_runs`)."""
    tokens: int = 8192
    """Inputs of a micro-batch, or of the longest sequence if that is longer."""
    recompute: bool = False
    """Only the inputs of layers are kept; backward recomputes the other activations, one layer at a time."""
    moment_bytes: int = 4
    """Bytes of an element of one of AdamW's two moments: 4, 2, or 1 besides its scale (`algorithm.moments`)."""
    versions: int = 1
    """Largest number of earlier versions that re-scoring rebuilds: the staleness bound."""
    reference: bool = False
    """A reference policy for the KL term."""
    rounded: bool = False
    """A float32 policy that is served as bfloat16: its masters are not its weights."""
    snapshots: int = 0
    """Copies of masters and moments: 2 with the guard, 1 more with several minibatches."""
    exact: bool = True
    """Exact mode, in which attention keeps no copies."""
    cpu: bool = False
    """The device is a CPU."""
    offload: bool = False
    """Masters and moments are in the host's memory."""
    nodes: int = 1
    """Nodes with `devices` each, which hold a copy of all parameters, masters and moments each (HSDP)."""


class HostMemory(NamedTuple):
    """Bytes of the host's memory for each process, with `Layout.offload`."""

    masters: int = 0
    moments: int = 0
    gradients: int = 0
    """Of one parameter; of several ranks, of all of a rank's rows."""
    snapshots: int = 0
    versions: int = 0
    """Of several ranks: the masters, copied aside while shards show another version."""
    update: int = 0

    @property
    def total(self) -> int:
        """The larger of re-scoring and the update, with the rest."""
        return self.masters + self.moments + self.snapshots + max(self.versions, self.gradients + self.update)


class MemoryPlan(NamedTuple):
    """Bytes on each device, by cause."""

    weights: int
    masters: int
    moments: int
    gradients: int
    """Of one micro-batch, and their float32 sums."""
    gathered: int
    """Layers that are gathered from all devices for a forward or backward pass, and the gradients of runs of tokens."""
    activations: int
    head: int
    """The chunk of logits and its gradients, before the layers' backward pass."""
    temporary: int
    """In the backward pass of one layer, after that of the head."""
    versions: int
    reference: int
    snapshots: int
    update: int
    """One piece of moments, widened to float32."""
    host: HostMemory
    """Not on the device: what `Layout.offload` moves."""

    @property
    def total(self) -> int:
        """The largest of the three phases."""
        state = self.weights + self.masters + self.moments + self.gathered + self.reference + self.snapshots
        return state + max(self.versions, self.backward, self.gradients + self.update)

    @property
    def causes(self) -> dict[str, int]:
        """Bytes on the device by cause."""
        return {name: value for name, value in self._asdict().items() if name != "host"}

    @property
    def backward(self) -> int:
        """Bytes that a micro-batch adds."""
        return self.gradients + self.activations + max(self.head, self.temporary)


def moment_bytes(config: PolicyConfig, each: int) -> int:
    """Bytes of both moments of all trained parameters. each: `Layout.moment_bytes`."""
    count = parameters(config)
    trained = count.total - count.frozen
    if each > 1:
        return 2 * each * trained
    matrices = trained_matrices(config)
    scales = sum(rows * -(-width // _SCALED) for rows, width in matrices)
    coded = sum(rows * width for rows, width in matrices)
    return 2 * (coded + 4 * scales + 4 * (trained - coded))


def update_bytes(config: PolicyConfig, layout: Layout) -> int:
    """Bytes of the temporary tensors of an update: of one piece of the largest parameter."""
    largest = 0
    for rows, width in trained_matrices(config):
        held = -(-rows // layout.devices)
        piece = max(_PIECE_ROWS, _PIECE // width // _PIECE_ROWS * _PIECE_ROWS)
        largest = max(largest, min(held, piece) * width)
    return _WIDENED[layout.moment_bytes] * largest


def attention_of(config: PolicyConfig, layout: Layout) -> tuple[Attention, str]:
    """How packed sequences attend, and why ordinary mode does not take `varlen_attn`; that is empty where it does."""
    if layout.exact:
        return "blocks" if layout.cpu else "fused", ""
    device, head = "cpu" if layout.cpu else "cuda", config.head_dim
    why = library.attention_refusal(device, config.dtype, head, head, config.gpt_oss)
    if not why:
        return "fused", ""
    return "products" if layout.cpu and config.dtype == "bfloat16" else "padded", why


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
    on_grid = bool(config.expert_format) and config.adapter is None
    mastered = -(-count.experts // layout.devices) if same else trained
    masters = 0 if same and not on_grid else 4 * mastered
    # In several processes the masters are the shards: rounded weights exist only while a layer is gathered, and a
    # micro-batch's gradients only until they are added to the float32 sums.
    sharded = layout.devices * layout.nodes > 1
    weights, gradients = size * share, (4 if config.dtype == "float32" else 4 + size) * trained
    if sharded and config.dtype != "float32":
        weights, gradients = size * -(-count.frozen // layout.devices), 4 * trained
    moments = -(-moment_bytes(config, layout.moment_bytes) // layout.devices)
    tokens = -(-layout.tokens // layout.context)
    attention, _ = attention_of(config, layout)
    per_layer = [
        activation_bytes(config, config.sparse(index), layout.context, attention) + score_bytes(config, index, tokens)
        for index in range(config.layers)
    ]
    activations = tokens * sum(per_layer)
    if layout.recompute:
        activations = tokens * (config.layers * config.dim * size + max(per_layer, default=0))
    head = min(tokens, _CHUNK) * config.vocab * 4 * 3 + 4 * config.vocab * config.dim + tokens * config.dim * size * 3
    temporary = tokens * max(
        (temporary_bytes(config, config.sparse(index), attention) for index in range(config.layers)), default=0
    )
    gathered = 0
    outside = config.vocab * config.dim * (1 if config.tied else 2)
    if sharded:  # two layers ahead and one's gradient, and the embedding and the head
        gathered = 3 * size * count.largest_layer + size * outside
        gathered += 2 * 4 * max(count.largest_layer, outside)  # one's gradient in float32, sent and received
        if layout.nodes > 1:  # its shard of the sum of the nodes before it, and of the sum with its own parts
            gathered += 2 * 4 * -(-max(count.largest_layer, outside) // layout.devices)
    if layout.runs > 1:  # each run's gradient of one layer, and of the embedding and the head
        gathered += layout.runs * size * (count.largest_layer + outside)
    made = MemoryPlan(
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
        update=update_bytes(config, layout),
        host=HostMemory(),
    )
    return _offloaded(made, config, layout, trained) if layout.offload else made


def _offloaded(made: MemoryPlan, config: PolicyConfig, layout: Layout, trained: int) -> MemoryPlan:
    """The plan with masters and moments in the host's memory. trained: elements that a device's process updates."""
    sharded = layout.devices * layout.nodes > 1
    largest = max((rows * width for rows, width in trained_matrices(config)), default=0)
    host = HostMemory(
        masters=4 * trained,
        moments=made.moments,
        gradients=4 * (trained if sharded else largest),
        snapshots=layout.snapshots * (4 * trained + made.moments),
        versions=made.versions if sharded else 0,
        update=made.update,
    )
    weights = element_bytes(config) * -(-parameters(config).frozen // layout.devices) if sharded else made.weights
    versions = 0 if sharded else made.versions
    return made._replace(weights=weights, masters=0, moments=0, snapshots=0, update=0, versions=versions, host=host)


def fitting(config: PolicyConfig, layout: Layout, available: int, spare: float = 0.2) -> Layout | None:
    """The cheapest layout whose plan leaves the share `spare` of the available bytes free; None when none does.

    Tried in order of their cost: recompute, context parallelism, smaller moments.
    """
    degrees = [n for n in range(1, layout.devices + 1) if layout.devices % n == 0 and config.kv_heads % n == 0]
    for each in MOMENTS.values():
        for context in degrees:
            for recompute in (False, True):
                tried = layout._replace(recompute=recompute, context=context, moment_bytes=each)
                if plan(config, tried).total <= (1.0 - spare) * available:
                    return tried
    return None


def settings(layout: Layout) -> dict[str, str | int | bool]:
    """The configuration keys that give this layout."""
    return {
        "trainer.ranks": layout.devices * layout.nodes,
        **({"trainer.nodes": layout.nodes} if layout.nodes > 1 else {}),
        "trainer.micro_tokens": layout.tokens,
        "trainer.context_ranks": layout.context,
        "numerics.recompute": layout.recompute,
        "algorithm.moments": next(name for name, each in MOMENTS.items() if each == layout.moment_bytes),
        "trainer.offload": "optimizer" if layout.offload else "none",
    }


def layout_of(config: Config) -> Layout:
    """The layout of the trainer actor under a configuration."""
    algorithm, numerics = config.algorithm, config.numerics
    guarded = algorithm.guard_k1 > 0.0 or numerics.on_mismatch == "roll_back"
    return Layout(
        devices=config.trainer.ranks // config.trainer.nodes,
        nodes=config.trainer.nodes,
        context=config.trainer.context_ranks,
        runs=config.trainer.token_runs // config.trainer.context_ranks,
        tokens=config.trainer.micro_tokens,
        recompute=numerics.recompute,
        moment_bytes=MOMENTS[algorithm.moments],
        versions=config.curriculum.staleness,
        reference=algorithm.kl_weight > 0.0,
        rounded=config.weights.precision == "bf16",
        snapshots=(2 if guarded else 0) + (1 if algorithm.minibatches > 1 else 0),
        exact=config.engine.exact,
        cpu=not config.trainer.device.startswith("cuda"),
        offload=config.trainer.offload == "optimizer" and config.trainer.device != "cpu",
    )


FREED_S = 10.0


def freed(needed: int, available: Callable[[], int]) -> int:
    """The available bytes as soon as they are enough, else after `FREED_S`: a trainer that was killed before this one
    may still hold them."""
    deadline = time.monotonic() + FREED_S
    while (free := available()) < needed and time.monotonic() < deadline:
        time.sleep(0.2)
    return free
