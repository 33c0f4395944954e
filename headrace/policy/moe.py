"""Mixture of experts: router and experts put together, and the recorded routes that a trainer replays.

The arithmetic is in `kernels.operators`. Messages hold routes as small unsigned integers; here they become int64 with
-1 for "no record". A missing record that is needed is an error; there is no default.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from headrace.errors import HeadraceError
from headrace.kernels import operators
from headrace.kernels.route import SOFTMAX, Rule
from headrace.messages.base import Array


class RoutesMissing(HeadraceError):
    """Recorded routes are needed and missing, or do not fit the model."""


class ExpertFunction(Protocol):
    """`kernels.operators.experts`, or what replaces it, such as another number format."""

    def __call__(
        self, x: Tensor, gates: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, exact: bool, /
    ) -> Tensor:
        """x [N, D] through its experts [N, k], weighted by gates [N, k] -> [N, D]."""


class RowCounts(NamedTuple):
    """Numbers of rows that this process and others exchange in one layer. A row is a token in one of its slots."""

    sent: list[int]
    """Rows of this process, by owner of their experts."""
    got: list[int]
    """Rows of each process whose experts this one owns."""


class OwnedExperts(Protocol):
    """Experts of which each process owns some, as `training.parallel.experts`. All processes must make the same calls,
    each with its own tokens."""

    def counts(self, experts: Tensor) -> Sequence[RowCounts] | None:
        """The counts of some layers, in one exchange. experts int64 [N, layers, k], negative where a process does not
        know them yet.

        None, in every process, where one of them does not know all of its experts.
        """

    def __call__(
        self,
        x: Tensor,
        gates: Tensor,
        experts: Tensor,
        gate_up: Tensor,
        down: Tensor,
        exact: bool,
        counts: RowCounts,
        /,
    ) -> Tensor:
        """As `ExpertFunction`. gate_up and down: the rows that this process holds. counts: rows of each expert."""


class Mixture(NamedTuple):
    """The weights of one layer's experts, and how a token's experts are chosen and weighted."""

    router: Tensor
    """[E, D]"""
    gate_up: Tensor
    """[E, 2I, D]"""
    down: Tensor
    """[E, D, I]"""
    k: int
    """Experts of a token."""
    normalise: bool
    """Whether a token's gates are divided by their sum."""
    rule: Rule = SOFTMAX
    correction: Tensor | None = None
    """float32 [E], see `kernels.route`."""
    function: ExpertFunction = operators.experts


def mixture(x: Tensor, of: Mixture, exact: bool, replay: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [N, D] through its k experts -> (out [N, D], experts int64 [N, k]).

    replay: selections int64 [N, k] instead of the live ones, -1 where there is none.
    """
    gates, experts = routed(x, of, exact, replay)
    return of.function(x, gates, experts, of.gate_up, of.down, exact), experts


def routed(x: Tensor, of: Mixture, exact: bool, replay: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [N, D] -> (gates float32 [N, k], experts int64 [N, k]). replay: as `mixture`.

    Sigmoid scores come from a float32 product, as DeepSeek computes them.
    """
    if of.rule.sigmoid:
        logits = operators.linear(x.float(), of.router.float(), exact)
    else:
        logits = operators.linear(x, of.router, exact)
    return operators.route(logits, of.k, of.normalise, replay, of.rule, of.correction)


_NONE = {torch.uint8: 0xFF, torch.uint16: 0xFFFF}
"""How unsigned dtypes say "no record"."""


def widen(routed: Tensor, layers: int, k: int) -> Tensor:
    """Routes of any integer dtype [N, L, k] -> int64, with -1 where an unsigned dtype says "none" by its largest value.

    RoutesMissing when the shape does not fit the model.
    """
    if routed.ndim != 3 or tuple(routed.shape[1:]) != (layers, k):
        raise RoutesMissing(f"routes of shape {list(routed.shape)} do not fit {layers} layers and top {k}")
    wide = routed.to(torch.int64)
    none = _NONE.get(routed.dtype)
    return wide if none is None else wide.masked_fill_(wide == none, -1)


def largest(routed: Tensor) -> int:
    """The largest expert that routes [N, L, k] on the CPU name, -1 where none has a record.

    RoutesMissing when a token has a record of some of its experts alone, or of a negative one.
    """
    numbers = routed.numpy()
    none = _NONE.get(routed.dtype, -1)
    if numbers.size and numbers.min() >= 0 and (top := int(numbers.max())) != none:
        return top
    recorded = numbers[numbers[..., 0] != none]
    if (wrong := (recorded == none) | (recorded < 0)).any():
        raise RoutesMissing(f"routes name the experts {recorded[wrong.any(-1)][0].tolist()} of a token")
    return int(recorded.max()) if recorded.size else -1


def from_array(routed: Array | None, layers: int, k: int) -> Tensor:
    """Routes of a message -> int64 [N, L, k]. RoutesMissing when the message has none."""
    if routed is None:
        raise RoutesMissing("the record carries no routed experts; a sampler of a mixture must return them")
    dtype = {"|u1": torch.uint8, "<u2": torch.uint16}.get(routed.dtype)
    if dtype is None:
        raise RoutesMissing(f"expected routes of dtype |u1 or <u2, got {routed.dtype}")
    flat = torch.frombuffer(bytearray(routed.data), dtype=dtype) if routed.data else torch.empty(0, dtype=dtype)
    return widen(flat.view(routed.shape), layers, k)
