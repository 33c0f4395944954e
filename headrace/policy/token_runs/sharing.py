"""How the runs of a micro-batch's tokens are divided among processes."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Queries, keys and values of packed tokens, and the heads' sinks (gpt_oss) -> what the heads read."""


class TokenSharing(Protocol):
    """Processes that compute a micro-batch together, each some consecutive runs of its packed tokens. `OneProcess`, or
    `training.parallel.context`."""

    runs: int
    """Runs of all processes, a multiple of `size`; each needs a token."""

    @property
    def rank(self) -> int:
        """The number of this process among them."""

    @property
    def size(self) -> int:
        """Number of processes."""

    def around(self, attend: Attend, counts: Sequence[int]) -> Attend:
        """Attention over the tokens of all processes, for queries, keys and values of this one's; counts: tokens of
        each process."""

    def joined(self, values: Tensor, counts: Sequence[int]) -> Tensor:
        """The values [n] of all processes, in the order of tokens; counts: n of each. Differentiable."""


class OneProcess:
    """`TokenSharing` of a process that computes all runs."""

    rank, size = 0, 1

    def __init__(self, runs: int) -> None:
        self.runs = runs

    def around(self, attend: Attend, counts: Sequence[int]) -> Attend:
        """As `TokenSharing`."""
        return attend

    def joined(self, values: Tensor, counts: Sequence[int]) -> Tensor:
        """As `TokenSharing`."""
        return values
