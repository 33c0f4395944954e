"""The bytes of one process of a trainer, measured on its own code: state, re-scoring, a micro-batch's gradient, update.

The model, the state over one process or FSDP's shards, the cached forward and the update are the trainer's own, and run
in `Shadow`. The other processes are PyTorch's fake group, whose collectives transfer nothing.

Layers of one kind add the same bytes, so a deep policy is measured at two depths and continued from there. Bytes are
noted where the pass stands: at the first and last layers of forward and backward, at the head, and behind the layers.
Each of these numbers grows with the depth by a constant; the largest of all of them need not, because another place may
become the largest. So each of them is continued, and the largest is taken afterwards. Large micro-batches are continued
from smaller ones in the same way.
"""

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from headrace.algorithms.adamw import OptimizerSettings
from headrace.config import Mesh
from headrace.messages.rollout import Span
from headrace.policy import scoring as rescoring
from headrace.policy.config import PolicyConfig
from headrace.policy.numerics import Numerics
from headrace.policy.provider import build
from headrace.policy.seam import PolicyModel
from headrace.training.figures.layout import Layout
from headrace.training.guard import StateSnapshot
from headrace.training.planned.shadow import Shadow
from headrace.training.state import TrainerState, freeze

ENDS = 2
"""Layers at each end of a pass that are noted one by one."""
MOST = 1 << 17
"""Tokens of a micro-batch of several sequences that is measured as it is."""
BETWEEN = "between"
"""The others: each holds less than a neighbour."""
_MOMENTS = {4: torch.float32, 2: torch.bfloat16, 1: torch.uint8}


class State(NamedTuple):
    """Bytes of what a process holds from step to step, and of an update."""

    weights: int
    masters: int
    """Where they are not the weights themselves."""
    moments: int
    reference: int
    snapshot: int
    """One copy of masters and moments."""
    update: int
    """The gradients, and what an update adds to them at its peak."""
    largest: int
    """A float32 gradient of the largest parameter."""
    trained: int
    """Elements with a gradient, of this process's rows."""
    elements: int
    """Of all parameters, of this process's rows."""


class Scoring(NamedTuple):
    """Bytes besides the state while the longest sequence is scored again."""

    peak: int


class Passes(NamedTuple):
    """Bytes besides the state in the passes of a micro-batch."""

    gradients: int
    """That are held between micro-batches."""
    backward: dict[str, int]
    """The peak of each place, with the gradients of the micro-batch before."""


Bytes = TypeVar("Bytes", State, Scoring, Passes)


@functools.cache
def state(config: PolicyConfig, layout: Layout) -> State:
    """The bytes of the state under a layout. Not twice at once in one process, and not in a process that is in a
    trainer's group."""
    return _deep(State, config, layout, lambda process: process.state())


@functools.cache
def scoring(config: PolicyConfig, layout: Layout) -> Scoring:
    """The bytes of re-scoring, as `state`."""
    return _deep(Scoring, config, layout, lambda process: process.scoring())


@functools.cache
def passes(config: PolicyConfig, layout: Layout) -> Passes:
    """The bytes of a gradient, as `state`.

    Routes and positions are real, so a micro-batch of very many sequences would take long: each adds the same.
    """

    def of(part: Layout) -> Passes:
        return _deep(Passes, config, part, lambda process: process.passes())

    longest = layout.longest or layout.inputs
    near = max(1, MOST // 2 // longest)
    if layout.tokens <= 2 * near * longest:
        return of(layout)
    few, many = (of(layout._replace(tokens=count * longest, longest=longest)) for count in (near, 2 * near))
    times = layout.tokens / longest / near - 1

    def on(low: int, high: int) -> int:
        return round(low + (high - low) * times)

    places = {key: on(few.backward[key], many.backward[key]) for key in few.backward}
    return Passes(on(few.gradients, many.gradients), places)


def _deep(kind: type[Bytes], config: PolicyConfig, layout: Layout, measured: Callable[["_Process"], Bytes]) -> Bytes:
    """Measure a policy, at two depths where it is deep."""

    def of(layers: int) -> Bytes:
        shallow = msgspec.structs.replace(config, layers=layers)
        with _world(layout) as world:
            shadow = Shadow(gpu=not layout.cpu)
            with shadow.running():
                return measured(_Process(shallow, layout, shadow, world))

    first = config.dense_layers + 2 * ENDS
    if config.layers <= first + 1:
        return of(config.layers)
    near, far, times = of(first), of(first + 1), config.layers - first

    def on(low: Any, high: Any) -> Any:
        if isinstance(low, dict):
            return {key: on(low[key], high[key]) for key in low if key in high and key != BETWEEN}
        return low + (high - low) * times

    return kind(*map(on, near, far))


def routes(config: PolicyConfig, tokens: int, skew: float) -> Tensor | None:
    """[N, layers, k], balanced but for the first tokens: they take the first k experts, which so get `skew` times the
    rows of balanced routing. None without experts."""
    c = config
    if not c.experts:
        return None
    chosen = torch.arange(c.top_k)
    rows, share = (torch.arange(tokens)[:, None] * c.top_k + chosen) % c.experts, c.top_k / c.experts
    if share < 1.0:
        rows[: int(tokens * min(1.0, (skew - 1.0) * share / (1.0 - share)))] = chosen
    routed = rows[:, None].expand(tokens, c.sparse_layers, c.top_k)
    return routed.to(torch.uint8 if c.experts < 255 else torch.uint16)


@contextmanager
def _world(layout: Layout) -> Iterator[Any]:
    """The group of a trainer of several processes, of which this is the first; None for one."""
    if not layout.sharded:
        yield None
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from headrace.training.parallel.group import ProcessGroup

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.devices * layout.copies)
    mesh = Mesh(replicate=layout.copies, shard=layout.devices, expert=layout.expert_ranks, context=layout.context)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Set timeout is now only supported")
            group = ProcessGroup(torch.device("cpu"), mesh)
        yield group
        del group
    finally:
        dist.destroy_process_group()


class _Process:
    """One process of a trainer."""

    def __init__(self, config: PolicyConfig, layout: Layout, shadow: Shadow, world: Any) -> None:
        self.config, self.layout, self.shadow, self.world = config, layout, shadow, world
        self.numerics = Numerics(exact=layout.exact, reason="", fingerprint="planned")
        self.backward = False

    def state(self) -> State:
        """Hold a state, and update it."""
        shadow, layout = self.shadow, self.layout
        state = self._state(OptimizerSettings(moments=_MOMENTS[layout.moment_bytes]))
        parameters = state.parameters()
        held = {each.untyped_storage()._cdata for each in parameters.values()}
        apart = [each for each in state.master.values() if each.untyped_storage()._cdata not in held]
        masters = sum(each.numel() * each.element_size() for each in apart)
        weights, began = shadow.live - masters, shadow.live
        state.apply(0.0)  # an update without gradients makes the moments
        moments, began = shadow.live - began, shadow.live
        reference = self._reference()
        taken, began = shadow.live - began, shadow.live
        copy = StateSnapshot.of(state)
        snapshot = shadow.live - began
        del copy
        self._micro_batch(state, reference, layout._replace(tokens=layout.context, longest=0))
        shadow.begin("update")
        state.gradient_norm()
        state.apply(1e-6, 0.5)
        trained = [parameters[name].numel() for name in state.master]
        return State(
            weights, masters, moments, taken, snapshot, shadow.peaks["update"] - began, 4 * max(trained),
            sum(trained), sum(each.numel() for each in parameters.values()),
        )  # fmt: skip

    def scoring(self) -> Scoring:
        """Score the longest sequence again."""
        c, model, tokens = self.config, self._state(OptimizerSettings()).model, self.layout.longest
        began = self.shadow.live
        self.shadow.begin("scoring")
        ids, recorder = torch.zeros(tokens, dtype=torch.int64), list[Tensor]()
        spans, targets = [Span(0, tokens, 0)], range(1, tokens)
        routed = routes(c, tokens, self.layout.skew)
        rescoring.score({0: model}, ids, spans, targets, 1.0, routed, recorder)
        # A CPU holds the routes of the pieces that `dispatch.repeated` leaves out.
        left_out = max(0, tokens - 3 * rescoring.PIECE) if self.layout.cpu else 0
        return Scoring(self.shadow.peaks["scoring"] - began + 8 * left_out * c.sparse_layers * c.top_k)

    def passes(self) -> Passes:
        """Add the gradient of a micro-batch to a small one's."""
        shadow, layout = self.shadow, self.layout
        state, reference = self._state(OptimizerSettings()), self._reference()
        began = shadow.live
        self._micro_batch(state, reference, layout._replace(tokens=layout.context, longest=0))
        gradients = shadow.live - began
        shadow.peaks.clear()
        self._mark(state.model)
        self._micro_batch(state, reference, layout)
        return Passes(gradients, {label: value - began for label, value in shadow.peaks.items()})

    def _model(self) -> PolicyModel:
        return freeze(build(self.config, self.numerics), ())

    def _state(self, settings: OptimizerSettings) -> TrainerState:
        if self.world is None:
            model = self._model()
            model.served_dtype = torch.bfloat16 if self.layout.rounded and self.config.dtype == "float32" else None
            state = TrainerState(model, settings=settings)
        else:
            from headrace.training.parallel import sharding
            from headrace.training.parallel.state import ShardedState

            sharded = sharding.build(self.config, self.numerics, self.world)
            self.shadow.track(list(sharded.local.values()))
            state = ShardedState(sharded, self.world, settings=settings)
        state.model.recompute = self.layout.recompute
        return state

    def _reference(self) -> PolicyModel | None:
        if not self.layout.reference:
            return None
        if self.world is None:
            return self._model()
        from headrace.training.parallel import sharding

        return sharding.build(self.config, self.numerics, self.world, fixed=True).model

    def _micro_batch(self, state: TrainerState, reference: PolicyModel | None, layout: Layout) -> None:
        """Add the gradient of one micro-batch, all of whose tokens are sampled."""
        model = state.model
        tokens, each = layout.inputs, layout.longest or layout.inputs
        lengths = [min(each, tokens - start) for start in range(0, tokens, each)]
        ids, advantage = torch.zeros(tokens, dtype=torch.int64), torch.zeros(tokens)
        routed = routes(self.config, tokens, layout.skew)
        if routed is not None:
            routed = routed.to(torch.int64)
        rows = torch.arange(tokens)

        def forward(which: PolicyModel) -> Tensor:
            return which.sampled_logprobs(ids, lengths, routed, rows, ids, 1.0, lambda cuts: list(cuts))[0]

        self.backward = False
        self.shadow.begin("before the layers")
        logp = forward(model)
        if reference is not None:
            with torch.no_grad():
                advantage = advantage + forward(reference)
        torch.autograd.backward(-(logp * advantage).sum())
        self.backward = True
        state.collect_gradients()

    def _mark(self, model: PolicyModel) -> None:
        """Begin a new place of the pass at the layers at its ends."""
        count, shadow = len(model.blocks), self.shadow
        first = self.config.dense_layers + ENDS

        def place(index: int) -> str:
            return str(index) if index < first else str(index - count) if index >= count - ENDS else BETWEEN

        for index, layer in enumerate(model.blocks):
            name = place(index)

            def enter(*_: Any, name: str = name) -> None:
                if not self.backward:
                    shadow.begin(f"forward {name}" if name != BETWEEN else name)

            def leave(
                module: Any, arguments: Any, out: Tensor, name: str = name, last: bool = index == count - 1
            ) -> None:
                if self.backward:
                    return
                if last:
                    shadow.begin("head")

                def back(gradient: Tensor) -> None:
                    self.backward = True
                    shadow.begin(f"backward {name}" if name != BETWEEN else name)

                if out.requires_grad:
                    out.register_hook(back)  # type: ignore[no-untyped-call]

            layer.register_forward_pre_hook(enter)
            layer.register_forward_hook(leave)
