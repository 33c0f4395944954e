"""The GPU part of `benchmarks.kernels`: every kernel against the library's best at the same shapes.

A speed-up is the library's time over our time, each the best of interleaved rounds, so that a changing clock rate
affects both. Times are the device's: launches of few rows take longer on the host than on the device. Where no library
has the operation, the baseline is a copy of as many bytes (read and written).
"""

import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.conditions import Figures
from headrace.kernels import delta, grouped_mm, mxfp8, permute
from headrace.kernels.attention.backward import packed_attention_backward_triton
from headrace.kernels.attention.forward import cached_attention_triton, packed_attention_triton
from headrace.kernels.batch_invariant import linear_triton, rms_norm_triton
from headrace.kernels.block_attention import BLOCK, Packing
from headrace.kernels.operators import library
from headrace.kernels.route_topk import route_triton
from headrace.kernels.selected_logprob import selected_logprob_backward_triton, selected_logprob_triton
from tests.kernels import plain


class Pools(NamedTuple):
    """A paged cache: [blocks, V, 64, D] each."""

    keys: Tensor
    values: Tensor


COUNTS = (1, 2, 3, 5, 8, 16, 17, 33, 64, 100, 128, 129, 511, 1024, 2000, 4096)
"""Numbers of rows over which a row's bits must not change."""


def draw(*shape: int) -> Tensor:
    """bfloat16 on the GPU."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def best_ms(works: Sequence[Callable[[], Any]], rounds: int = 20) -> list[float]:
    """The best time of each on the device, in interleaved rounds. Before each run the cache is overwritten, which takes
    longer than the host needs to launch: host time is not in the result."""
    best = [float("inf")] * len(works)
    other = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    for work in works:
        work()
    for _ in range(rounds):
        for place, work in enumerate(works):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            other.zero_()
            other.zero_()
            began.record()
            work()
            ended.record()
            torch.cuda.synchronize()
            best[place] = min(best[place], began.elapsed_time(ended))
    return best


def paired(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int = 20) -> float:
    """The library's best time over our best time."""
    mine, library = best_ms([ours, theirs], rounds)
    return library / mine


def against_copy(ours: Callable[[], Any], moved: float, rounds: int = 20) -> float:
    """Bandwidth of `ours`, which moves that many bytes, over the bandwidth of a copy of as many."""
    source = torch.empty(int(moved) // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return paired(ours, lambda: target.copy_(source), rounds)


def relative(got: Tensor, want: Tensor) -> float:
    """Norm of the error over the norm of the reference."""
    return float((got.double() - want).norm() / want.norm())


def same(whole: Sequence[Tensor], part: Callable[[int], Sequence[Tensor]]) -> bool:
    """Whether the first m rows alone have the same bits as within all rows, for every m."""
    return all(torch.equal(mine, all_of_it[:m]) for m in COUNTS for mine, all_of_it in zip(part(m), whole, strict=True))


def products() -> Figures:
    """Matrix products, square and with few rows."""
    a, b = draw(4096, 4096), draw(4096, 4096)
    out: Figures = {"matmul_over_cublas": paired(lambda: linear_triton(a, b), lambda: a @ b.T)}
    for count in (16, 64):
        few = a[:count]

        def mine(few: Tensor = few) -> Tensor:
            return linear_triton(few, b)

        def library(few: Tensor = few) -> Tensor:
            return few @ b.T

        out[f"matmul_{count}_rows_over_cublas"] = paired(mine, library)
    whole = linear_triton(a, b)
    out["matmul_relative_error"] = relative(whole[:64], a[:64].double() @ b.double().T)
    out["matmul_invariant"] = same([whole], lambda m: [linear_triton(a[:m], b)])
    return out


def attention() -> Figures:
    """Prefill and its gradient against cuDNN's, decode against the bytes of its keys and values."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    batch, length, heads, kv_heads, d = 4, 4096, 32, 8, 128
    lengths, scale = [length] * batch, d**-0.5
    q, k, v = (draw(batch * length, count, d) for count in (heads, kv_heads, kv_heads))
    wide = [x.view(batch, length, -1, d).transpose(1, 2).requires_grad_() for x in (q, k, v)]

    def library() -> Tensor:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]):
            return F.scaled_dot_product_attention(
                wide[0], wide[1], wide[2], is_causal=True, scale=scale, enable_gqa=True
            )

    out: Figures = {
        "attention_prefill_over_cudnn": paired(
            lambda: packed_attention_triton(q, k, v, lengths, scale), lambda: library().detach(), rounds=5
        )
    }
    whole, lse = packed_attention_triton(q, k, v, lengths, scale)
    theirs, pull = library(), draw(batch * length, heads, d)
    turned = pull.view(batch, length, heads, d).transpose(1, 2)
    out["attention_backward_over_cudnn"] = paired(
        lambda: packed_attention_backward_triton(pull, q, k, v, whole, lse, lengths, scale),
        lambda: torch.autograd.grad(theirs, wide, turned, retain_graph=True),
        rounds=5,
    )
    first = [x[:length] for x in (whole, lse)]
    out["attention_invariant"] = same(
        first, lambda m: packed_attention_triton(q[:m], k[:m], v[:m], [m], scale)
    ) and torch.equal(packed_attention_triton(q, k, v, lengths, scale, split=True)[0], whole)

    count, blocks = 32, length // BLOCK
    pools = Pools(*(draw(count * blocks, kv_heads, BLOCK, d) for _ in range(2)))
    table = torch.randperm(count * blocks, device="cuda").view(count, blocks)
    new, at = draw(count, 1, heads, d), [length - 1] * count
    moved = 2 * count * length * kv_heads * d * 2
    out["attention_decode_over_copy"] = against_copy(
        lambda: cached_attention_triton(new, pools.keys, pools.values, table, at, scale), moved
    )
    together = cached_attention_triton(new, pools.keys, pools.values, table, at, scale)
    out["attention_decode_invariant"] = all(
        torch.equal(cached_attention_triton(new[:n], pools.keys, pools.values, table[:n], at[:n], scale), together[:n])
        for n in (1, 2, 3, 8, 31)
    )
    keys, values = (x[:length].view(blocks, BLOCK, kv_heads, d).transpose(1, 2).contiguous() for x in (k, v))
    whole_table = torch.arange(blocks, device="cuda")[None]
    out["attention_decode_is_prefill"] = all(
        torch.equal(
            cached_attention_triton(q[None, p : p + 1], keys, values, whole_table, [p], scale)[0], whole[p : p + 1]
        )
        for p in (0, 1, 63, 64, 511, 512, 1000, length - 1)
    )
    return out


def rows() -> Figures:
    """Norms of rows, by bandwidth."""
    x, weight = draw(16384, 4096), draw(4096)
    out: Figures = {"rms_norm_over_copy": against_copy(lambda: rms_norm_triton(x, weight, 1e-6), 4 * x.numel())}
    normed = rms_norm_triton(x, weight, 1e-6)[0]
    out["rms_norm_invariant"] = same([normed], lambda m: [rms_norm_triton(x[:m], weight, 1e-6)[0]])
    return out


def eight_bits() -> Figures:
    """MXFP8's quantiser and its inverse by bandwidth: a number is 2 bytes on one side and 1.03 on the other."""
    a = draw(8192, 8192)
    out: Figures = {"quantise_over_copy": against_copy(lambda: mxfp8.quantise_triton(a), 3.03 * a.numel())}
    q, s = mxfp8.quantise_triton(a)
    want_q, want_s = mxfp8.quantise(a.cpu())
    out["quantise_bytes_equal"] = torch.equal(q.cpu().view(torch.uint8), want_q.view(torch.uint8)) and torch.equal(
        s.cpu(), want_s
    )
    out["dequantise_over_copy"] = against_copy(lambda: mxfp8.dequantise_triton(q, s, a.dtype), 3.03 * a.numel())
    out["dequantise_equal"] = torch.equal(
        mxfp8.dequantise_triton(q, s, a.dtype).cpu(), mxfp8.dequantise(want_q, want_s, a.dtype)
    )
    return out


def grouped() -> Figures:
    """Products of experts with many rows and with few, against the library's."""
    out: Figures = {}
    experts, n, k = 16, 2048, 2048
    w = draw(experts, n, k)
    for name, count in (("compute_bound", 1024), ("32_rows", 32)):
        x, ends = draw(experts * count, k), [count * (e + 1) for e in range(experts)]
        offsets, places = (torch.tensor(ends, dtype=dtype, device="cuda") for dtype in (torch.int32, torch.int64))
        turned = w.transpose(1, 2)

        def mine(x: Tensor = x, places: Tensor = places) -> Tensor:
            return grouped_mm.grouped_mm_triton(x, w, places, torch.bfloat16)

        def library(x: Tensor = x, offsets: Tensor = offsets, turned: Tensor = turned) -> Tensor:
            return torch._grouped_mm(x, turned, offs=offsets)

        out[f"grouped_bf16_over_library_{name}"] = paired(mine, library)
        part = grouped_mm.grouped_mm_triton(x[:32], w, [32] * experts, torch.bfloat16)
        out[f"grouped_bf16_{name}_is_few_rows"] = torch.equal(part, mine()[:32])
    wide = [each.double() for each in (x, w)]
    out["grouped_bf16_relative_error"] = relative(mine(), plain.grouped_mm(wide[0], wide[1], ends))
    slope = draw(len(x), n)
    got = grouped_mm.grouped_dgrad_triton(slope, w, ends, torch.bfloat16)
    out["grouped_bf16_dgrad_relative_error"] = relative(got, plain.grouped_dgrad(slope.double(), wide[1], ends))
    got = grouped_mm.grouped_wgrad_triton(slope, x, ends, torch.bfloat16)
    out["grouped_bf16_wgrad_relative_error"] = relative(got, plain.grouped_wgrad(slope.double(), wide[0], ends))
    return out


def selected() -> Figures:
    """Log-probabilities of chosen tokens at Qwen3's vocabulary: time and memory against the head's own product."""
    h, head = draw(4096, 2048), draw(151_936, 2048) * 0.02
    ids = torch.randint(0, len(head), (4096,), device="cuda")
    out: Figures = {
        "selected_logprob_over_head_time": 1
        / paired(lambda: selected_logprob_triton(h, head, ids, 1.0), lambda: h @ head.T, rounds=5)
    }
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    logp, _, lse = selected_logprob_triton(h, head, ids, 1.0)
    share = (torch.cuda.max_memory_allocated() - held) / (len(h) * len(head) * 4)
    out["selected_logprob_memory_share"] = share
    full = torch.log_softmax(h[:32].double() @ head.double().T, -1).gather(1, ids[:32, None])[:, 0]
    out["selected_logprob_max_error"] = float((logp[:32].double() - full).abs().max())
    out["selected_logprob_invariant"] = same([logp], lambda m: [selected_logprob_triton(h[:m], head, ids[:m], 1.0)[0]])
    grad = torch.randn(len(h), device="cuda")
    leaves = (h.detach().requires_grad_(), head.detach().requires_grad_())
    plain = torch.log_softmax((leaves[0] @ leaves[1].T).float(), -1).gather(1, ids[:, None])[:, 0]
    out["selected_logprob_backward_over_unfused_time"] = 1 / paired(
        lambda: selected_logprob_backward_triton(grad, h, head, ids, 1.0, lse),
        lambda: torch.autograd.grad(plain, leaves, grad, retain_graph=True),
        rounds=3,
    )
    return out


def mixture() -> Figures:
    """Routing, permutation to the experts and back, by bandwidth of the rows."""
    tokens, d, count, k = 16384, 2048, 128, 8
    x, logits = draw(tokens, d), draw(tokens, count)
    gates, experts = route_triton(logits, k, True)
    places = permute.plan_triton(experts, count, 32)
    moved = permute.permute_triton(x, places.source)
    out: Figures = {
        "permute_over_copy": against_copy(lambda: permute.permute_triton(x, places.source), 4 * moved.numel()),
        "unpermute_over_copy": against_copy(
            lambda: permute.unpermute_triton(moved, places.slots, gates), 2 * (tokens * k * d + tokens * d)
        ),
    }
    whole = permute.unpermute_triton(moved, places.slots, gates)
    out["unpermute_invariant"] = same(
        [whole], lambda m: [permute.unpermute_triton(moved, places.slots[: m * k], gates[:m])]
    )
    out["route_invariant"] = same([gates, experts], lambda m: route_triton(logits[:m], k, True))
    return out


def deltas() -> Figures:
    """Finding and applying the changes of 2^28 weights, one in a hundred changed; 4 bytes per weight are moved."""
    old = torch.randint(-32768, 32767, (2**28,), dtype=torch.int16, device="cuda")
    new = torch.where(torch.rand(2**28, device="cuda") < 0.01, old + 1, old)
    at, folded = delta.changes_triton(old, new)
    out: Figures = {
        "delta_encode_over_copy": against_copy(lambda: delta.changes_triton(old, new), 4 * old.numel(), rounds=5),
        "delta_apply_over_copy": against_copy(lambda: delta.apply_triton(old, at, folded), 4 * old.numel(), rounds=5),
        "delta_exact": torch.equal(delta.apply_triton(old, at, folded), new),
    }
    return out


def ordinary() -> Figures:
    """The kernels of PyTorch that ordinary mode takes against those of exact mode: our speed over theirs, and the
    largest relative difference of results and gradients. An expert has no rows."""
    lengths, heads, kv_heads, d = [4096] * 4, 32, 8, 128
    q, k, v = (draw(sum(lengths), count, d).requires_grad_() for count in (heads, kv_heads, kv_heads))
    packing, scale, pull = Packing(lengths, q.device), d**-0.5, draw(sum(lengths), heads, d)
    attended = library.varlen_attention(q, k, v, packing, scale)
    bare = [x.detach() for x in (q, k, v)]
    whole, lse = packed_attention_triton(bare[0], bare[1], bare[2], lengths, scale)

    def mine() -> Sequence[Tensor]:
        return packed_attention_backward_triton(pull, bare[0], bare[1], bare[2], whole, lse, lengths, scale)

    def theirs() -> Sequence[Tensor]:
        return torch.autograd.grad(attended, (q, k, v), pull, retain_graph=True)

    pairs = [(attended.detach(), whole), *zip(theirs(), mine(), strict=True)]
    out: Figures = {
        "varlen_relative_difference": max(relative(a, b.double()) for a, b in pairs),
        "attention_prefill_over_varlen": paired(
            lambda: packed_attention_triton(bare[0], bare[1], bare[2], lengths, scale),
            lambda: library.varlen_attention(bare[0], bare[1], bare[2], packing, scale),
            rounds=5,
        ),
        "attention_backward_over_varlen": paired(mine, theirs, rounds=5),
    }
    ends = torch.arange(1, 33, device="cuda") * 1024
    ends[7] = ends[6]
    x, g, w = draw(32 * 1024 + 64, 2048), draw(32 * 1024 + 64, 1536), draw(32, 1536, 2048)
    for name, operands in (("forward", (x, w)), ("dgrad", (g, w)), ("wgrad", (g, x))):
        ours, other = (getattr(each, name) for each in (library.TRITON, library.LIBRARY))
        both = [product(*operands, ends, torch.bfloat16)[: int(ends[-1])] for product in (ours, other)]
        out[f"grouped_{name}_relative_difference"] = relative(both[1], both[0].double())
        out[f"grouped_{name}_over_library"] = paired(
            lambda f=ours, of=operands: f(*of, ends, torch.bfloat16),  # type: ignore[misc]
            lambda f=other, of=operands: f(*of, ends, torch.bfloat16),  # type: ignore[misc]
        )
    return out


PARTS: tuple[Callable[[], Figures], ...] = (
    products,
    attention,
    rows,
    eight_bits,
    grouped,
    selected,
    mixture,
    deltas,
    ordinary,
)


def measured(names: Sequence[str] = ()) -> Figures:
    """All measurements, or those of the named parts, one part after the other, so that each frees its memory before
    the next. A part that raises gives its error in place of its figures, and the others still run."""
    out: Figures = {"gpu": torch.cuda.get_device_name()}
    for part in PARTS:
        if names and part.__name__ not in names:
            continue
        began = time.perf_counter()
        try:
            out |= part()
        except Exception as error:
            out[f"{part.__name__}_error"] = f"{type(error).__name__}: {error}"[:500]
            traceback.print_exc()
        print(f"{part.__name__}: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
        torch.cuda.empty_cache()
    return out
