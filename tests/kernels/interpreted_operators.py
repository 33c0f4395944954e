"""Compares what every operator has for CUDA, in the interpreter, with what it has for the CPU.

The launchers have tests of their own; here a body that swaps two arguments, forgets a reshape or is missing shows. On a
GPU the same cases run there.
"""

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

from headrace.kernels import expert_mlp
from headrace.kernels.block_scaled import product
from headrace.kernels.operators import library, rounded_weights
from tests.kernels.cases import QUICK
from tests.kernels.test_operators import cases

EXACT, ROUNDED = 1e-4, 0.3
"""Bounds on the norm of an error, as part of the result's: of sums in another order, and where an activation of four
bits may be rounded to its neighbour. A swapped argument changes all of a result."""


def body(name: str, device: str) -> Any:
    """The function that an operator has for a device. KeyError where it has none."""
    return OPDEFS[f"headrace::{name}"]._backend_fns[device]


def drawn() -> dict[str, tuple[Any, ...]]:
    """`cases`, with fewer rows for experts: the interpreter runs a program for each."""
    out = cases()
    chosen = torch.tensor([[0, 1], [1, 0], [0, 1]])
    x, gates, _, up, down, *rest = out["experts"]
    pull, flags = out["experts_backward"][0], out["experts_backward"][9:]
    operands = (x[:3], gates[:3], chosen, up[:2], down[:2])
    return out | {
        "experts": (*operands, *rest),
        "experts_backward": (pull[:3], *operands, None, *rest, *flags),  # `with_inner` sets the seventh
    }


def every() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Operators with arguments: those of `drawn`, and other branches."""
    args = drawn()
    yield from args.items()
    weight = args["linear"][1].detach()
    yield "rotate", (*args["rotate"][:3], True)
    yield "linear_backward", (*args["linear_backward"][:-1], False)
    yield "selected_logprob_backward", (*args["selected_logprob_backward"][:-1], False)
    yield "experts", (*args["experts"][:-1], "")
    for learn in () if QUICK else ((True, True), (False, True), (True, False)):
        yield "experts_backward", (*args["experts_backward"][:8], "", *learn)
    yield "route", (torch.randn(9, 8), 2, False, None, torch.randn(8), True, 4, 2, 2.0, 0.0)
    replay = torch.tensor([[4, 0]] * 9)
    yield "route", (args["route_backward"][1], 2, True, replay, None, False, 1, 1, 1.0, 0.9)
    yield "quantise", (weight.view(6, 8, 32),)
    yield "quantise_nvfp4", (weight.view(6, 8, 32), torch.rand(6, 8).exp2())
    yield "dequantise", (*(part.view(3, 3, -1) for part in args["dequantise"][:2]), torch.float32)


def apart(got: Tensor, want: Tensor) -> float:
    """The norm of the difference over that of the wanted result; 0 where bits are equal."""
    assert got.shape == want.shape and got.dtype == want.dtype, (got.shape, want.shape, got.dtype, want.dtype)
    if not got.dtype.is_floating_point or got.dtype.itemsize == 1:
        return 0.0 if torch.equal(got.view(torch.uint8), want.view(torch.uint8)) else 1.0
    scale = float(want.double().norm())
    return float((got.double() - want.double()).norm()) / scale if scale else float(got.double().norm())


def tensors(out: Any) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else list(out)


def bare(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments without gradients."""
    return tuple(each.detach() if isinstance(each, Tensor) else each for each in args)


def with_inner(args: tuple[Any, ...], device: str) -> tuple[Any, ...]:
    """Arguments of `experts_backward` with the inner activations of a device's own forward body."""
    return (*args[:6], body("experts", device)(*args[1:6], *args[7:9])[1], *args[7:])


def registered() -> None:
    """Each operator's body for CUDA computes what the CPU's does."""
    for name, args in every():
        here = bare(args)
        on_cpu = tree_map(lambda each: each.cpu() if isinstance(each, Tensor) else each, here)
        if name == "experts_backward":
            here, on_cpu = with_inner(here, "cuda"), with_inner(on_cpu, "cpu")
        got, want = (tensors(body(name, "cuda")(*here)), tensors(body(name, "cpu")(*on_cpu)))
        if name == "experts":
            got, want = got[:1], want[:1]
        bound = ROUNDED if "nvfp4" in [each for each in args if isinstance(each, str)] else EXACT
        errors = [apart(mine.cpu(), theirs) for mine, theirs in zip(got, want, strict=True)]
        assert max(errors) <= bound, (name, errors)


def frozen() -> None:
    """A weight that does not learn costs no product."""
    args = drawn()
    for name in ("linear_backward", "selected_logprob_backward"):
        counts = []
        for learns in (True, False):
            with FlopCounterMode(display=False) as counter:
                out = body(name, "cuda")(*(bare(args[name][:-1])), learns)
            counts.append(counter.get_total_flops())
            assert out[1].numel() == (args[name][2].numel() if learns else 0)
        assert counts[1] * 2 == counts[0] > 0, (name, counts)
    made: list[tuple[int, ...]] = []

    def wgrad(*operands: Any) -> Tensor:
        made.append((operands[0].shape[1], operands[1].shape[1]))
        return library.TRITON.wgrad(*operands)

    rest = with_inner(bare(args["experts_backward"]), "cuda")[:-2]
    with patch.object(library, "products", lambda *_: library.TRITON._replace(wgrad=wgrad)):
        for learn in ((False, False), (True, False), (False, True)):
            body("experts_backward", "cuda")(*rest, *learn)
    assert made == [(64, 32), (32, 32)], "gate_up's, then down's"


def blackwell() -> None:
    """The experts of a GPU with block-scaled products, against the twin; quantised numbers are equal, sums in float32
    nearly."""
    torch.manual_seed(3)
    experts = torch.stack([torch.randperm(2) for _ in range(70)])
    for grid in ("mxfp8", "nvfp4"):
        # Sums that are exact: the last place of one could decide an activation's few bits.
        x, gates = torch.randn(70, 64).sign(), torch.rand(70, 2)
        up = rounded_weights(torch.randn(2, 128, 64).sign() * 0.25, grid, 2)
        down = rounded_weights(torch.randn(2, 64, 64) * 0.2, grid)
        used: list[str] = []
        scaled = product.scaled_mm_triton

        def noted(*operands: Any, used: list[str] = used, scaled: Any = scaled) -> Tensor:
            used.append(type(operands[0]).__name__)
            out: Tensor = scaled(*operands)
            return out

        with patch.object(product, "there", lambda _: True), patch.object(product, "scaled_mm_triton", noted):
            got = body("experts", "cuda")(x, gates, experts, up, down, False, grid)[0]
        assert used == [{"mxfp8": "Mx", "nvfp4": "Nv"}[grid]] * 2, used
        want = body("experts", "cpu")(x.cpu(), gates.cpu(), experts.cpu(), up.cpu(), down.cpu(), False, grid)[0]
        plain = expert_mlp.expert_mlp(x.cpu(), gates.cpu(), experts.cpu(), up.cpu(), down.cpu(), False)
        assert apart(got.cpu(), want) <= 2e-2 < apart(plain, want), "the inputs of the products are rounded"


KERNELS = {"operators": registered, "frozen": frozen, "experts_block_scaled": blackwell}
