"""What do equal bits cost, and what is the mismatch without them?

    python -m benchmarks.exact_mode [--tokens 60] [--repeats 3] [--dtype float32|bfloat16]

The demo's tiny policy on one thread: the embedded engine draws `tokens` ids after prompts of 100 at batch 1, 8, 32 and
64 (prefill, draws and bookkeeping included), then a training step over 64 sequences of 200 tokens, forward and
backward. Exact and ordinary arithmetic take turns; each figure is the best of `repeats`, in processor time, which a
busy machine distorts least. At the end both samplers' log-probabilities are scored again by the trainer's code.
"""

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.conditions import Figures, at_least, at_most, finish
from headrace.config import Policy
from headrace.engines.base import Sample, SampleRequest
from headrace.engines.embedded import EmbeddedEngine
from headrace.messages.rollout import PolicyRef, Sampling
from headrace.policy.config import Dtype, PolicyConfig
from headrace.policy.model import Model
from headrace.policy.numerics import probe
from headrace.policy.scoring import score
from headrace.weights import snapshot

BATCHES = (1, 8, 32, 64)
PROMPT = 100


class Side(NamedTuple):
    """One arithmetic."""

    name: str
    model: Model
    engine: EmbeddedEngine


def requests(config: PolicyConfig, batch: int, tokens: int, repeat: int) -> list[SampleRequest]:
    """Different prompts under names of their own, so that nothing is reused."""
    rng = random.Random(f"{batch}-{repeat}")
    return [
        SampleRequest(
            session=f"{batch}-{repeat}-{i}",
            ids=tuple(rng.randrange(config.vocab) for _ in range(PROMPT)),
            policy=PolicyRef(),
            sampling=Sampling(max_turn_tokens=tokens),
            stop_ids=(),
            seed=i,
        )
        for i in range(batch)
    ]


async def drawn(side: Side, wanted: list[SampleRequest]) -> tuple[float, list[Sample]]:
    """(tokens per processor second, samples)."""
    began = time.process_time()
    samples = await asyncio.gather(*(side.engine.sample(request) for request in wanted))
    spent = time.process_time() - began
    for request in wanted:
        await side.engine.close(request.session)
    return sum(len(sample.ids) for sample in samples) / spent, list(samples)


def trained(model: Model, ids: torch.Tensor) -> float:
    """Processor seconds of one forward and backward over 64 x 200 tokens, all of them targets."""
    began = time.process_time()
    logp, _ = model.selected_logprobs(model(ids, [200] * 64), ids)
    torch.autograd.backward(logp.sum())
    model.zero_grad(set_to_none=True)
    return time.process_time() - began


def mismatch(model: Model, wanted: list[SampleRequest], samples: list[Sample]) -> tuple[float, float]:
    """(largest |sampler - scorer| log-probability, share of tokens that differ)."""
    worst, other, count = 0.0, 0, 0
    for request, sample in zip(wanted, samples, strict=True):
        ids = (*request.ids, *sample.ids)
        found = score({0: model}, ids, sample.spans, range(PROMPT, len(ids)), 1.0)
        gap = (found - torch.tensor(sample.logprobs)).abs()
        worst, other, count = max(worst, float(gap.max())), other + int((gap > 0).sum()), count + len(gap)
    return worst, other / count


async def measure(tokens: int, repeats: int, dtype: Dtype) -> None:
    """Print the figures."""
    torch.set_num_threads(1)
    config = PolicyConfig.from_section(Policy(dtype=dtype))
    figures: Figures = {"dtype": dtype, "tokens": tokens, "prompt": PROMPT}
    sides = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("exact", "ordinary"):
            began = time.process_time()
            numerics = probe(config, exact=name == "exact")
            figures[f"{name}_probe_s"] = round(time.process_time() - began, 4)
            model = Model(config, numerics, seed=1)
            with torch.no_grad():
                model.head_weight.mul_(20)  # an untrained head is nearly flat: no mismatch would show
            path = Path(folder) / name
            digest = snapshot.write(path, model.state())
            engine = EmbeddedEngine(config, numerics)
            await engine.load(0, str(path), digest)
            sides.append(Side(name, model, engine))
        figures["row_pad"], figures["fingerprint"] = sides[0].model.numerics.row_pad, sides[0].engine.fingerprint
        for batch in BATCHES:
            for repeat in range(repeats):
                for side in sides:
                    wanted = requests(config, batch, tokens, repeat)
                    speed, samples = await drawn(side, wanted)
                    key = f"{side.name}_b{batch}_tok_per_cpu_s"
                    figures[key] = round(max(speed, figures.get(key, 0.0)))
                    if batch == BATCHES[-1] and not repeat:
                        worst, share = mismatch(side.model, wanted, samples)
                        figures[f"{side.name}_max_abs_dlp"] = worst
                        figures[f"{side.name}_tokens_that_differ"] = round(share, 4)
            figures[f"b{batch}_exact_over_ordinary"] = round(
                figures[f"exact_b{batch}_tok_per_cpu_s"] / figures[f"ordinary_b{batch}_tok_per_cpu_s"], 3
            )
        for side in sides:
            await side.engine.stop()
    ids = torch.randint(0, config.vocab, (64 * 200,), generator=torch.Generator().manual_seed(0))
    for _ in range(repeats + 1):
        for side in sides:
            key = f"{side.name}_train_64x200_cpu_s"
            figures[key] = round(min(trained(side.model, ids), figures.get(key, 1e9)), 3)
    figures["train_exact_over_ordinary"] = round(
        figures["exact_train_64x200_cpu_s"] / figures["ordinary_train_64x200_cpu_s"], 3
    )
    targets = {
        "exact_b32_tok_per_cpu_s": at_least(figures["exact_b32_tok_per_cpu_s"], 4000),
        "exact_train_64x200_cpu_s": at_most(figures["exact_train_64x200_cpu_s"], 1.0),
        "exact_max_abs_dlp": at_most(figures["exact_max_abs_dlp"], 0.0),
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
