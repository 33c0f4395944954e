"""Bytes that a trainer needs per device, by cause: measured on the trainer's own code, with tensors without values.

`training.planned` runs a step of the configuration's layout in this process, as the first of its ranks, on fake
tensors. The trainer actor refuses to start when its plan is larger than the device's memory, instead of failing hours
later.

The plan is the largest of three phases: re-scoring, with rebuilt versions, the cache of the longest sequence and
without gradients; the passes of a micro-batch, with the gradients of those before; and the update.

Two numbers depend on values, which the plan has not, and are parameters of the layout: how many weights an update
changes (`learning_rate`), which decides the bytes of undo entries and rebuilt versions, and how uneven routing is
(`skew`). With `trainer.offload` masters and moments are counted apart, as bytes of the host's memory per process.

Not counted: buffers of the communication library, fragmentation, the CUDA context. Leave a fifth of the memory free for
them.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from headrace.kernels import library
from headrace.policy.config import PolicyConfig
from headrace.policy.layout.sizes import element_bytes, parameters
from headrace.training.figures.layout import MOMENTS, Layout, changed_share, divided, layout_of, settings

if TYPE_CHECKING:
    from headrace.training.planned.measured import State

__all__ = ["GIB", "SPARE", "HostMemory", "Layout", "MemoryPlan", "attention_refusal", "fitting", "freed", "layout_of",
           "plan", "rough", "settings"]  # fmt: skip

GIB = 1 << 30
SPARE = 0.2
"""Share of the available bytes that stays free for what is not counted."""
_SPARSE = 1 / 4
"""Share of changed elements above which an undo entry holds the whole parameter, `served.versions`."""


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
    """Where they are not the weights themselves."""
    moments: int
    reference: int
    snapshots: int
    undo: int
    """The undo entries of the kept versions; a trainer holds them through the whole step."""
    versions: int
    """Rebuilt for re-scoring; of several ranks also the masters, copied aside while shards show another version."""
    scoring: int
    """The cache of the longest sequence and a piece of it, at the peak; of several ranks with gathered layers."""
    gradients: int
    """Sums of the micro-batches before."""
    passes: int
    """Added by the passes of a micro-batch at their peak: activations, gathered layers, its own gradients."""
    update: int
    """Added by an update to the gradients at its peak."""
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
        return self.held + self.gradients + self.passes

    @property
    def updating(self) -> int:
        """Bytes while the optimizer updates."""
        return self.held + self.gradients + self.update

    @property
    def causes(self) -> dict[str, int]:
        """Bytes on the device by cause."""
        return {name: value for name, value in self._asdict().items() if name != "host"}


def attention_refusal(config: PolicyConfig, layout: Layout) -> str:
    """Why ordinary mode does not take `varlen_attn`; empty where it does, and in exact mode."""
    device, head = "cpu" if layout.cpu else "cuda", config.head_dim
    return "" if layout.exact else library.attention_refusal(device, config.dtype, head, head)


def plan(config: PolicyConfig, layout: Layout) -> MemoryPlan:
    """The plan of one device. The first of a layout takes seconds and may not run in a process that is in a trainer's
    group.

    ValueError when `layout.context` does not divide the devices or the key-value heads, or `layout.expert_ranks` the
    devices or the experts.
    """
    if layout.devices % layout.context:
        raise ValueError(f"context parallelism of {layout.context} does not divide {layout.devices} devices")
    if config.kv_heads % layout.context:
        raise ValueError(f"context parallelism of {layout.context} does not divide {config.kv_heads} key-value heads")
    if layout.devices % layout.expert_ranks:
        raise ValueError(f"{layout.expert_ranks} owners of experts do not divide {layout.devices} devices")
    if layout.expert_ranks > 1 and not divided(config, layout.devices, layout.expert_ranks):
        raise ValueError(f"{layout.expert_ranks} owners of experts do not divide {config.experts} experts")
    if config.source:
        return _estimated(config, layout)
    from headrace.training.planned import measured  # it imports torch

    # Without what changes no measured byte, so that layouts share their measurements.
    same = layout._replace(
        nodes=1, offload=False, versions=0, rescore=True, learning_rate=0.0, minibatches=1, snapshots=0
    )
    held = measured.state(config, same._replace(tokens=0, longest=0, recompute=False, skew=1.0))
    same = same._replace(moment_bytes=4, longest=layout.longest or layout.tokens)
    again = measured.scoring(config, same._replace(tokens=0, recompute=False, reference=False))
    scoring = again.peak if layout.rescore else 0
    moved = measured.passes(config, same)
    size, changed = element_bytes(config), changed_share(config, layout.learning_rate)
    entry = size * held.trained if changed > _SPARSE else int((size + 4) * changed * held.trained * layout.minibatches)
    # Whole entries are a version's tensors. With sparse ones a process shares the tensors that did not change with the
    # current weights, and a rank of several copies its rows.
    version = 0 if changed > _SPARSE else size * (held.elements if layout.sharded else held.trained)
    aside = 4 * held.trained if layout.sharded and layout.versions else 0
    made = MemoryPlan(
        weights=held.weights,
        masters=held.masters,
        moments=held.moments,
        reference=held.reference,
        snapshots=layout.snapshots * held.snapshot,
        undo=(layout.versions + (layout.minibatches > 1)) * entry if layout.rescore else 0,
        versions=layout.versions * version + aside,
        scoring=scoring,
        gradients=moved.gradients,
        passes=max(moved.backward.values()) - moved.gradients,
        update=max(0, held.update - moved.gradients),
        host=HostMemory(),
    )
    return _offloaded(made, held, layout) if layout.offload else made


def _estimated(config: PolicyConfig, layout: Layout) -> MemoryPlan:
    """The plan of a model of transformers, in closed form: its passes are not measured, and count high."""
    size, count = element_bytes(config), parameters(config).total
    held = -(-count // layout.devices) if layout.sharded else count
    width = config.dim + config.heads * config.head_dim + max(config.top_k, 1) * config.expert_dim
    inside = 12 * size * width * layout.inputs
    activations = (
        config.layers * 2 * size * config.dim * layout.inputs + inside if layout.recompute else config.layers * inside
    )
    gathered = 2 * size * count // config.layers if layout.sharded else 0
    logits = 12 * min(1 << 26, config.vocab * layout.inputs)
    separate = size != 4 and not layout.sharded
    cache = 2 * size * config.layers * config.kv_heads * config.head_dim * layout.inputs
    made = MemoryPlan(
        weights=4 * held if layout.sharded else size * count,
        masters=4 * count if separate else 0,
        moments=2 * layout.moment_bytes * held,
        reference=size * held if layout.reference else 0,
        snapshots=layout.snapshots * (4 + 2 * layout.moment_bytes) * held,
        undo=(layout.versions + (layout.minibatches > 1)) * size * held if layout.rescore else 0,
        versions=layout.versions * size * held + (4 * held if layout.sharded and layout.versions else 0),
        scoring=cache + inside + logits + gathered if layout.rescore else 0,
        gradients=4 * held,
        passes=activations + logits + gathered + (size * count // config.layers if separate else 0),
        update=12 * held // config.layers,
        host=HostMemory(),
    )
    if not layout.offload:
        return made
    host = HostMemory(masters=4 * held, moments=made.moments, gradients=4 * held, snapshots=made.snapshots)
    return made._replace(masters=0, moments=0, snapshots=0, update=0, host=host)


def _offloaded(made: MemoryPlan, held: "State", layout: Layout) -> MemoryPlan:
    """The plan with masters and moments in the host's memory."""
    masters = 4 * held.trained
    host = HostMemory(
        masters=masters,
        moments=made.moments,
        gradients=4 * held.trained if layout.sharded else held.largest,
        snapshots=layout.snapshots * (masters + made.moments),
        update=made.update,
    )
    there = made._replace(masters=0, moments=0, snapshots=0, update=0)
    if not layout.sharded:
        return there._replace(host=host)
    host = host._replace(reference=made.reference, undo=made.undo, versions=made.versions)
    return there._replace(weights=made.weights - masters, gradients=0, reference=0, undo=0, versions=0, host=host)


def rough(config: PolicyConfig, layout: Layout) -> int:
    """More bytes than the plan of a layout has, in closed form and without torch: where they are few, no plan is
    needed."""
    width = config.dim + config.heads * config.head_dim + max(config.dense_dim, config.top_k * config.expert_dim)
    activations = config.layers * 64 * (width + config.expert_dim) + 4 * config.vocab
    copies = 10 + 3 * layout.versions + 3 * layout.snapshots
    return 4 * (copies * parameters(config).total + activations * layout.inputs)


def fitting(config: PolicyConfig, layout: Layout, available: int, spare: float = SPARE) -> Layout | None:
    """The cheapest layout whose plan leaves the share `spare` of the available bytes free; None when none does.

    Tried in order of their cost: recompute, context parallelism, smaller moments, the optimizer in the host's memory.
    """
    most = 1 if config.source else layout.devices
    degrees = [n for n in range(1, most + 1) if layout.devices % n == 0 and config.kv_heads % n == 0]
    limit = (1.0 - spare) * available
    # A CPU's memory is the host's, and owners of experts keep their masters.
    offloads = (False, True) if not layout.cpu and layout.expert_ranks == 1 else (layout.offload,)
    for offload in (True,) if layout.offload else offloads:
        for each in MOMENTS.values():
            for context in degrees:
                for recompute in (False, True):
                    tried = layout._replace(recompute=recompute, context=context, moment_bytes=each, offload=offload)
                    there = plan(config, tried)
                    if there.total <= limit:
                        return tried
                if max(there.rescoring, there.updating) > limit:
                    break  # neither recompute nor context parallelism divides these
    return None


FREED_S = 10.0


def freed(needed: int, available: Callable[[], int]) -> int:
    """The available bytes as soon as they are enough, else after `FREED_S`: a trainer that was killed before this one
    may still hold them."""
    deadline = time.monotonic() + FREED_S
    while (free := available()) < needed and time.monotonic() < deadline:
        time.sleep(0.2)
    return free
