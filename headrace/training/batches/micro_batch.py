"""Micro-batches: some segments of a batch as the tensors that one forward pass takes, on the model's device.

The idea: a batch comes from messages and stays on the CPU, whatever the device. Each micro-batch is assembled there and
moved once, so neither the forward nor the backward pass mixes devices. Segments are packed by token budget, and all
segments of a micro-batch have the same temperature.

Processes get micro-batches in turn and wait for each other after every round, so a round takes as long as its slowest
micro-batch. Equal numbers of tokens do not take equal time, because attention grows with the square of a sequence. So
micro-batches are sorted by their predicted operations before they are numbered: neighbours, which form a round, take
about equal time for any number of processes, and a last round that is not full has the fastest ones.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headrace.algorithms.packing import pack
from headrace.policy import moe
from headrace.policy.config import PolicyConfig
from headrace.policy.layout.sizes import forward_flops
from headrace.policy.seam import PolicyModel
from headrace.training.batches.segment import Segment


@dataclass(frozen=True)
class MicroBatch:
    """N inputs of several segments, concatenated, with M sampled tokens among them; all tensors on one device."""

    segments: tuple[Segment, ...]
    ids: Tensor
    """int64 [N]"""
    lengths: tuple[int, ...]
    """Inputs of each segment, in order."""
    routes: Tensor | None
    """int64 [N, layers, top_k], None for a dense policy."""
    rows: Tensor
    """int64 [M], ascending: inputs whose next token was sampled."""
    targets: Tensor
    """int64 [M]"""
    behaviour: Tensor
    """float32 [M]: the sampler's log-probabilities."""
    advantage: Tensor
    """float32 [M]"""
    temperature: float

    @classmethod
    def of(cls, segments: Sequence[Segment], device: torch.device) -> "MicroBatch":
        """Segments of one temperature as tensors on a device."""
        lengths = [len(segment.ids) for segment in segments]
        return cls(
            segments=tuple(segments),
            ids=torch.cat([segment.ids for segment in segments]).to(device),
            lengths=tuple(lengths),
            routes=_routes(segments, device),
            rows=_rows(segments).to(device),
            targets=torch.cat([segment.targets for segment in segments]).to(device),
            behaviour=torch.cat([segment.behaviour for segment in segments]).to(device),
            advantage=torch.cat([segment.advantages for segment in segments]).to(device),
            temperature=segments[0].temperature,
        )

    @property
    def sampled(self) -> list[int]:
        """Sampled tokens of each segment, in order."""
        return [len(segment.targets) for segment in self.segments]


def _padded(micro: MicroBatch, tokens: int) -> MicroBatch:
    """With one more sequence, without sampled tokens, up to a number of tokens."""
    count = tokens - len(micro.ids)
    routes = micro.routes
    if routes is not None:
        routes = torch.cat((routes, routes.new_full((count, *routes.shape[1:]), -1)))
    ids = torch.cat((micro.ids, micro.ids.new_zeros(count)))
    return replace(micro, ids=ids, lengths=(*micro.lengths, count), routes=routes)


def _routes(segments: Sequence[Segment], device: torch.device) -> Tensor | None:
    """`MicroBatch.routes`: as small as in the records on the way to the device, and widened there."""
    narrow = [segment.routed for segment in segments if segment.routed is not None]
    if not narrow:
        return None
    if len({rows.dtype for rows in narrow}) > 1:  # each dtype has its own value for "none"
        narrow = [moe.widen(rows, *rows.shape[1:]) for rows in narrow]
    rows = torch.cat(narrow).to(device)
    return moe.widen(rows, *rows.shape[1:])


def _rows(segments: Sequence[Segment]) -> Tensor:
    """`MicroBatch.rows`, on the CPU."""
    starts = itertools.accumulate((len(segment.ids) for segment in segments), initial=0)
    return torch.cat([segment.positions + start for segment, start in zip(segments, starts, strict=False)])


def micro_batches(segments: Sequence[Segment], budget: int, policy: PolicyConfig) -> list[list[Segment]]:
    """Segments packed by token budget, those of one micro-batch with one temperature, in the order in which gradients
    are added: the most predicted operations of a forward pass first; equal ones by temperature, then by the smallest
    index of a segment.
    """
    packed: list[list[Segment]] = []
    for temperature in sorted({segment.temperature for segment in segments}):
        equal = [segment for segment in segments if segment.temperature == temperature]
        for members in pack([len(segment.ids) for segment in equal], budget):
            packed.append([equal[index] for index in members])
    return sorted(packed, key=lambda members: -flops(policy, members))


def flops(policy: PolicyConfig, segments: Iterable[Segment]) -> float:
    """Predicted operations of one forward pass of segments."""
    return sum(forward_flops(policy, len(segment.ids), len(segment.targets)) for segment in segments)


def device_of(model: PolicyModel) -> torch.device:
    """The device that computes with a model's parameters."""
    return model.device


def forward(model: PolicyModel, micro: MicroBatch) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy float32 [M] of the sampled tokens, with the recorded routes (`segment.check`: a
    mixture without them computes its own).

    Where processes share the tokens, each computes its part, and all get the result of the whole.
    """
    processes = model.shared.size if model.shared is not None else 1
    if len(micro.ids) < processes:  # each needs a token
        micro = _padded(micro, processes)

    def places(cuts: Sequence[int]) -> list[int]:
        before: list[int] = torch.searchsorted(_rows(micro.segments), torch.tensor(cuts)).tolist()
        return before

    return model.sampled_logprobs(
        micro.ids, micro.lengths, micro.routes, micro.rows, micro.targets, micro.temperature, places
    )
