"""Compares the numbers of sampler and trainer; measures route replay where they differ, and the cost of exact mode.

    python -m benchmarks.numerics [--small] [--dtype bfloat16|float32]

A mixture of 8 layers with random weights on one thread. The embedded engine draws tokens at batch 1, 4, 16 and 64
(prompts of different lengths, prefill and bookkeeping included); the trainer scores them again in one packed forward,
another computation than the sampler's. Exact and ordinary arithmetic alternate, so ratios come from interleaved pairs;
times are processor time, which other load distorts least. The ordinary side is the control: if its bits were equal
too, the zeros of the exact side would prove nothing. The parts of a decode step are timed separately.
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.conditions import Figures, arguments, at_least, at_most, finish
from headrace.algorithms.mismatch import mismatch, router_flips
from headrace.engines.base import Sample, SampleRequest
from headrace.engines.embedded.engine import EmbeddedEngine
from headrace.kernels import batch_invariant
from headrace.messages.rollout import PolicyRef, Sampling
from headrace.policy import attention, moe
from headrace.policy.cache import KVCache
from headrace.policy.config import Dtype, PolicyConfig
from headrace.policy.model import Layer, Model
from headrace.policy.numerics_probe import probe
from headrace.weights import tensor_state


class Size(NamedTuple):
    """The size of the measurement."""

    batches: tuple[int, ...]
    tokens: int
    repeats: int
    training: tuple[int, int]
    """Number of sequences, and of tokens in each."""


FULL = Size((1, 4, 16, 64), 64, 3, (16, 200))
SMALL = Size((1, 4), 64, 1, (4, 100))


class Side(NamedTuple):
    """One arithmetic."""

    name: str
    model: Model
    engine: EmbeddedEngine
    probe_s: float


async def sides(config: PolicyConfig, folder: Path) -> list[Side]:
    """Exact and ordinary arithmetic over the same random weights."""
    opened = []
    for name in ("exact", "ordinary"):
        began = time.process_time()
        numerics = probe(config, exact=name == "exact")
        spent = time.process_time() - began
        model = Model(config, numerics, seed=1)
        with torch.no_grad():
            model.head_weight.mul_(20)  # an untrained head is nearly flat: no mismatch would show
        digest = tensor_state.write(folder / name, model.state())
        engine = EmbeddedEngine(config, numerics)
        await engine.load(0, str(folder / name), digest)
        opened.append(Side(name, model, engine, spent))
    return opened


def policy(dtype: Dtype) -> PolicyConfig:
    """The model of the study: 8 layers, 8 experts, top 2."""
    return PolicyConfig(
        dim=128, layers=8, heads=4, kv_heads=2, head_dim=32, experts=8, top_k=2, expert_dim=128, vocab=512, dtype=dtype
    )


def requests(
    config: PolicyConfig, batch: int, tokens: int, repeat: int, prompt: tuple[int, int] = (5, 40)
) -> list[SampleRequest]:
    """Prompts of different lengths between two bounds; no two share a name or a prefix, so no cache entry is reused."""
    rng = random.Random(f"{batch}-{repeat}")
    return [
        SampleRequest(
            session=f"{batch}-{repeat}-{i}",
            ids=tuple(rng.randrange(config.vocab) for _ in range(rng.randint(*prompt))),
            policy=PolicyRef(),
            sampling=Sampling(max_turn_tokens=tokens),
            stop_ids=(),
            seed=i,
        )
        for i in range(batch)
    ]


async def drawn(side: Side, wanted: Sequence[SampleRequest]) -> tuple[float, list[Sample]]:
    """(processor seconds, samples)."""
    began = time.process_time()
    samples = await asyncio.gather(*(side.engine.sample(request) for request in wanted))
    spent = time.process_time() - began
    for request in wanted:
        await side.engine.close(request.session)
    return spent, list(samples)


class Scored(NamedTuple):
    """The log-probabilities of some samples' tokens, by trainer and by sampler."""

    trainer: Tensor
    sampler: Tensor
    live: Tensor
    recorded: Tensor


@torch.no_grad()
def scored(model: Model, wanted: Sequence[SampleRequest], samples: Sequence[Sample], replay: bool) -> Scored:
    """One packed forward over everything, as a training step does it."""
    c = model.config
    ids = [torch.tensor((*request.ids, *sample.ids)) for request, sample in zip(wanted, samples, strict=True)]
    recorded = torch.cat([moe.from_array(sample.routed, c.sparse_layers, c.top_k) for sample in samples])
    recorder: list[Tensor] = []
    lengths = [len(part) - 1 for part in ids]
    hidden = model(torch.cat([part[:-1] for part in ids]), lengths, recorded if replay else None, recorder)
    rows, targets = [], []
    for request, part, end in zip(wanted, ids, torch.tensor(lengths).cumsum(0).tolist(), strict=True):
        rows.append(torch.arange(end - (len(part) - len(request.ids)), end))
        targets.append(part[len(request.ids) :])
    logp, _ = model.selected_logprobs(hidden[torch.cat(rows)], torch.cat(targets))
    sampler = torch.tensor([value for sample in samples for value in sample.logprobs])
    return Scored(logp, sampler, torch.stack(recorder, 1), recorded)


def trained(model: Model, sequences: int, length: int) -> float:
    """Processor seconds of one forward and backward with all tokens as targets."""
    ids = torch.randint(0, model.config.vocab, (sequences * length,), generator=torch.Generator().manual_seed(0))
    began = time.process_time()
    logp, _ = model.selected_logprobs(model(ids, [length] * sequences), ids)
    torch.autograd.backward(logp.sum())
    model.zero_grad(set_to_none=True)
    return time.process_time() - began


PARTS = ("products", "attention", "experts", "norms")


@torch.no_grad()
def where(model: Model, batch: int, steps: int = 24) -> Figures:
    """Milliseconds of processor time of a decode step after 100 tokens, by part; `rest` is the remainder."""
    spent = dict.fromkeys(PARTS, 0.0)

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            began = time.process_time()
            out = function(*arguments, **options)
            spent[part] += time.process_time() - began
            return out

        return run

    cache, tables = KVCache(model.config, 3 * batch), [[3 * i, 3 * i + 1, 3 * i + 2] for i in range(batch)]
    ids = torch.randint(0, model.config.vocab, (100 * batch,), generator=torch.Generator().manual_seed(0))
    model.forward_cached(ids, [100] * batch, [0] * batch, tables, cache)
    patched = (
        (batch_invariant, "linear", "products"),
        (batch_invariant, "rms_norm", "norms"),
        (attention, "cached", "attention"),
    )
    originals = [(module, name, getattr(module, name)) for module, name, _ in patched]
    layers = [layer for layer in model.layers if isinstance(layer, Layer)]
    functions = [layer.function for layer in layers]
    for module, name, part in patched:
        setattr(module, name, timed(part, getattr(module, name)))
    for layer in layers:
        layer.function = timed("experts", layer.function)
    began = time.process_time()
    for step in range(steps):
        hidden = model.forward_cached(ids[:batch], [1] * batch, [100 + step] * batch, tables, cache)
        model.logits(hidden)
    total = time.process_time() - began
    for module, name, function in originals:
        setattr(module, name, function)
    for layer, function in zip(layers, functions, strict=True):
        layer.function = function
    spent["rest"] = total - sum(spent.values())
    return {part: round(value / steps * 1e3, 3) for part, value in spent.items()}


async def measure(size: Size, dtype: Dtype) -> None:
    """Print the figures."""
    torch.set_num_threads(1)
    config = policy(dtype)
    figures: Figures = {"dtype": dtype, "layers": config.layers, "tokens_per_sample": size.tokens}
    parts: dict[str, list[Scored]] = {"exact": [], "ordinary": [], "replayed": []}
    with tempfile.TemporaryDirectory() as folder:
        pair = await sides(config, Path(folder))
        figures["fingerprint"] = pair[0].engine.fingerprint
        for batch in size.batches:
            best = {side.name: float("inf") for side in pair}
            for repeat in range(size.repeats):
                for side in pair if repeat % 2 else pair[::-1]:
                    wanted = requests(config, batch, size.tokens, repeat)
                    spent, samples = await drawn(side, wanted)
                    best[side.name] = min(best[side.name], spent)
                    if not repeat:
                        parts[side.name].append(scored(side.model, wanted, samples, False))
                        if side.name == "ordinary":
                            parts["replayed"].append(scored(side.model, wanted, samples, True))
            figures[f"decode_b{batch}_exact_over_ordinary"] = round(best["exact"] / best["ordinary"], 3)
            figures[f"decode_b{batch}_exact_tok_per_cpu_s"] = round(batch * size.tokens / best["exact"])
        for side in pair:
            await side.engine.stop()
    for name, scored_parts in parts.items():
        seen = mismatch(
            torch.cat([part.trainer for part in scored_parts]), torch.cat([part.sampler for part in scored_parts])
        )
        figures[f"{name}_tokens"] = seen.tokens
        figures[f"{name}_bit_equal_share"] = round(1.0 - seen.differ, 5)
        figures[f"{name}_max_abs_dlp"] = seen.max_abs
        figures[f"{name}_k3"] = seen.k3
        if name != "replayed":
            live, recorded = (torch.cat([getattr(part, key) for part in scored_parts]) for key in ("live", "recorded"))
            figures[f"{name}_flips_per_token_layer"] = round(router_flips(live, recorded), 6)
    figures["k3_replayed_over_live"] = (
        figures["replayed_k3"] / figures["ordinary_k3"] if figures["ordinary_k3"] else 0.0
    )
    times = {side.name: float("inf") for side in pair}
    for repeat in range(size.repeats + 1):
        for side in pair if repeat % 2 else pair[::-1]:
            times[side.name] = min(times[side.name], trained(side.model, *size.training))
    figures["train_exact_over_ordinary"] = round(times["exact"] / times["ordinary"], 3)
    figures["train_exact_cpu_s"] = round(times["exact"], 4)
    for batch in size.batches:
        for side in pair:
            figures[f"{side.name}_decode_b{batch}_ms"] = where(side.model, batch)
    targets = {
        "exact_bit_equal_share": at_least(figures["exact_bit_equal_share"], 1.0),
        "exact_max_abs_dlp": at_most(figures["exact_max_abs_dlp"], 0.0),
        "ordinary_bit_equal_share": at_most(figures["ordinary_bit_equal_share"], 0.99),
        **(
            {"k3_replayed_over_live": at_most(figures["k3_replayed_over_live"], 0.3)}
            if figures["ordinary_flips_per_token_layer"]  # none in float32: nothing to replay
            else {}
        ),
        "train_exact_over_ordinary": at_most(figures["train_exact_over_ordinary"], 1.3),
        **{
            f"decode_b{batch}_exact_over_ordinary": at_most(figures[f"decode_b{batch}_exact_over_ordinary"], 2.0)
            for batch in size.batches
        },
    }
    finish(figures, targets, "torch", "numpy")


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.numerics")
    parser.add_argument(
        "--small", action="store_true", help="batch 1 and 4 with few tokens, as a test of the benchmark itself"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    args = arguments(parser, small=True)
    asyncio.run(measure(SMALL if args.small else FULL, args.dtype))


if __name__ == "__main__":
    main()
