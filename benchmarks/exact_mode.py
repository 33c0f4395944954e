"""Measures the cost of exact mode, and the mismatch of sampler and trainer without it.

    python -m benchmarks.exact_mode [--tokens 60] [--repeats 3] [--dtype float32|bfloat16]

The demo's tiny policy on one thread: the embedded engine draws `tokens` ids after prompts of 100 at batch 1, 8, 32 and
64 (prefill, draws and bookkeeping included), then a training step over 64 sequences of 200 tokens, forward and
backward. Exact and ordinary arithmetic alternate; each figure is the best of `repeats`, in processor time, which other
load distorts least. At the end both samplers' log-probabilities are scored again by the trainer's code.
"""

import argparse
import asyncio
import tempfile
from pathlib import Path

import torch

from benchmarks.conditions import Figures, at_least, at_most, finish
from benchmarks.numerics import drawn, requests, sides, trained
from headrace.config import Policy
from headrace.engines.base import Sample, SampleRequest
from headrace.policy.config import Dtype
from headrace.policy.layout import hugging_face
from headrace.policy.model import Model
from headrace.policy.scoring import score

BATCHES = (1, 8, 32, 64)
PROMPT = 100


def mismatch(model: Model, wanted: list[SampleRequest], samples: list[Sample]) -> tuple[float, float]:
    """(largest |sampler - scorer| log-probability, share of tokens that differ)."""
    worst, other, count = 0.0, 0, 0
    for request, sample in zip(wanted, samples, strict=True):
        ids = (*request.ids, *sample.ids)
        scored = score({0: model}, ids, sample.spans, range(PROMPT, len(ids)), 1.0)
        gap = (scored - torch.tensor(sample.logprobs)).abs()
        worst, other, count = max(worst, float(gap.max())), other + int((gap > 0).sum()), count + len(gap)
    return worst, other / count


async def measure(tokens: int, repeats: int, dtype: Dtype) -> None:
    """Print the figures."""
    torch.set_num_threads(1)
    config = hugging_face.from_section(Policy(dtype=dtype))
    figures: Figures = {"dtype": dtype, "tokens": tokens, "prompt": PROMPT}
    with tempfile.TemporaryDirectory() as folder:
        pair = await sides(config, Path(folder))
        for side in pair:
            figures[f"{side.name}_probe_s"] = round(side.probe_s, 4)
        figures["row_pad"], figures["fingerprint"] = pair[0].model.numerics.row_pad, pair[0].engine.fingerprint
        for batch in BATCHES:
            for repeat in range(repeats):
                for side in pair:
                    wanted = requests(config, batch, tokens, repeat, (PROMPT, PROMPT))
                    spent, samples = await drawn(side, wanted)
                    speed = sum(len(sample.ids) for sample in samples) / spent
                    key = f"{side.name}_b{batch}_tok_per_cpu_s"
                    figures[key] = round(max(speed, figures.get(key, 0.0)))
                    if batch == BATCHES[-1] and not repeat:
                        worst, share = mismatch(side.model, wanted, samples)
                        figures[f"{side.name}_max_abs_dlp"] = worst
                        figures[f"{side.name}_tokens_that_differ"] = round(share, 4)
            figures[f"b{batch}_exact_over_ordinary"] = round(
                figures[f"exact_b{batch}_tok_per_cpu_s"] / figures[f"ordinary_b{batch}_tok_per_cpu_s"], 3
            )
        for side in pair:
            await side.engine.stop()
    for _ in range(repeats + 1):
        for side in pair:
            key = f"{side.name}_train_64x200_cpu_s"
            figures[key] = round(min(trained(side.model, 64, 200), figures.get(key, 1e9)), 3)
    figures["train_exact_over_ordinary"] = round(
        figures["exact_train_64x200_cpu_s"] / figures["ordinary_train_64x200_cpu_s"], 3
    )
    targets = {
        "exact_b32_tok_per_cpu_s": at_least(figures["exact_b32_tok_per_cpu_s"], 4000),
        "exact_train_64x200_cpu_s": at_most(figures["exact_train_64x200_cpu_s"], 1.0),
        "exact_max_abs_dlp": at_most(figures["exact_max_abs_dlp"], 0.0),
        "train_exact_over_ordinary": at_most(figures["train_exact_over_ordinary"], 1.3),
        **{
            f"b{batch}_exact_over_ordinary": at_least(figures[f"b{batch}_exact_over_ordinary"], 0.5)
            for batch in BATCHES
        },
    }
    finish(figures, targets, "torch", "numpy")


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exact_mode")
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    asyncio.run(measure(args.tokens, args.repeats, args.dtype))


if __name__ == "__main__":
    main()
