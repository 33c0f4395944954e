"""SGLang on a GPU through headrace's engine: speed, log-probabilities, swaps, and the time to give the server back.

    HEADRACE_SGLANG=/opt/sglang/bin/python HEADRACE_SGLANG_ARGS="--attention-backend triton ..." \\
        python -m benchmarks.sglang_gpu [--shape moe] [--repeats 2] [--tokens 64] [--batches 1,8,32]

A server serves a policy with random weights. At each batch size it draws `tokens` ids after prompts of 100; the speed
is the best of `repeats`, after a short warm-up. The trainer's code then scores every id of up to eight samples on the
same GPU, in ordinary (not exact) arithmetic with the routes replayed. 32 turns of 512 tokens follow. Then swaps in
place and by abort and resume, between two versions of which one weight in a hundred differs. Eight turns that fill the
context run meanwhile; `turns_across_swap_fewest` counts those that were still running at the pause. Then the time in
which a server full of training turns returns all of them, and the time of a user's turn beside them and alone.
Each figure is printed as soon as it is known, and all of them in the last line.
"""

import argparse
import asyncio
import json
import os
import shlex
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.conditions import Figures, at_least, at_most, cannot_run, finish
from benchmarks.engines import CONTEXT, PROMPT, drawn, gaps, lent, prompts, request, server_engine, versions
from headrace.engines.sglang.engine import SglangEngine
from headrace.policy.config import PolicyConfig
from headrace.policy.model import Model
from headrace.policy.numerics_probe import probe

SHAPES = {
    "moe": PolicyConfig(
        dim=2048, layers=8, heads=32, kv_heads=4, head_dim=128, experts=64, top_k=8, expert_dim=768, vocab=32000,
        rope_theta=1e6, dtype="bfloat16",
    ),
    "dense": PolicyConfig(
        dim=1024, layers=28, heads=16, kv_heads=8, head_dim=128, experts=0, top_k=0, expert_dim=3072, vocab=151936,
        tied=True, rope_theta=1e6, dtype="bfloat16",
    ),
    "tiny": PolicyConfig(
        dim=96, layers=2, heads=3, kv_heads=1, head_dim=32, experts=8, top_k=2, expert_dim=96, vocab=640,
        dtype="bfloat16",
    ),
}  # fmt: skip
"""A mixture of 5.4 GB, the shape of Qwen3-0.6B, and one that only shows that the program runs."""
MODES = ("in_place", "abort")
TURNS = 8
"""Turns under a swap."""
SCORED = 8
"""Samples of a batch that the trainer's code scores."""
LONGER = (32, 512)
"""Batch and tokens of the longer turns."""
COPIES = 3
"""Versions in the folder: two and the staged one."""


def say(figures: Figures, **new: object) -> None:
    """Record figures and print them."""
    figures.update(new)
    print(json.dumps(new), flush=True)


async def speeds(
    engine: SglangEngine, model: Model, batches: Sequence[int], tokens: int, repeats: int, figures: Figures
) -> None:
    """Tokens a second at each batch size, and differences to the trainer's log-probabilities."""
    for batch in batches:
        await drawn(engine, prompts(model.config, batch, -1), min(tokens, 8))  # the server compiles for this batch
        best = 0.0
        for repeat in range(repeats):
            contexts = prompts(model.config, batch, repeat)
            speed, samples = await drawn(engine, contexts, tokens)
            best = max(best, speed)
            if repeat == 0:
                pairs = list(zip(contexts, samples, strict=True))[:SCORED]
                differences = torch.cat([gaps(model, *pair) for pair in pairs])
                say(figures, **{f"b{batch}_max_abs_dlp": round(float(differences.max()), 5)})
                say(figures, **{f"b{batch}_mean_abs_dlp": round(float(differences.mean()), 6)})
        say(figures, **{f"sglang_b{batch}_tok_per_s": round(best)})


async def longer(engine: SglangEngine, config: PolicyConfig, figures: Figures) -> None:
    """Tokens a second of longer turns."""
    batch, tokens = LONGER
    speed, _ = await drawn(engine, prompts(config, batch, 77), tokens)
    say(figures, **{f"sglang_b{batch}_{tokens}_tok_per_s": round(speed)})


async def swaps(
    engine: SglangEngine,
    config: PolicyConfig,
    files: Sequence[tuple[str, str]],
    tokens: int,
    repeats: int,
    figures: Figures,
    modes: Sequence[str] = MODES,
) -> None:
    """Swaps under `TURNS` turns of so many tokens, the modes in turn."""
    version = engine.version
    pauses: dict[str, list[float]] = {mode: [] for mode in modes}
    for repeat in range(repeats):
        for mode in modes:
            engine._mode = "abort" if mode == "abort" else "in_place"
            contexts = prompts(config, TURNS, 1000 + repeat)
            work = [
                asyncio.create_task(engine.sample(request(f"{mode}{repeat}{i}", ids, tokens)))
                for i, ids in enumerate(contexts)
            ]
            while sum(active.started for active in engine._in_flight.values()) < TURNS:
                if any(task.done() for task in work):
                    break  # turns so short do not all run at once
                await asyncio.sleep(0.005)
            version += 1
            began = time.perf_counter()
            swap = await engine.load(version, *files[version % 2])
            took = time.perf_counter() - began
            across = sum(len(sample.spans) > 1 for sample in await asyncio.gather(*work))
            pauses[mode].append(round(swap.pause_ms, 1))
            stats = engine.stats()
            say(
                figures,
                **{f"pause_{mode}_ms": pauses[mode]},
                swap_whole_s=round(took, 2),
                stage_ms=round(stats["stage_ms"]),
                checked=bool(stats["checked"]),
                turns_across_swap_fewest=min(across, figures.get("turns_across_swap_fewest", TURNS)),
            )


async def measure(
    python: str, config: PolicyConfig, device: str, tokens: int, repeats: int, batches: Sequence[int], figures: Figures
) -> None:
    """Start a server, and measure all of the above."""
    model = Model(config, probe(config, exact=False, device=device), seed=1)
    size = sum(tensor.nbytes for tensor in model.state().values())
    memory = os.statvfs("/dev/shm")
    fits = memory.f_bavail * memory.f_frsize > COPIES * size
    with tempfile.TemporaryDirectory(dir="/dev/shm" if fits else None) as place:
        folder = Path(place)
        files = versions(folder, model)
        say(figures, in_memory=fits, version_MB=round(Path(files[0][0]).stat().st_size / 1e6))
        model.to(device)
        engine = server_engine(python, folder, config)
        try:
            began = time.perf_counter()
            await engine.load(0, *files[0])
            terms = engine._life.terms
            assert terms is not None
            say(figures, sglang_start_s=round(time.perf_counter() - began, 1), device=terms.device)
            say(figures, fingerprint=engine.fingerprint)
            await speeds(engine, model, batches, tokens, repeats, figures)
            await longer(engine, config, figures)
            await swaps(engine, config, files, CONTEXT - PROMPT - 1, repeats, figures)
            await lent(engine, repeats, figures)
        finally:
            await engine.stop()


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sglang_gpu")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="moe")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--batches", default="1,8,32")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        cannot_run("this program needs a CUDA device; `python -m benchmarks.engines` measures SGLang on a CPU")
    python = os.environ.get("HEADRACE_SGLANG", "")
    if not python or not Path(python).exists():
        cannot_run("HEADRACE_SGLANG names no interpreter; install SGLang with CUDA and set it (docs/sglang.md)")
    if "HEADRACE_SGLANG_ARGS" not in os.environ:
        cannot_run("HEADRACE_SGLANG_ARGS is not set, so the server would run on the CPU; set its arguments on a GPU")
    said = shlex.join(shlex.split(os.environ["HEADRACE_SGLANG_ARGS"]))
    figures: Figures = {"gpu": torch.cuda.get_device_name(), "shape": args.shape, "server_args": said}
    batches = [int(word) for word in args.batches.split(",") if word]
    work = measure(os.path.abspath(python), SHAPES[args.shape], "cuda", args.tokens, args.repeats, batches, figures)
    asyncio.run(work)
    worst = max((figures[f"b{batch}_max_abs_dlp"] for batch in batches), default=None)
    targets = {
        "give_back_worst_ms": at_most(figures["sglang_give_back_worst_ms"], 1000.0),
        "max_abs_dlp_nats": at_most(worst, 0.03) if worst is not None else at_least(None, 0.0),
        "turns_across_swap_fewest": at_least(figures["turns_across_swap_fewest"], TURNS),
    }
    finish(figures, targets, "torch", "triton", "aiohttp")


if __name__ == "__main__":
    main()
