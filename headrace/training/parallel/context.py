"""Context parallelism: processes that compute one micro-batch together, each a run of its packed tokens.

Idea (DeepSpeed Ulysses, arXiv 2309.14509): all operations but attention work on rows, so a process computes the rows of
its own tokens. Around attention the processes exchange tokens for heads: each attends over all tokens with its part of
the heads. A head's sums keep their order, and in exact mode a row's bits do not depend on the rows beside it, so hidden
states and log-probabilities have the bits of one process. A ring over keys would change the order of the sums.

Log-probabilities are gathered and every process computes the loss of the whole micro-batch: a loss may need all tokens
of a sequence, and its bits are those of one process too. Its gradient is taken at the process's own tokens, and FSDP2
adds the gradients of weights over processes.

Trade-offs: the number of processes must divide the key-value heads. Runs have equal numbers of tokens, so the head,
which multiplies sampled tokens alone, is not balanced. Each process replays the routes of its own tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.policy.attention import Attend
from headrace.training.figures.clock import Clock


class ContextParallel:
    """`TokenSharing` over a process group. All its processes must call it, in the same order."""

    def __init__(self, group: dist.ProcessGroup, clock: Clock) -> None:
        """clock: gets the time of every exchange."""
        self.group, self.clock = group, clock
        self.rank, self.size = group.rank(), group.size()

    def around(self, attend: Attend, counts: Sequence[int]) -> Attend:
        """As `TokenSharing`."""
        counts = list(counts)

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            qs, ks, vs = (_Turn.apply(x, self, counts, True) for x in (q, k, v))  # type: ignore[no-untyped-call]
            out: Tensor = _Turn.apply(attend(qs, ks, vs), self, counts, False)  # type: ignore[no-untyped-call]
            return out

        return run

    def joined(self, values: Tensor, counts: Sequence[int]) -> Tensor:
        """As `TokenSharing`. The gradient is this process's part: every process computes the same loss of the whole."""
        out: Tensor = _Joined.apply(values, self, list(counts))  # type: ignore[no-untyped-call]
        return out

    def heads(self, x: Tensor, counts: list[int]) -> Tensor:
        """All heads of this process's tokens [n, H, D] -> this process's heads of all tokens [N, H / size, D]."""
        n, heads, dim = x.shape
        send = x.reshape(n, self.size, heads // self.size, dim).transpose(0, 1).contiguous()
        return self.swap(send.flatten(0, 1), [n] * self.size, counts)

    def tokens(self, x: Tensor, counts: list[int]) -> Tensor:
        """The inverse of `heads`."""
        n = counts[self.rank]
        got = self.swap(x.contiguous(), counts, [n] * self.size)
        return got.view(self.size, n, *x.shape[1:]).transpose(0, 1).reshape(n, -1, x.shape[2])

    def swap(self, x: Tensor, sent: list[int], got: list[int]) -> Tensor:
        """Send rows of x, `sent` of them to each process; returns the received rows, `got` of them from each."""
        out = x.new_empty(sum(got), *x.shape[1:])
        with self.clock.transfer():
            dist.all_to_all_single(out, x, got, sent, group=self.group)
        return out


class _Turn(torch.autograd.Function):
    """`ContextParallel.heads`, or its inverse; the gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shared: ContextParallel, counts: list[int], to_heads: bool) -> Tensor:
        ctx.way = shared, counts, to_heads
        return shared.heads(x, counts) if to_heads else shared.tokens(x, counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        shared, counts, to_heads = ctx.way
        return shared.tokens(grad, counts) if to_heads else shared.heads(grad, counts), None, None, None


class _Joined(torch.autograd.Function):
    """Gathers the values of all processes; the gradient is the part of this process."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, shared: ContextParallel, counts: list[int]) -> Tensor:
        ctx.part = sum(counts[: shared.rank]), len(values)
        return shared.swap(values.repeat(shared.size), [len(values)] * shared.size, counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        start, count = ctx.part
        return grad[start : start + count], None, None
