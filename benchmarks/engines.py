"""The same checkpoint on three engines: embedded, SGLang on this CPU, Hugging Face `generate`.

    HEADRACE_SGLANG=.cache/sglang/bin/python python -m benchmarks.engines [--tokens 64] [--repeats 3] [--batches 1,8,32]

A tiny random Qwen3-MoE in bfloat16 draws `tokens` ids after prompts of 100 at each batch size; the engines take turns
within a repeat, each figure is the best of `repeats` in wall time, and ratios come from the same repeat. Every id is
scored again by the trainer's code: how far each engine's log-probabilities are from it. Then the pause of a swap under
running requests, in each mode. SGLang's share of the machine is whatever the others leave it: it runs in processes of
its own, so processor time would not tell.
"""

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.conditions import Figures, at_most, cannot_run, finish
from headrace.config import Policy
from headrace.engines.base import Engine, Sample, SampleRequest
from headrace.engines.embedded import EmbeddedEngine
from headrace.engines.sglang import SglangEngine
from headrace.engines.sglang_server import CPU, Server, free_port
from headrace.messages.rollout import PolicyRef, Sampling
from headrace.policy import checkpoint, moe
from headrace.policy.config import PolicyConfig
from headrace.policy.model import Model
from headrace.policy.numerics import probe
from headrace.policy.scoring import score
from headrace.policy.tokenizer import Tokenizer
from headrace.weights import snapshot

PROMPT = 100


def prompts(config: PolicyConfig, batch: int, repeat: int) -> list[tuple[int, ...]]:
    """Different for every repeat, so that nothing is cached."""
    rng = random.Random(f"{batch}-{repeat}")
    return [tuple(rng.randrange(config.vocab) for _ in range(PROMPT)) for _ in range(batch)]


def request(name: str, ids: tuple[int, ...], tokens: int) -> SampleRequest:
    """Always `tokens` ids: nothing stops it."""
    sampling = Sampling(max_turn_tokens=tokens)
    return SampleRequest(session=name, ids=ids, policy=PolicyRef(), sampling=sampling, stop_ids=(), seed=len(name))


async def drawn(engine: Engine, contexts: Sequence[tuple[int, ...]], tokens: int) -> tuple[float, list[Sample]]:
    """(tokens per second, samples)."""
    names = [f"b{index}" for index in range(len(contexts))]
    began = time.perf_counter()
    wanted = [request(name, ids, tokens) for name, ids in zip(names, contexts, strict=True)]
    samples = await asyncio.gather(*(engine.sample(one) for one in wanted))
    spent = time.perf_counter() - began
    for name in names:
        await engine.close(name)
    return tokens * len(contexts) / spent, list(samples)


def generated(model: Any, contexts: Sequence[tuple[int, ...]], tokens: int) -> tuple[float, list[Any]]:
    """Hugging Face: (tokens per second, (ids, log-probabilities) of each row)."""
    ids = torch.tensor(contexts)
    began = time.perf_counter()
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            top_p=1.0,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            return_dict_in_generate=True,
            output_logits=True,
        )
    spent = time.perf_counter() - began
    new = out.sequences[:, PROMPT:]
    logp = torch.stack([torch.log_softmax(step.float(), -1) for step in out.logits], 1)
    chosen = logp.gather(-1, new[..., None]).squeeze(-1)
    return tokens * len(contexts) / spent, [(row.tolist(), lp) for row, lp in zip(new, chosen, strict=True)]


def gap(model: Model, context: tuple[int, ...], sample: Sample) -> float:
    """Largest |engine - trainer's code| of one sample, its routes replayed."""
    ids = (*context, *sample.ids)
    rows = moe.from_array(sample.routed, model.config.sparse_layers, model.config.top_k)
    spans = sample.spans
    found = score({span.version: model for span in spans}, ids, spans, range(len(context), len(ids)), 1.0, rows)
    return float((found - torch.tensor(sample.logprobs)).abs().max())


def plain_gap(model: Model, context: tuple[int, ...], ids: list[int], logprobs: torch.Tensor) -> float:
    """The same for ids without routes."""
    whole = torch.tensor((*context, *ids))
    with torch.no_grad():
        hidden = model(whole[:-1], [len(whole) - 1])[PROMPT - 1 :]
        found, _ = model.selected_logprobs(hidden, whole[PROMPT:])
    return float((found - logprobs).abs().max())


async def pauses(engine: SglangEngine, files: list[tuple[str, str]], repeats: int, figures: Figures) -> None:
    """Swaps under eight running requests, both modes in turn."""
    seen: dict[str, list[float]] = {"in_place": [], "abort": []}
    version = engine.version
    for repeat in range(repeats):
        for mode in seen:
            engine._mode = mode  # type: ignore[assignment]
            contexts = prompts(engine._config, 8, 1000 + repeat)
            work = [
                asyncio.create_task(engine.sample(request(f"{mode}{repeat}{i}", ids, 400)))
                for i, ids in enumerate(contexts)
            ]
            while sum(flight.started for flight in engine._flights.values()) < 8:
                await asyncio.sleep(0.01)
            version += 1
            swap = await engine.load(version, *files[version % 2])
            seen[mode].append(swap.pause_ms)
            await asyncio.gather(*work)
    for mode, values in seen.items():
        figures[f"sglang_pause_{mode}_ms"] = round(statistics.median(values), 1)
    figures["sglang_stage_beside_ms"] = round(engine.stats()["stage_ms"], 1)


async def measure(python: str, tokens: int, repeats: int, batches: Sequence[int]) -> None:
    """Print the figures."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    config = PolicyConfig.from_section(Policy(dtype="bfloat16"))
    numerics = probe(config, exact=False)
    models = [Model(config, numerics, seed=seed) for seed in (1, 2)]
    figures: Figures = {"dtype": config.dtype, "tokens": tokens, "prompt": PROMPT, "repeats": repeats}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = [
            (str(folder / str(i)), snapshot.write(folder / str(i), model.state())) for i, model in enumerate(models)
        ]
        checkpoint.save(folder / "hf", models[0], config)
        Tokenizer.train((), config.vocab).save(folder / "tokenizer.json")
        hugging = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.bfloat16)
        embedded = EmbeddedEngine(config, numerics)
        args = [*CPU, "--context-length", "2048", "--max-running-requests", "32", "--enable-return-routed-experts"]
        server = Server(python, free_port(), args, Path(os.environ.get("HEADRACE_SGLANG_LOG") or folder / "log"))
        sglang = SglangEngine(
            config, folder / "stage", server=server, tokenizer=folder / "tokenizer.json", max_batch=32
        )
        try:
            await embedded.load(0, *files[0])
            began = time.perf_counter()
            await sglang.load(0, *files[0])
            figures["sglang_start_s"] = round(time.perf_counter() - began, 1)
            for batch in batches:
                ratios: dict[str, list[float]] = {"sglang": [], "hf": []}
                for repeat in range(repeats):
                    contexts = prompts(config, batch, repeat)
                    ours, samples = await drawn(embedded, contexts, tokens)
                    theirs, answers = await drawn(sglang, contexts, tokens)
                    plain, rows = generated(hugging, contexts, tokens)
                    for key, speed in (("embedded", ours), ("sglang", theirs), ("hf", plain)):
                        best = f"{key}_b{batch}_tok_per_s"
                        figures[best] = round(max(speed, figures.get(best, 0.0)))
                    ratios["sglang"].append(theirs / ours)
                    ratios["hf"].append(plain / ours)
                    if not repeat:
                        model = models[0]
                        pairs = list(zip(contexts, samples, answers, rows, strict=True))
                        figures[f"embedded_b{batch}_max_abs_dlp"] = round(
                            max(gap(model, c, s) for c, s, _, _ in pairs), 5
                        )
                        figures[f"sglang_b{batch}_max_abs_dlp"] = round(
                            max(gap(model, c, a) for c, _, a, _ in pairs), 5
                        )
                        figures[f"hf_b{batch}_max_abs_dlp"] = round(
                            max(plain_gap(model, c, *row) for c, _, _, row in pairs), 5
                        )
                for key, values in ratios.items():
                    figures[f"b{batch}_{key}_over_embedded"] = round(statistics.median(values), 3)
            await pauses(sglang, files, repeats, figures)
        finally:
            await sglang.stop()
            await embedded.stop()
    worst = max(figures[f"sglang_b{batch}_max_abs_dlp"] for batch in batches)
    targets = {"sglang_max_abs_dlp_nats": at_most(worst, 0.01)}
    finish(figures, targets, "torch", "transformers", "aiohttp")


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batches", default="1,8,32")
    args = parser.parse_args()
    python = os.environ.get("HEADRACE_SGLANG", "")
    if not python or not Path(python).exists():
        cannot_run("HEADRACE_SGLANG names no interpreter with SGLang; `make test-sglang` builds one")
    batches = [int(word) for word in args.batches.split(",")]
    asyncio.run(measure(os.path.abspath(python), args.tokens, args.repeats, batches))


if __name__ == "__main__":
    main()
