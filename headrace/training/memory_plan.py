"""Bytes that a trainer needs per device, by cause, computed from formulas: no allocation, no import of torch.

The idea: parameters are counted from the policy's shape; activations are the tensors that one layer's autograd graph
saves, written down term by term (`policy.layout.activations`). A test compares both with the model on the meta device.
Exact and ordinary mode keep other tensors of attention; the plan is that of the configuration's mode and of its device.
The trainer actor refuses to start when its plan is larger than the device's memory, instead of failing hours later.

The plan is the largest of three phases: re-scoring, with rebuilt versions, the cache of the longest sequence and
without gradients; backward, with activations, the gradients, and either the head's chunk of logits or the temporary
tensors of one operation, which are a small share of a deep policy's activations and a third of those of a policy of two
layers; and the update, with the gradients and the temporary tensors of one parameter.

With `trainer.offload` masters and moments are counted apart, as bytes of the host's memory for each process.

Not counted: buffers of the communication library, fragmentation, imbalance between experts, the CUDA context. Leave a
fifth of the memory free for them. In ordinary mode on a CPU re-scoring holds the scores of a piece over its cache,
heads x piece x sequence; they are not counted either (`policy.grouped_attention`).
"""

import time
from collections.abc import Callable
from typing import NamedTuple

from headrace.kernels import library
from headrace.policy.config import PolicyConfig
from headrace.policy.layout.activations import Attention, activation_bytes, score_bytes, temporary_bytes
from headrace.policy.layout.rescoring import scoring_bytes
from headrace.policy.layout.sizes import element_bytes, layer_experts, parameters, trained_matrices
from headrace.training.figures.layout import MOMENTS, Layout, changed_share, layout_of, settings

__all__ = [
    "GIB",
    "HostMemory",
    "Layout",
    "MemoryPlan",
    "attention_of",
    "fitting",
    "freed",
    "layout_of",
    "moment_bytes",
    "plan",
    "settings",
    "undo_bytes",
    "update_bytes",
]

GIB = 1 << 30
_CHUNK = 1024
"""Rows of logits at once, `kernels.selected_logprob.CHUNK`."""
_SCALED = 256
"""Elements that share a scale, `algorithms.eight_bit.BLOCK`."""
_PIECE, _PIECE_ROWS = 1 << 22, 64
"""Elements of an update's piece, `algorithms.adamw.PIECE`, and the number that divides its rows."""
_SPARSE = 1 / 4
"""Share of changed elements above which an undo entry holds the whole parameter, `served.versions`."""
_WIDENED = {4: 0, 2: 8, 1: 18}
"""Bytes of temporary tensors for each element of a piece: both moments in float32; with codes also a quotient, an index
and the new codes."""


class HostMemory(NamedTuple):
    """Bytes of the host's memory for each process, with `Layout.offload`."""

    masters: int = 0
    moments: int = 0
    gradients: int = 0
    """Of one parameter; of several ranks, of all of a rank's rows."""
    reference: int = 0
    """Of several ranks, and `snapshots`, `undo` and `versions` too: their shards are in the host's memory."""
    snapshots: int = 0
    undo: int = 0
    versions: int = 0
    """The rows of rebuilt versions, and the masters, copied aside while shards show another version."""
    update: int = 0

    @property
    def total(self) -> int:
        """The larger of re-scoring and the update, with the rest."""
        held = self.masters + self.moments + self.reference + self.snapshots + self.undo
        return held + max(self.versions, self.gradients + self.update)


class MemoryPlan(NamedTuple):
    """Bytes on each device, by cause."""

    weights: int
    masters: int
    moments: int
    gradients: int
    """Sums over micro-batches, in float32."""
    fresh: int
    """Gradients of one micro-batch in another dtype, beside a layer's activations: the others are freed by then."""
    gathered: int
    """Layers that are gathered from all devices for a forward or backward pass, with their gradients."""
    activations: int
    head: int
    """The chunk of logits and its gradients, before the layers' backward pass."""
    temporary: int
    """In the backward pass of one layer, after that of the head."""
    versions: int
    """Rebuilt for re-scoring; of several ranks also the masters, copied aside while shards show another version."""
    undo: int
    """The undo entries of the kept versions; a trainer holds them through the whole step."""
    scoring: int
    """The cache of the longest sequence, a layer of one piece of it, and the layers that are gathered meanwhile."""
    reference: int
    snapshots: int
    norm: int
    """The gradient of one parameter in float64, before the update. The copies of its served bits, which the update
    compares, are fewer."""
    update: int
    """One piece of moments, widened to float32."""
    host: HostMemory
    """Not on the device: what `Layout.offload` moves."""

    @property
    def total(self) -> int:
        """The largest of the three phases."""
        return max(self.rescoring, self.training, self.updating)

    @property
    def held(self) -> int:
        """Bytes in all phases."""
        return self.weights + self.masters + self.moments + self.reference + self.snapshots + self.undo

    @property
    def rescoring(self) -> int:
        """Bytes while sequences are scored again."""
        return self.held + self.versions + self.scoring

    @property
    def training(self) -> int:
        """Bytes while a micro-batch's gradient is computed."""
        return self.held + self.gathered + self.backward

    @property
    def updating(self) -> int:
        """Bytes while the optimizer updates."""
        return self.held + self.gradients + max(self.norm, self.update)

    @property
    def causes(self) -> dict[str, int]:
        """Bytes on the device by cause."""
        return {name: value for name, value in self._asdict().items() if name != "host"}

    @property
    def backward(self) -> int:
        """Bytes that a micro-batch adds."""
        first, last = self.activations + max(self.head, self.temporary), self.fresh + self.temporary
        return self.gradients + max(first, last)


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


def undo_bytes(config: PolicyConfig, layout: Layout) -> int:
    """Bytes of the undo entries of one version on a device."""
    count = parameters(config)
    trained, size = -(-(count.total - count.frozen) // layout.devices), element_bytes(config)
    changed = changed_share(config, layout.learning_rate)
    if changed > _SPARSE:
        return size * trained
    return int((size + 4) * changed * trained * layout.minibatches)


def _version_bytes(config: PolicyConfig, layout: Layout) -> int:
    """Bytes of one rebuilt version on a device. Whole entries of the undo log are its tensors. With sparse entries one
    process shares the tensors that did not change with the current weights, and a rank of several copies its rows."""
    if changed_share(config, layout.learning_rate) > _SPARSE:
        return 0
    count, size = parameters(config), element_bytes(config)
    return size * -(-count.total // layout.devices) if layout.sharded else size * (count.total - count.frozen)


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
    """The plan of one device. ValueError when `layout.context` does not divide the devices or the key-value heads, or
    `layout.expert_ranks` the devices, or the devices the experts."""
    if layout.devices % layout.context:
        raise ValueError(f"context parallelism of {layout.context} does not divide {layout.devices} devices")
    if config.kv_heads % layout.context:
        raise ValueError(f"context parallelism of {layout.context} does not divide {config.kv_heads} key-value heads")
    if layout.devices % layout.expert_ranks:
        raise ValueError(f"{layout.expert_ranks} expert ranks do not divide {layout.devices} devices")
    if layout.expert_ranks > 1 and (not config.experts or config.experts % layout.devices):
        raise ValueError(f"{layout.devices} devices with expert ranks do not divide {config.experts} experts")
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
    sharded = layout.sharded
    weights, unsummed = size * share, 0 if config.dtype == "float32" else size * trained
    if sharded and config.dtype != "float32":
        weights, unsummed = size * -(-count.frozen // layout.devices), 0
    moments = -(-moment_bytes(config, layout.moment_bytes) // layout.devices)
    tokens = -(-layout.inputs // layout.context)
    attention, _ = attention_of(config, layout)
    owned = layout.expert_ranks > 1
    per_layer = [
        activation_bytes(config, config.sparse(index), layout.context, attention, owned)
        + score_bytes(config, index, tokens)
        for index in range(config.layers)
    ]
    activations = tokens * sum(per_layer)
    if layout.recompute:
        activations = tokens * (config.layers * config.dim * size + max(per_layer, default=0))
    # Every device has the routes of the whole micro-batch, in int64.
    activations += 8 * layout.inputs * config.sparse_layers * config.top_k
    head = min(tokens, _CHUNK) * config.vocab * 4 * 3 + 4 * config.vocab * config.dim + tokens * config.dim * size * 3
    temporary = tokens * max(
        (temporary_bytes(config, config.sparse(index), attention, owned) for index in range(config.layers)), default=0
    )
    saved = tokens * max(per_layer, default=0)
    gathered = _gathered(config, layout, activations, saved, head, temporary)
    undo = undo_bytes(config, layout)
    made = MemoryPlan(
        weights=weights,
        masters=masters,
        moments=moments,
        gradients=4 * trained,
        fresh=unsummed + saved if unsummed else 0,
        gathered=gathered,
        activations=activations,
        head=head,
        temporary=temporary,
        versions=layout.versions * _version_bytes(config, layout) + (4 * trained if sharded and layout.versions else 0),
        undo=(layout.versions + (layout.minibatches > 1)) * undo,
        scoring=_scoring(config, layout),
        reference=size * share if layout.reference else 0,
        snapshots=layout.snapshots * (masters + moments + (4 * trained if same else 0)),
        norm=8 * _largest(config, layout),
        update=update_bytes(config, layout),
        host=HostMemory(),
    )
    return _offloaded(made, config, layout, trained) if layout.offload else made


def _gathered(config: PolicyConfig, layout: Layout, activations: int, saved: int, head: int, temporary: int) -> int:
    """Bytes of weights and gradients that are on a device besides its shards in a backward pass, when most are alive,
    beyond the activations and the larger of head and temporary. one: activations of one layer."""
    count, size = parameters(config), element_bytes(config)
    outside = config.vocab * config.dim * (1 if config.tied else 2)
    if not layout.sharded:
        return 0
    elements = count.largest_rest if layout.expert_ranks > 1 else count.largest_layer
    layer, root = size * elements, size * outside
    # On a GPU the exchange of a gradient overlaps the backward pass of the layer before, and that has its gradients.
    overlapped = 0 if layout.cpu else layer + temporary
    # One layer's gradient in float32, and this device's part of the sum.
    summed = 4 * (elements + -(-elements // layout.devices))
    owned = added = 0
    if layout.expert_ranks > 1:
        # The owner's run of experts is kept from the forward to the backward pass, unless that computes it again. Its
        # gradient, also in float32, and this device's part of the sum come before those of the rest of the layer.
        run = -(-layer_experts(config) // layout.expert_ranks)
        owned = size * run * (1 if layout.recompute else config.sparse_layers)
        added = (size + 4) * run + 4 * -(-layer_experts(config) // layout.devices)
    phases = (
        activations + head + root + layer,
        activations + temporary + root + 2 * layer + (0 if layout.cpu else layer) + added,
        activations - saved + overlapped + root + 3 * layer + summed + added,
        2 * root + 4 * (outside + -(-outside // layout.devices)),
    )
    return max(phases) - activations - max(head, temporary) + owned


def _scoring(config: PolicyConfig, layout: Layout) -> int:
    """Bytes while a sequence is scored again, with the layers that are gathered meanwhile."""
    gathered = outside = 0
    if layout.sharded:
        count, size = parameters(config), element_bytes(config)
        outside = size * config.vocab * config.dim * (1 if config.tied else 2)
        # Two layers: the next one is gathered while one computes.
        gathered = 2 * size * (count.largest_rest if layout.expert_ranks > 1 else count.largest_layer)
        if layout.expert_ranks > 1:
            gathered += 2 * size * -(-layer_experts(config) // layout.expert_ranks)
    return outside + scoring_bytes(config, layout.longest or layout.tokens, cpu=layout.cpu, gathered=gathered)


def _largest(config: PolicyConfig, layout: Layout) -> int:
    """Elements of the largest parameter's rows on a device."""
    return max((-(-rows // layout.devices) * width for rows, width in trained_matrices(config)), default=0)


def _offloaded(made: MemoryPlan, config: PolicyConfig, layout: Layout, trained: int) -> MemoryPlan:
    """The plan with masters and moments in the host's memory. trained: elements that a device's process updates."""
    masters, sharded = 4 * trained, layout.sharded
    largest = max((rows * width for rows, width in trained_matrices(config)), default=0)
    host = HostMemory(
        masters=masters,
        moments=made.moments,
        gradients=4 * (trained if sharded else largest),
        snapshots=layout.snapshots * (masters + made.moments),
        update=made.update,
    )
    there = made._replace(masters=0, moments=0, snapshots=0, update=0)
    if not sharded:
        return there._replace(host=host)
    host = host._replace(reference=made.reference, undo=made.undo, versions=made.versions)
    weights = element_bytes(config) * -(-parameters(config).frozen // layout.devices)
    return there._replace(weights=weights, gradients=0, reference=0, undo=0, versions=0, host=host)


def fitting(config: PolicyConfig, layout: Layout, available: int, spare: float = 0.2) -> Layout | None:
    """The cheapest layout whose plan leaves the share `spare` of the available bytes free; None when none does.

    Tried in order of their cost: recompute, context parallelism, smaller moments, the optimizer in the host's memory.
    """
    degrees = [n for n in range(1, layout.devices + 1) if layout.devices % n == 0 and config.kv_heads % n == 0]
    # A CPU's memory is the host's, and owners of experts keep their masters.
    offloads = (False, True) if not layout.cpu and layout.expert_ranks == 1 else (layout.offload,)
    for offload in (True,) if layout.offload else offloads:
        for each in MOMENTS.values():
            for context in degrees:
                for recompute in (False, True):
                    tried = layout._replace(recompute=recompute, context=context, moment_bytes=each, offload=offload)
                    if plan(config, tried).total <= (1.0 - spare) * available:
                        return tried
    return None


FREED_S = 10.0


def freed(needed: int, available: Callable[[], int]) -> int:
    """The available bytes as soon as they are enough, else after `FREED_S`: a trainer that was killed before this one
    may still hold them."""
    deadline = time.monotonic() + FREED_S
    while (free := available()) < needed and time.monotonic() < deadline:
        time.sleep(0.2)
    return free
