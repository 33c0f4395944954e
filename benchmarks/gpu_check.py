"""The checks that only a GPU can make, in two calls of at most six minutes each on one H100 or H200.

    python -m benchmarks.gpu_check --plan
    python -m benchmarks.gpu_check --call 1 --out gpu.json
    python -m benchmarks.gpu_check --call 2 --out gpu.json

It needs no network, Python 3.11 or later, and the packages that `--plan` lists. The first call tries a model of random
weights in the shape of Qwen3-0.6B (`headrace try`: trainer, embedded engine, swaps, scores) and runs the tests that
need a GPU. The second takes steps in the true shape of Qwen3-4B: MFU, peak beside plan. Parts have time limits, and
what it printed is kept where it fails. `--out` collects both calls in one JSON object with date and conditions.
`--smoke` runs the same parts with a tiny shape on the CPU; those that need a GPU say so.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.conditions import arguments, conditions, finish, scratch
from benchmarks.gpu_step import SHAPES
from headrace.parent_death import ending_with_parent
from headrace.policy.layout import checkpoint, hugging_face
from headrace.policy.model import Model
from headrace.policy.numerics import Numerics
from tests.support import chat_formats

CALL_S = 350
"""Seconds of a call, with the start of Python."""
TAIL = 1500
"""Characters of a failed part's output that are kept."""
GPU_TESTS = (
    "tests/kernels/test_triton.py", "tests/engines/embedded/test_cuda.py", "tests/policy/test_numerics_probe_cuda.py",
    "tests/training/test_memory_plan.py", "tests/metrics/test_machine_use.py",
)  # fmt: skip
PART = re.compile(r"^ok +([\d.]+) s  ([^:]+): (.*)$", re.MULTILINE)


class Part(NamedTuple):
    """One command of a call."""

    name: str
    call: int
    seconds: int
    """Its time limit."""
    gpu: bool
    words: tuple[str, ...]


def parts(folder: Path, tiny: bool) -> list[Part]:
    """The commands of both calls."""
    device = "cpu" if tiny else "cuda"
    keys = {
        "policy.checkpoint": folder / "model", "run.dir": folder / "runs", "environment.backend": "process",
        "production.enabled": "false", "trainer.device": device, "engine.device": device,
        "limits.max_turn_tokens": 16 if tiny else 256, "limits.context_tokens": 8192, "engine.cache_share": 0.1,
        "algorithm.learning_rate": 1e-5, "run.min_free_mb": 64,
    }  # fmt: skip
    sets = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    shape = "tiny" if tiny else "qwen3-4b"
    step = ("-m", "benchmarks.gpu_step", "--shape", shape, "--steps", "3", "--arms", "ordinary-recompute")
    return [
        Part("try", 1, 150, gpu=False, words=("-m", "headrace.cli", "try", str(folder / "run.toml"), *sets)),
        Part("tests", 1, 190, gpu=True, words=("-m", "pytest", "-q", "-n", "0", "-m", "gpu", *GPU_TESTS)),
        Part("step", 2, 340, gpu=True, words=step),
    ]


def model(folder: Path, shape: str) -> None:
    """A folder of random weights with a small tokenizer and a chat template."""
    config = hugging_face.parse(SHAPES[shape])
    numerics = Numerics(exact=False, reason="it computes nothing", fingerprint="")
    checkpoint.save(folder / "model", Model(config, numerics, seed=1), config)
    for name, text in {
        "tokenizer.json": chat_formats.tokenizer_json(),
        "tokenizer_config.json": '{"eos_token": "<|im_end|>"}',
        "chat_template.jinja": chat_formats.CHATML,
    }.items():
        (folder / "model" / name).write_text(text)
    (folder / "run.toml").touch()


def measured(part: Part) -> dict[str, Any]:
    """The part's result: seconds by part of `try`, the JSON line of a benchmark, the last line of tests."""
    if part.gpu and not torch.cuda.is_available():
        return {"not_run": "this machine has no CUDA device"}
    began = time.monotonic()
    try:
        done = subprocess.run(
            ending_with_parent((sys.executable, *part.words)),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=part.seconds,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        shown = error.stdout.decode("utf-8", "replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        return {"failed": f"it took longer than {part.seconds} s", "output": shown[-TAIL:]}
    out: dict[str, Any] = {"rc": done.returncode, "seconds": round(time.monotonic() - began, 1)}
    lines = done.stdout.splitlines()
    if found := PART.findall(done.stdout):
        out["parts"] = {name: {"seconds": float(seconds), "text": text} for seconds, name, text in found}
    if lines and lines[-1].startswith("{"):
        out["figures"] = json.loads(lines[-1])
    elif part.name == "tests" and lines:
        out["last"] = lines[-1]
    return out if not done.returncode else out | {"output": done.stdout[-TAIL:]}


def plan() -> str:
    """The needs of the check: commands with their time limits, packages, and MiB of the tracked files."""
    listed = subprocess.check_output(["git", "ls-files", "-z"], text=True).split("\0")
    tree = sum(Path(name).stat().st_size for name in listed if name and Path(name).is_file())
    wanted = metadata.requires("headrace") or []
    names = sorted({re.split(r"[^\w.-]", each)[0] for each in wanted if "extra ==" not in each} | {"triton", "pytest"})
    lines = [f"call {part.call}, at most {part.seconds} s: {part.name}" for part in parts(Path("/tmp"), tiny=False)]
    lines.append(f"tracked files: {tree / (1 << 20):.1f} MiB, of at most 64 with the packages that the machine lacks")
    return "\n".join([*lines, f"packages: {', '.join(names)}"])


def main(argv: Sequence[str] | None = None) -> None:
    """Run a call and write the JSON. With `--smoke` a tiny shape runs, on a CPU too."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", action="store_true", help="print commands, packages and size; run nothing")
    parser.add_argument("--call", type=int, choices=(1, 2), default=1)
    parser.add_argument("--out", type=Path, default=Path(scratch(), "gpu-check.json"))
    args = arguments(parser, argv)
    if args.plan:
        print(plan())
        return
    result: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {"parts": {}}
    with tempfile.TemporaryDirectory(prefix="headrace-gpu-check-") as name:
        folder = Path(name)
        model(folder, "tiny" if args.smoke else "qwen3-0.6b")
        for part in parts(folder, args.smoke):
            if part.call == args.call:
                result["parts"][part.name] = measured(part)
                result["conditions"] = json.loads(json.dumps(conditions("torch"), default=_plain))
                result["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
                args.out.write_text(json.dumps(result, indent=2) + "\n")  # whatever the next part does
    finish(result, {})


def _plain(value: Any) -> Any:
    return {name: getattr(value, name) for name in value.__struct_fields__}


if __name__ == "__main__":
    main()
