"""Permutation and routing in Triton's interpreter, against float64 and their twins."""

from unittest.mock import patch

import torch

from headrace.kernels import batch_invariant, dispatch, mxfp8, permute
from headrace.kernels.block_scaled import nvfp4, product
from headrace.kernels.elementwise.swiglu import swiglu_backward_triton, swiglu_triton
from headrace.kernels.expert_mlp import expert_mlp, plan
from headrace.kernels.grouped_mm import Mx, Nv
from headrace.kernels.operators import formats
from headrace.kernels.operators.experts import experts_backward_triton, experts_triton
from headrace.kernels.route import Rule, route
from headrace.kernels.route_topk import route_backward_triton, route_triton
from tests.kernels import plain
from tests.kernels.cases import dtypes, shapes

DTYPES = dtypes(torch.float32, torch.bfloat16)


def permutation() -> None:
    """The plan is numpy's, copies are exact, sums are within rounding; an expert without tokens, one with all."""
    for tokens, count, k, pad, dim in shapes((70, 5, 2, 4, 40), (6, 9, 8, 8, 1100), (1, 4, 1, 16, 5)):
        experts = torch.stack([torch.randperm(count)[:k] for _ in range(tokens)])
        if k == 2:
            experts = torch.where(experts == 3, (experts + 1) % 3, experts)  # nobody goes to expert 3
        want, got = plan(experts, count, pad), permute.plan_triton(experts, count, pad)
        assert torch.equal(got.slots, want.slots) and torch.equal(got.source[: want.rows], want.source)
        assert int(got.ends[-1]) == want.rows <= len(got.source) and not bool(got.source[want.rows :].any())
        assert {int(got.ends[e]) for e, _, _ in want.parts} == {end for _, _, end in want.parts}
        for dtype in DTYPES:
            x, gates = torch.randn(tokens, dim).to(dtype), torch.rand(tokens, k)
            rows = permute.permute_triton(x, got.source)
            assert torch.equal(rows, permute.permute(x, got.source))
            y = torch.randn(rows.shape).to(dtype)
            mixed = permute.unpermute_triton(y, got.slots, gates)
            exact = (y.double()[got.slots].view(tokens, k, dim) * gates.double()[..., None]).sum(1)
            step = 2**-7 if dtype == torch.bfloat16 else 2**-23
            bound = step * exact.abs() + k * 2**-24 * (y.double()[got.slots].abs().view(tokens, k, dim)).sum(1)
            for value in (mixed, permute.unpermute(y, got.slots, gates)):
                assert value.dtype == dtype and bool(((value.double() - exact).abs() <= bound).all())
            few = permute.unpermute_triton(y, got.slots[:k], gates[:1])
            assert torch.equal(few, mixed[:1]), "the batch shows"
            pull = torch.randn(tokens, dim).to(dtype)
            back = permute.unpermute_backward_triton(pull, y, got.slots, gates)
            for a, b in zip(back, permute.unpermute_backward(pull, y, got.slots, gates), strict=True):
                torch.testing.assert_close(a, b, rtol=2 * step, atol=1e-4)
    empty = permute.plan_triton(torch.empty(0, 2, dtype=torch.int64), 4, 8)
    assert len(empty.slots) == 0 and empty.ends.tolist() == [0, 0, 0, 0]


def routing() -> None:
    """Selections are the twin's, ties and all; gates are within rounding; the router's gradient is autograd's."""
    grouped = Rule(sigmoid=True, groups=4, kept=2, scale=2.5)
    for rule, e, k, normalise in shapes(
        (Rule(), 10, 3, True),
        (grouped, 16, 4, True),
        (Rule(), 8, 1, False),
        (Rule(sigmoid=True), 12, 4, True),
    ):
        correction = torch.randn(e) * 0.3 if rule.sigmoid else None
        for dtype in DTYPES:
            logits = (torch.randn(12, e) * 2).to(dtype)
            logits[:5] = logits[:5].round()  # ties
            replay = torch.stack([torch.randperm(e)[:k] for _ in range(12)])
            replay[7], replay[10] = -1, -1
            for record in (None, replay):
                gates, experts = route_triton(logits, k, normalise, record, rule, correction)
                want, chosen = route(logits, k, normalise, record, rule, correction)
                assert torch.equal(experts, chosen)
                torch.testing.assert_close(gates, want, rtol=1e-5, atol=1e-6)
                one = route_triton(logits[6:9], k, normalise, None if record is None else record[6:9], rule, correction)
                assert torch.equal(one[0], gates[6:9]) and torch.equal(one[1], experts[6:9]), "the batch shows"
            leaf = logits.double().requires_grad_()
            scores = torch.sigmoid(leaf) if rule.sigmoid else torch.softmax(leaf, -1)
            picked = scores.gather(1, experts)
            exact = (picked / picked.sum(-1, keepdim=True) if normalise else picked) * rule.scale
            pull = torch.randn(12, k)
            (slope,) = torch.autograd.grad((exact * pull.double()).sum(), leaf)
            got = route_backward_triton(pull, logits, experts, normalise, rule)
            step = 2**-7 if dtype == torch.bfloat16 else 1e-5
            assert got.dtype == dtype and bool(((got.double() - slope).abs() <= step * slope.abs() + 1e-6).all())
            assert float(slope.abs().max()) > 1e-3, "the router learns from a replayed selection"
    for rule, e, k in ((Rule(), 5, 2), (Rule(sigmoid=True), 6, 3), (grouped, 16, 4)):
        logits = torch.randn(6, e)
        logits[0], logits[1, 2], logits[2, 3], logits[3, 1] = torch.nan, torch.nan, torch.inf, -torch.inf
        logits[4, 0] = logits[4, e - 1] = torch.nan
        (gates, experts), (want, named) = route_triton(logits, k, True, None, rule), route(logits, k, True, None, rule)
        assert torch.equal(experts, named) and int(experts.max()) < e, "NaN names an expert that exists"
        torch.testing.assert_close(gates, want, equal_nan=True, rtol=1e-5, atol=1e-6)
    believed = Rule(plausible=0.1)
    logits = torch.log(torch.tensor([[0.50, 0.30, 0.15, 0.04, 0.01]]))
    record = torch.tensor([[4, 0]])
    assert route_triton(logits, 2, True, record, believed)[1].tolist() == [[1, 0]]


def nobody() -> None:
    """A mixture of no tokens: nothing is read, and no expert has a gradient."""
    x, gates, experts = torch.empty(0, 32), torch.empty(0, 2), torch.empty(0, 2, dtype=torch.int64)
    up, down = torch.randn(4, 64, 32), torch.randn(4, 32, 32)
    for grid in ("", "mxfp8", "nvfp4"):
        out, inner = experts_triton(x, gates, experts, up, down, False, grid)
        slopes = experts_backward_triton(x, x, gates, experts, up, down, inner, False, grid, True, True)
        assert [y.shape for y in (out, *slopes)] == [y.shape for y in (x, x, gates, up, down)]
        assert not any(bool(y.any()) for y in slopes)


def mixtures() -> None:
    """The experts' whole SwiGLU and its gradients against the twin; an expert without tokens."""
    tokens, count, k, dim, wide = 5, 4, 2, 32, 32
    experts = torch.stack([torch.randperm(3)[:k] for _ in range(tokens)])
    for dtype in DTYPES:
        x, gates, pull = torch.randn(tokens, dim).to(dtype), torch.rand(tokens, k), torch.randn(tokens, dim).to(dtype)
        up, down = torch.randn(count, 2 * wide, dim).to(dtype) * 0.2, torch.randn(count, dim, wide).to(dtype) * 0.2
        for grid in ("", "mxfp8", "nvfp4"):
            if grid:  # sums that are exact in bfloat16: the last place of one could decide an activation's few bits
                x, up = x.sign(), up.sign() * 0.25
            out, inner = experts_triton(x, gates, experts, up, down, False, grid)
            got = (out, *experts_backward_triton(pull, x, gates, experts, up, down, inner, False, grid, True, True))
            leaves = [y.clone().requires_grad_() for y in (x, gates, up, down)]
            # The last place of an activation can decide a quantised number: both sides have the kernel's activation.
            with (
                patch.object(batch_invariant, "swiglu_forward", swiglu_triton),
                patch.object(batch_invariant, "swiglu_backward", swiglu_backward_triton),
            ):
                want = expert_mlp(leaves[0], leaves[1], experts, leaves[2], leaves[3], False, formats.cast(grid))
                slopes = torch.autograd.grad((want * pull).sum(), leaves)
            for a, b in zip(got, (want.detach(), *slopes), strict=True):
                # An activation may round otherwise.
                bound = 0.1 if grid == "nvfp4" else 3e-2 if dtype == torch.bfloat16 or grid else 1e-5
                assert a.dtype == b.dtype and float((a - b).norm()) <= bound * float(b.norm())


def four_bits() -> None:
    """The twin's bytes: rows and matrices of all sizes, ties, rows of zeros, blocks far below their tensor's scale."""
    for dtype in DTYPES:
        for m, k in shapes((33, 96), (4, 2080), (1, 16)):
            x = (torch.randn(m, k) * torch.exp2(torch.randint(-60, 60, (m, 1)).float())).to(dtype)
            x *= torch.exp2(torch.randint(-12, 12, (k,)).float()).to(dtype)
            x[0, :16] = torch.arange(16).to(dtype) * 0.25
            x[m - 1, : k // 2] = 0.0
            for outer in (nvfp4.outer_of_rows(x), nvfp4.outer_of_matrices(x)):
                (q, s), (want, scale) = nvfp4.quantise_triton(x, outer), nvfp4.quantise(x, outer)
                assert torch.equal(s.view(torch.uint8), scale.view(torch.uint8)) and torch.equal(q, want)
    ties = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, 0])[None]
    assert nvfp4.quantise_triton(ties, torch.ones(1))[0].tolist() == nvfp4.quantise(ties, torch.ones(1))[0].tolist()


def scaled() -> None:
    """Block-scaled products over ragged and empty groups, in both formats; against float64 of the operands' numbers."""
    for ends, n, k in shapes(([5, 5, 140], 40, 64), ([0, 33, 40], 130, 160), ([1], 16, 32)):
        x, w = torch.randn(ends[-1], k), torch.randn(len(ends), n, k) * 0.2
        mx: Mx | Nv = Mx(*mxfp8.quantise(x))
        mw: Mx | Nv = Mx(*mxfp8.quantise(w))
        outer, whole = nvfp4.outer_of_rows(x), nvfp4.outer_of_matrices(w)
        nx, nw = Nv(*nvfp4.quantise(x, outer), outer), Nv(*nvfp4.quantise(w, whole), whole)
        for a, b in ((mx, mw), (nx, nw)):
            rows, matrices = (formats.widened(each, torch.float64) for each in (a, b))
            want = plain.grouped_mm(rows, matrices, ends)
            bound = k * 2**-24 * plain.grouped_mm(rows.abs(), matrices.abs(), ends) + 2**-24 * want.abs()
            got = product.scaled_mm_triton(a, b, ends)
            assert got.shape == want.shape and bool(((got.double() - want).abs() <= bound).all())


KERNELS = {
    "experts": mixtures,
    "no_tokens": nobody,
    "permute": permutation,
    "route_topk": routing,
    "nvfp4": four_bits,
}
if dispatch.INTERPRETED or product.there(torch.device("cuda")):
    KERNELS["scaled"] = scaled
