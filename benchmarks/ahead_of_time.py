"""Compiles every Triton kernel for GPUs that this machine lacks: registers, spills, shared memory, tensor memory,
tensor-core instruction.

    python -m benchmarks.ahead_of_time [--write] [launcher ...]

Each launcher of `headrace/kernels` runs on CPU tensors in sizes of a real model, with the launch replaced by a
compilation for sm_89 (L40S), sm_90 (H100, H200) and sm_100 (B200) and with the tiles that each of them gets; nothing is
executed and no speed is measured. The output is JSON;
--write replaces benchmarks/results/kernels_ahead_of_time.json, which `tests/kernels/test_ahead_of_time.py` compares.
Needs Triton (the extra `kernels`) with the ptxas and cuobjdump that its wheel brings.
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.conditions import arguments, conditions, finish

RESULT = Path(__file__).parent / "results" / "kernels_ahead_of_time.json"
ARCHITECTURES = (89, 90, 100)
TENSOR_MEMORY = 512
"""Columns of tensor memory that a program may use on sm_100; other GPUs have none."""
BLACKWELL = frozenset(
    {"grouped mxfp8, block-scaled", "grouped nvfp4, block-scaled", "grouped mxfp8, block-scaled, odd sides"}
)
"""Launchers that are compiled for sm_100 alone: other GPUs have no such instruction."""
_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
}
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
Row = dict[Any, Any]


def launchers() -> dict[str, Callable[[], Any]]:
    """A name for each launch of a kernel. The kernels are imported here, because they look for a GPU at their
    import."""
    torch.cuda.is_available = lambda: True
    from headrace.kernels import (
        batch_invariant,
        delta,
        grouped_mm,
        mxfp8,
        permute,
        route_topk,
        selected_logprob,
    )
    from headrace.kernels.attention import backward, forward
    from headrace.kernels.block_scaled import nvfp4, product
    from headrace.kernels.elementwise import norm, rotary, swiglu
    from headrace.kernels.route import Rule

    half, single = torch.bfloat16, torch.float32

    def new(*shape: int, dtype: torch.dtype = half) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype)

    table = torch.zeros(4, 4, dtype=torch.int64)

    def packed(heads: int, shared: int, d: int, dtype: torch.dtype = half) -> Callable[[], Any]:
        q, k = new(256, heads, d, dtype=dtype), new(256, shared, d, dtype=dtype)
        return lambda: forward.packed_attention_triton(q, k, k, [256], 0.1)

    def cached(heads: int, shared: int, d: int, dtype: torch.dtype = half, split: bool = True) -> Callable[[], Any]:
        q, pool = new(4, 1, heads, d, dtype=dtype), new(16, shared, 64, d, dtype=dtype)
        return lambda: forward.cached_attention_triton(q, pool, pool, table, [200] * 4, 0.1, split=split)

    def pulled(heads: int, shared: int, d: int, dtype: torch.dtype = half) -> Callable[[], Any]:
        q, k, lse = new(256, heads, d, dtype=dtype), new(256, shared, d, dtype=dtype), new(256, heads, dtype=single)
        return lambda: backward.packed_attention_backward_triton(q, q, k, k, q, lse, [256], 0.1)

    hidden, head = new(512, 2048), new(8192, 2048)
    ids, lse = torch.zeros(512, dtype=torch.int64), new(512, dtype=single)
    experts, ends = 8, [64 * (e + 1) for e in range(8)]
    many, more = new(2048, 2048), [256 * (e + 1) for e in range(8)]
    rows, weights = new(512, 2048), new(experts, 2048, 2048)
    mx = grouped_mm.Mx(torch.zeros(512, 2048, dtype=torch.uint8), torch.zeros(512, 64, dtype=torch.uint8))
    mw = grouped_mm.Mx(torch.zeros(8, 2048, 2048, dtype=torch.uint8), torch.zeros(8, 2048, 64, dtype=torch.uint8))
    nx = grouped_mm.Nv(new(512, 1024, dtype=torch.uint8), new(512, 128, dtype=torch.uint8), new(512, dtype=single))
    nw = grouped_mm.Nv(
        new(8, 2048, 1024, dtype=torch.uint8), new(8, 2048, 128, dtype=torch.uint8), new(8, 2048, dtype=single)
    )
    slots, gates = torch.zeros(4096, dtype=torch.int64), new(512, 8, dtype=single)
    choice, logits = torch.zeros(512, 8, dtype=torch.int64), new(512, 128)
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    at = torch.zeros(16, dtype=torch.int64)
    limited = Rule(sigmoid=True, groups=8, kept=4)
    return {
        "matmul": lambda: batch_invariant.linear_triton(new(4096, 4096), new(4096, 4096)),
        "matmul, some rows": lambda: batch_invariant.linear_triton(new(512, 4096), new(4096, 4096)),
        "matmul, few rows": lambda: batch_invariant.linear_triton(new(32, 4096), new(4096, 4096)),
        "matmul, float32": lambda: batch_invariant.linear_triton(
            new(512, 4096, dtype=single), new(4096, 4096, dtype=single)
        ),
        "rms_norm": lambda: batch_invariant.rms_norm_triton(new(16, 4096), new(4096), 1e-6),
        "rms_norm, backward": lambda: norm.rms_norm_backward_triton(
            new(16, 32, 128), new(16, 32, 128), new(32, 128), new(16, 32, 1, dtype=single)
        ),
        "rotate": lambda: rotary.rotate_triton(new(16, 32, 128), new(16, 1, 64), new(16, 1, 64), False),
        "swiglu": lambda: swiglu.swiglu_triton(new(16, 6144)),
        "swiglu, backward": lambda: swiglu.swiglu_backward_triton(new(16, 6144), new(16, 3072)),
        "attention, packed": packed(32, 8, 128),
        "attention, packed, heads of 64": packed(64, 8, 64),
        "attention, packed, latent": packed(128, 128, 192),
        "attention, packed, float32": packed(32, 8, 128, single),
        "attention, packed, latent, float32": packed(128, 128, 192, single),
        "attention, cached": cached(32, 8, 128),
        "attention, cached, many rows": cached(32, 8, 128, half, False),
        "attention, cached, heads of 64": cached(64, 8, 64),
        "attention, cached, latent": cached(128, 128, 192),
        "attention, cached, latent, many rows": cached(128, 128, 192, half, False),
        "attention, cached, float32": cached(32, 8, 128, single),
        "attention, backward": pulled(32, 8, 128),
        "attention, backward, heads of 64": pulled(64, 8, 64),
        "attention, backward, latent": pulled(128, 128, 192),
        "attention, backward, float32": pulled(32, 8, 128, single),
        "attention, backward, latent, float32": pulled(128, 128, 192, single),
        "selected_logprob": lambda: selected_logprob.selected_logprob_triton(hidden, head, ids, 1.0),
        "selected_logprob, few rows": lambda: selected_logprob.selected_logprob_triton(
            hidden[:32], head, ids[:32], 1.0
        ),
        "selected_logprob, float32": lambda: selected_logprob.selected_logprob_triton(
            hidden.float(), head.float(), ids, 1.0
        ),
        "selected_logprob, backward": lambda: selected_logprob.selected_logprob_backward_triton(
            lse, hidden, head[:1024], ids, 1.0, lse
        ),
        "route": lambda: route_topk.route_triton(logits, 8, True, choice),
        "route, groups": lambda: route_topk.route_triton(new(512, 256), 8, True, None, limited, new(256, dtype=single)),
        "route, backward": lambda: route_topk.route_backward_triton(gates, logits, choice, True),
        "route, 384 experts": lambda: route_topk.route_triton(new(512, 384), 8, True, choice),
        "plan": lambda: permute.plan_triton(choice, 128, 64),
        "plan, 256 experts": lambda: permute.plan_triton(choice, 256, 64),
        "plan, 384 experts": lambda: permute.plan_triton(choice, 384, 64),
        "permute": lambda: permute.permute_triton(hidden, slots),
        "unpermute": lambda: permute.unpermute_triton(new(4096, 2048), slots, gates),
        "unpermute, backward": lambda: permute.unpermute_backward_triton(hidden, new(4096, 2048), slots, gates),
        "quantise": lambda: mxfp8.quantise_triton(hidden),
        "quantise nvfp4": lambda: nvfp4.quantise_triton(hidden, lse),
        "grouped, many rows": lambda: grouped_mm.grouped_mm_triton(many, weights, more, half),
        "grouped, dgrad of many rows": lambda: grouped_mm.grouped_dgrad_triton(many, weights, more, half),
        "dequantise": lambda: mxfp8.dequantise_triton(*mw, half),
        "grouped": lambda: grouped_mm.grouped_mm_triton(rows, weights, ends, half),
        "grouped, 384 experts": lambda: grouped_mm.grouped_mm_triton(rows, new(384, 128, 2048), [512] * 384, half),
        "grouped, float32": lambda: grouped_mm.grouped_mm_triton(rows.float(), weights.float(), ends, single),
        "grouped, dgrad": lambda: grouped_mm.grouped_dgrad_triton(rows, weights, ends, half),
        "grouped, wgrad": lambda: grouped_mm.grouped_wgrad_triton(rows, rows, ends, half),
        "grouped mxfp8, block-scaled": lambda: product.scaled_mm_triton(mx, mw, ends, half),
        "grouped nvfp4, block-scaled": lambda: product.scaled_mm_triton(nx, nw, ends, half),
        "grouped mxfp8, block-scaled, odd sides": lambda: product.scaled_mm_triton(
            grouped_mm.Mx(mx.q[:, :1056], mx.scale[:, :33]),
            grouped_mm.Mx(mw.q[..., :1056], mw.scale[..., :33]),
            ends,
            half,
        ),
        "delta, encode": lambda: delta.changes_triton(bits, bits),
        "delta, apply": lambda: delta.apply_triton(bits, at, at.int()),
    }


def _described(kernel: Any, args: tuple[Any, ...], options: Row) -> tuple[Row, Row, Row]:
    """The arguments of `triton.compile` for a launch: types, constants, multiples of 16."""
    named = dict(zip(kernel.arg_names, args, strict=False)) | {n: options[n] for n in kernel.arg_names if n in options}
    types: Row = {}
    constants: Row = {}
    multiples: Row = {}
    for place, name in enumerate(kernel.arg_names):
        value = named[name]
        if kernel.params[place].is_constexpr or (type(value) is int and value == 1):
            types[name], constants[(place,)] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            types[name] = _POINTERS[value.dtype]
        else:
            types[name] = "fp32" if isinstance(value, float) else "i32" if -(2**31) <= value < 2**31 else "i64"
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            multiples[(place,)] = [["tt.divisibility", 16]]
    return types, constants, multiples


def _measured(compiled: Any) -> Row:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    usage_line = re.search(r"REG:(\d+).*?STACK:(\d+)", usage.stdout + usage.stderr)
    if usage_line is None:
        raise RuntimeError(f"cuobjdump says neither registers nor stack: {usage.stdout}{usage.stderr}")
    code = compiled.asm["ptx"]
    instructions = {"wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma", "mma.sync": "mma.sync"}
    return {
        "registers": int(usage_line[1]),
        "spilled_bytes": int(usage_line[2]),
        "shared_bytes": compiled.metadata.shared,
        "tensor_memory": compiled.metadata.tmem_size or 0,
        "tensor_core": "+".join(name for name, text in instructions.items() if text in code) + _formats(code),
    }


def _formats(code: str) -> str:
    """The number formats of block-scaled instructions."""
    kinds = sorted(set(re.findall(r"kind::(\w+)\.block_scale", code)))
    return f" ({', '.join(kinds)})" if kinds else ""


def chip_of(architecture: int) -> Any:
    """The chip whose tiles are compiled for an architecture."""
    from headrace.kernels import dispatch

    major = architecture // 10
    return dispatch.Chip(major, (dispatch.ADA if major < dispatch.HOPPER.major else dispatch.HOPPER).shared_bytes)


def compiled(names: list[str]) -> list[Row]:
    """A row for each kernel and architecture that the named launchers launch; without names, those of all launchers."""
    every = launchers()
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    from headrace.kernels import dispatch

    compile_: Any = triton.compile
    jit: Any = JITFunction
    rows: list[Row] = []
    current, architecture = "", 0

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if current in BLACKWELL and architecture != ARCHITECTURES[-1]:
            return
        types, constants, multiples = _described(self, args, options)
        chosen = {name: options[name] for name in _OPTIONS if name in options}
        source = ASTSource(self, types, constants, multiples)
        out = compile_(source, target=GPUTarget("cuda", architecture, 32), options=chosen)
        module = self.fn.__module__.removeprefix("headrace.kernels.")
        row = {"launcher": current, "module": module, "kernel": self.__name__, "sm": architecture} | _measured(out)
        if row not in rows:
            rows.append(row)

    def chip(device: torch.device) -> Any:
        return chip_of(architecture)

    before = jit.run, dispatch.chip
    jit.run, dispatch.chip = run, chip
    try:
        for current in names or every:
            for architecture in ARCHITECTURES:  # noqa: B007 - `run` and `chip` read it
                every[current]()
    finally:
        jit.run, dispatch.chip = before
    return rows


def main() -> None:
    """Read the arguments, compile, print or write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ahead_of_time")
    parser.add_argument("names", nargs="*", metavar="launcher")
    parser.add_argument("--write", action="store_true", help="replace the committed table")
    args = arguments(parser, names=["rms_norm"])
    rows = compiled(args.names)
    report = {
        "command": "python -m benchmarks.ahead_of_time --write",
        "conditions": msgspec.to_builtins(conditions("torch", "triton")),
        "note": "compiled without a GPU; nothing was executed",
        "kernels": rows,
    }
    lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    text = json.dumps(report | {"kernels": []}, indent=2).replace('"kernels": []', f'"kernels": [\n{lines}\n  ]')
    if args.write and not args.smoke:
        RESULT.write_text(text + "\n", encoding="utf-8")
    elif not args.smoke:
        print(text)
    finish({"kernels": len(rows)}, {}, "torch", "triton")


if __name__ == "__main__":
    main()
