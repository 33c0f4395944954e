"""PyTorch's kernels in ordinary mode: where they are taken, their arguments, and the experts' products on a CPU.

`varlen_attn` runs on CUDA alone and was not run on a GPU: here the meta device gives its shapes, dtypes and arguments.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.kernels import batch_invariant, expert_mlp, library, permute
from headrace.kernels import operators as operations
from headrace.kernels.block_attention import Packing
from headrace.kernels.grouped_mm import MANY_ROWS, Ends
from headrace.kernels.operators import library as calls
from headrace.kernels.operators.experts import (
    experts_backward_triton,
    experts_backward_twin,
    experts_triton,
    experts_twin,
)
from headrace.policy import attention


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("cuda", "bfloat16", 128, 128), ""),
        (("cuda", "bfloat16", 192, 192), ""),
        (("cpu", "bfloat16", 128, 128), "runs on CUDA devices alone"),
        (("cuda", "float32", 128, 128), "takes bfloat16, not float32"),
        (("cuda", "bfloat16", 192, 128), "one head size, not keys of 192 and values of 128"),
        (("cuda", "bfloat16", 256, 256), "heads up to 192"),
        (("cuda", "bfloat16", 100, 100), "in multiples of 8, not 100"),
    ],
)
def test_ordinary_attention_is_chosen_by_name(arguments: tuple[Any, ...], reason: str) -> None:
    refusal = library.attention_refusal(*arguments)
    assert bool(refusal) == bool(reason) and reason in refusal


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("cuda", "bfloat16", False, (64, 32), 9, True), ""),
        (("cuda", "bfloat16", True, (64, 32), 9, True), "not in exact mode"),
        (("cpu", "bfloat16", False, (64, 32), 0, True), "on Hopper alone"),
        (("cuda", "bfloat16", False, (64, 32), 10, True), "on Hopper alone"),
        (("cuda", "float32", False, (64, 32), 9, True), "takes bfloat16, not float32"),
        (("cuda", "bfloat16", False, (64, 36), 9, True), "widths in multiples of 8"),
        (("cuda", "bfloat16", False, (64, 32), 9, False), "few rows per expert"),
    ],
)
def test_the_products_of_experts_are_chosen_by_name(arguments: tuple[Any, ...], reason: str) -> None:
    refusal = library.experts_refusal(*arguments)
    assert bool(refusal) == bool(reason) and reason in refusal


def with_unset_rows(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The product with NaN behind the last expert's rows, which `F.grouped_mm` does not set."""

    def computed(x: Tensor, w: Tensor, ends: Ends, dtype: torch.dtype) -> Tensor:
        out = product(x, w, ends, dtype)
        out[int(ends[-1]) :] = torch.nan
        return out

    return computed


def planned(chosen: Tensor, count: int, tile: int, capacity: int = 0) -> permute.Places:
    """`plan_triton` by its twin."""
    p = expert_mlp.plan(chosen, count, tile)
    source, ends = torch.zeros(max(p.rows, capacity), dtype=torch.int64), torch.zeros(count, dtype=torch.int64)
    source[: p.rows] = p.source
    for expert, _, end in p.parts:
        ends[expert:] = end
    return permute.Places(p.slots, source, ends)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_with_the_librarys_products_are_those_of_the_twin(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code of a GPU with its Triton parts replaced by their twins; an expert has no rows."""
    taken = calls.LIBRARY._replace(
        forward=with_unset_rows(calls.LIBRARY.forward), dgrad=with_unset_rows(calls.LIBRARY.dgrad)
    )
    monkeypatch.setattr(calls, "products", lambda *_: taken)
    for name, twin in (("plan", planned), ("permute", permute.permute), ("unpermute", permute.unpermute)):
        monkeypatch.setattr(permute, f"{name}_triton", twin)
    module = sys.modules[experts_triton.__module__]  # the package's `experts` is the function
    monkeypatch.setattr(module, "swiglu_triton", batch_invariant.swiglu_forward)
    monkeypatch.setattr(module, "swiglu_backward_triton", batch_invariant.swiglu_backward)
    torch.manual_seed(1)
    chosen = torch.stack([torch.randperm(3)[:2] for _ in range(9)])
    x, pull, gates = torch.randn(9, 32).to(dtype), torch.randn(9, 32).to(dtype), torch.rand(9, 2)
    up, down = (torch.randn(4, 48, 32) * 0.2).to(dtype), (torch.randn(4, 32, 24) * 0.2).to(dtype)
    operands = (x, gates, chosen, up, down)
    out, inner = experts_triton(*operands, False, "")
    want, kept = experts_twin(*operands, False, "")
    got = (out, *experts_backward_triton(pull, *operands, inner, False, "", True, True))
    slopes = experts_backward_twin(pull, *operands, kept, False, "", True, True)
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    for ours, theirs in zip(got, (want, *slopes), strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert float((ours - theirs).norm()) <= bound * float(theirs.norm())
    assert not got[3][3].any() and not got[4][3].any(), "an expert without rows has a gradient of 0"


@pytest.mark.slow  # the import of torch's fake tensors takes ten seconds of processor time
def test_exact_mode_and_few_rows_keep_the_triton_products(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(calls, "capability", lambda _: library.HOPPER)
    chosen = {}
    with FakeTensorMode():  # tensors without data, which are on a GPU that need not be there
        for device in ("cuda", "cpu"):
            x, down = (torch.empty(*shape, dtype=torch.bfloat16, device=device) for shape in ((9, 32), (4, 32, 24)))
            for rows, exact in ((4 * MANY_ROWS, False), (4 * MANY_ROWS - 1, False), (4 * MANY_ROWS, True)):
                chosen[device, rows, exact] = calls.products(x, down, rows, exact)
    assert chosen.pop(("cuda", 4 * MANY_ROWS, False)) is calls.LIBRARY
    assert all(each is calls.TRITON for each in chosen.values()) and len(chosen) == 5


def of_torch_2_11(  # type: ignore[no-untyped-def]
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):
    """The signature of torch 2.11.0, read from its wheel."""


def of_torch_2_13(  # type: ignore[no-untyped-def]
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
    enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    """The signature of torch 2.13.0."""


def test_the_flag_for_grouped_heads_is_given_where_torch_has_it() -> None:
    packing = Packing([3, 0, 2])
    assert packing.borders.tolist() == [0, 3, 5] and packing.borders.dtype == torch.int32 and packing.longest == 3
    old, new = (calls.varlen_arguments(each, packing, 0.25, True) for each in (of_torch_2_11, of_torch_2_13))
    inspect.signature(of_torch_2_11).bind(None, None, None, **old)
    inspect.signature(of_torch_2_13).bind(None, None, None, **new)
    assert new == {**old, "enable_gqa": True} and old["window_size"] == (-1, 0) and old["scale"] == 0.25
    assert "enable_gqa" not in calls.varlen_arguments(of_torch_2_13, packing, 0.25, False)


class Arguments(TorchDispatchMode):
    """Notes the arguments of the operators of `torch.nn.attention.varlen`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.noted: dict[str, tuple[Any, ...]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "torch_attn":
            self.noted[func._schema.name] = args
        return func(*args, **(kwargs or {}))


@pytest.mark.slow  # the import of torch's compiler takes ten seconds of processor time
def test_ordinary_attention_calls_varlen_attn_with_its_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention.varlen import varlen_attn

    assert list(inspect.signature(varlen_attn).parameters) == list(inspect.signature(of_torch_2_13).parameters)
    monkeypatch.setattr(operations, "varlen_refusal", lambda *_: "")
    meta = torch.device("meta")
    q, k, v = (torch.empty(16, n, 32, device=meta, dtype=torch.bfloat16, requires_grad=True) for n in (4, 2, 2))
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with Arguments() as called, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = attention.packed(q, k, v, Packing([11, 0, 5], meta), 0.25, exact=False)
        gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert [(g.shape, g.dtype) for g in gradients] == [(x.shape, x.dtype) for x in (q, k, v)]
    assert called.noted["torch_attn::_varlen_attn"][5:11] == (11, 11, True, 0.25, [-1, 0], True)
    assert called.noted["torch_attn::_varlen_attn"][3].shape == (3,)
    assert set(called.noted) == {"torch_attn::_varlen_attn", "torch_attn::_varlen_attn_backward"}
    fused = 2 * 16 * 32 * (2 * 4 + 2 * 2) + 4 * 16 * 4
    assert sum(t.nbytes for t in saved) == pytest.approx(fused, rel=0.02), "as the plan counts for one kernel"


def test_exact_mode_does_not_ask_for_the_librarys_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: Tensor) -> str:
        raise AssertionError("exact mode has one kernel")

    monkeypatch.setattr(operations, "varlen_refusal", asked)
    q, k = torch.randn(5, 4, 16), torch.randn(5, 2, 16)
    exact = attention.packed(q, k, k, Packing([5]), 0.25, exact=True)
    assert torch.equal(exact, operations.packed_attention(q, k, k, Packing([5]), 0.25))
    with pytest.raises(AssertionError, match="exact mode has one kernel"):
        attention.packed(q, k, k, Packing([5]), 0.25, exact=False)
