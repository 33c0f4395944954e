"""Compares three engines on one checkpoint: embedded, SGLang on this CPU, Hugging Face `generate`.

    HEADRACE_SGLANG=.cache/sglang/bin/python python -m benchmarks.engines [--tokens 64] [--repeats 3] [--batches 1,8,32]
        [--set dtype=bfloat16 --set dim=2048 ...]

A tiny random Qwen3-MoE draws `tokens` ids after prompts of 100 at each batch size; the engines take turns within a
repeat, each figure is the best of `repeats` in wall time, and ratios come from the same repeat. Every id is scored
again by the trainer's code, which gives each engine's largest difference of a log-probability (`generate` reports no
routes, so none are replayed for it). Then the pause of a swap under running requests, to a version in which one weight
in a hundred moved: in place and by abort and resume, both loaded from disk, and in place by the loader inside the
server (`sparse`). Then the time in which a server full of training turns returns all of them, and the time of a user's
turn on such a server and on an idle one. SGLang runs in processes of its own and gets only the processor time that
other programs do not use. With `--batches ""` only the server is measured.
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

import msgspec
import torch

from benchmarks.conditions import Figures, at_most, cannot_run, finish
from headrace.config import Policy, parse
from headrace.engines.base import Engine, Sample, SampleRequest
from headrace.engines.embedded.engine import EmbeddedEngine
from headrace.engines.sglang.engine import SglangEngine
from headrace.engines.sglang.server import Server, arguments
from headrace.messages.rollout import PolicyRef, Sampling
from headrace.policy import moe
from headrace.policy.config import PolicyConfig
from headrace.policy.layout import checkpoint, hugging_face
from headrace.policy.model import Model
from headrace.policy.numerics_probe import probe
from headrace.policy.scoring import score
from headrace.rendering.tokenizer import Tokenizer
from headrace.weights import tensor_state

PROMPT = 100
MOST = 32
"""Requests that the server runs at once."""
CONTEXT = 2048
"""Positions of a prompt and its reply together."""


def prompts(config: PolicyConfig, batch: int, repeat: int) -> list[tuple[int, ...]]:
    """Different for every repeat, so that nothing is cached."""
    rng = random.Random(f"{batch}-{repeat}")
    return [tuple(rng.randrange(config.vocab) for _ in range(PROMPT)) for _ in range(batch)]


def request(name: str, ids: tuple[int, ...], tokens: int) -> SampleRequest:
    """A request that samples exactly `tokens` ids."""
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


def gaps(model: Model, context: tuple[int, ...], sample: Sample) -> torch.Tensor:
    """|engine - trainer's code| of each token of one sample, its routes replayed."""
    ids, config = (*context, *sample.ids), model.config
    rows = moe.from_array(sample.routed, config.sparse_layers, config.top_k) if config.experts else None
    spans = sample.spans
    scored = score({span.version: model for span in spans}, ids, spans, range(len(context), len(ids)), 1.0, rows)
    return (scored - torch.tensor(sample.logprobs)).abs()


def gap(model: Model, context: tuple[int, ...], sample: Sample) -> float:
    """The largest of `gaps`."""
    return float(gaps(model, context, sample).max())


def plain_gap(model: Model, context: tuple[int, ...], ids: list[int], logprobs: torch.Tensor) -> float:
    """Largest |engine - trainer's code| of ids that come without routes."""
    whole = torch.tensor((*context, *ids))
    with torch.no_grad():
        hidden = model(whole[:-1], [len(whole) - 1])[PROMPT - 1 :]
        scored, _ = model.selected_logprobs(hidden, whole[PROMPT:])
    return float((scored - logprobs).abs().max())


def neighbour(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The version in which one weight in a hundred is larger by one unit in the last place."""
    generator, out = torch.Generator().manual_seed(3), {}
    for name, tensor in state.items():
        bits = tensor.clone().view(torch.int16 if tensor.element_size() == 2 else torch.int32)
        bits += (torch.rand(bits.shape, generator=generator) < 0.01).to(bits.dtype)
        out[name] = bits.view(tensor.dtype)
    return out


def versions(folder: Path, model: Model) -> list[tuple[str, str]]:
    """Write a model on the CPU and its `neighbour` as two versions. Returns path and state hash of each."""
    return [
        (str(folder / name), tensor_state.write(folder / name, state))
        for name, state in (("0", model.state()), ("1", neighbour(model.state())))
    ]


def server_engine(python: str, folder: Path, config: PolicyConfig) -> SglangEngine:
    """An engine that starts a server of `MOST` requests with the first version that it loads."""
    tokenizer = folder / "tokenizer.json"
    Tokenizer.train((), config.vocab).save(tokenizer)
    args = [*arguments(), "--dtype", config.dtype, "--context-length", str(CONTEXT)]
    args += ["--max-running-requests", str(MOST)]
    args += ["--enable-return-routed-experts"] if config.experts else []
    log = Path(os.environ.get("HEADRACE_SGLANG_LOG") or folder / "log")
    server = Server(python, args, log, sparse=True)
    return SglangEngine(config, folder / "stage", server=server, tokenizer=tokenizer, max_batch=MOST)


async def pauses(engine: SglangEngine, files: list[tuple[str, str]], repeats: int, figures: Figures) -> None:
    """Swaps under eight running requests, all modes in turn."""
    seen: dict[str, list[float]] = {"in_place": [], "abort": [], "sparse": []}
    written: list[float] = []
    version = engine.version
    for repeat in range(repeats):
        for mode in seen:
            engine._mode = "abort" if mode == "abort" else "in_place"
            engine._swapper.sparse = mode == "sparse"
            contexts = prompts(engine._config, 8, 1000 + repeat)
            work = [
                asyncio.create_task(engine.sample(request(f"{mode}{repeat}{i}", ids, 400)))
                for i, ids in enumerate(contexts)
            ]
            while sum(request.started for request in engine._in_flight.values()) < 8:
                await asyncio.sleep(0.01)
            version += 1
            swap = await engine.load(version, *files[version % 2])
            seen[mode].append(swap.pause_ms)
            written += [engine.stats()["sparse_bytes"]] if mode == "sparse" else []
            await asyncio.gather(*work)
    for mode, values in seen.items():
        figures[f"sglang_pause_{mode}_ms"] = round(statistics.median(values), 1)
    figures["sglang_sparse_bytes"] = min(written)
    figures["sglang_version_bytes"] = Path(files[0][0]).stat().st_size
    figures["sglang_stage_beside_ms"] = round(engine.stats()["stage_ms"], 1)


async def lent(engine: SglangEngine, repeats: int, figures: Figures) -> None:
    """Take back a server that is full of training turns; measure a user's turn beside them."""
    back: list[float] = []
    turns: dict[str, list[float]] = {"alone": [], "beside_training": []}

    async def users(kind: str, repeat: int) -> None:
        ids = prompts(engine._config, 1, 3000 + repeat)[0]
        wanted = msgspec.structs.replace(request(f"user-{kind}-{repeat}", ids, 16), lane="production")
        began = time.perf_counter()
        await engine.sample(wanted)
        turns[kind].append((time.perf_counter() - began) * 1e3)

    for repeat in range(repeats):
        await users("alone", repeat)
        contexts = prompts(engine._config, MOST, 2000 + repeat)
        work = [
            asyncio.create_task(engine.sample(request(f"lent{repeat}{i}", ids, 1500))) for i, ids in enumerate(contexts)
        ]
        while sum(request.started for request in engine._in_flight.values()) < MOST:
            await asyncio.sleep(0.01)
        await users("beside_training", repeat)
        began = time.perf_counter()
        for one in work:
            one.cancel()
        running = True
        while running:
            (rank,) = (await engine._wire.get("/v1/loads?include=core"))["loads"]
            running = bool(rank["num_running_reqs"] + rank["num_waiting_reqs"])
        back.append((time.perf_counter() - began) * 1e3)
        await asyncio.gather(*work, return_exceptions=True)
    figures["sglang_give_back_ms"] = round(statistics.median(back), 1)
    figures["sglang_give_back_worst_ms"] = round(max(back), 1)
    for kind, values in turns.items():
        figures[f"sglang_user_turn_{kind}_ms"] = round(statistics.median(values), 1)


async def compared(
    sglang: SglangEngine,
    model: Model,
    files: Sequence[tuple[str, str]],
    folder: Path,
    tokens: int,
    repeats: int,
    batches: Sequence[int],
    figures: Figures,
) -> None:
    """Speed and log-probabilities of the three engines."""
    from transformers import AutoModelForCausalLM

    config = model.config
    checkpoint.save(folder, model, config)
    hugging = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, config.dtype))
    embedded = EmbeddedEngine(config, model.numerics)
    try:
        await embedded.load(0, *files[0])
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
                if repeat:
                    continue
                for key, gaps in (
                    ("embedded", [gap(model, c, s) for c, s in zip(contexts, samples, strict=True)]),
                    ("sglang", [gap(model, c, s) for c, s in zip(contexts, answers, strict=True)]),
                    ("hf", [plain_gap(model, c, *row) for c, row in zip(contexts, rows, strict=True)]),
                ):
                    figures[f"{key}_b{batch}_max_abs_dlp"] = round(max(gaps), 7)
            for key, values in ratios.items():
                figures[f"b{batch}_{key}_over_embedded"] = round(statistics.median(values), 3)
    finally:
        await embedded.stop()


async def measure(python: str, tokens: int, repeats: int, batches: Sequence[int], section: Policy) -> None:
    """Print the figures."""
    torch.set_num_threads(1)
    config = hugging_face.from_section(section)
    model = Model(config, probe(config, exact=False), seed=1)
    figures: Figures = {"dtype": config.dtype, "tokens": tokens, "prompt": PROMPT, "repeats": repeats}
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as place:
        folder = Path(place)
        files = versions(folder, model)
        sglang = server_engine(python, folder, config)
        try:
            began = time.perf_counter()
            await sglang.load(0, *files[0])
            figures["sglang_start_s"] = round(time.perf_counter() - began, 1)
            if batches:
                await compared(sglang, model, files, folder / "hf", tokens, repeats, batches, figures)
            await pauses(sglang, files, repeats, figures)
            await lent(sglang, repeats, figures)
        finally:
            await sglang.stop()
    targets = {"give_back_worst_ms": at_most(figures["sglang_give_back_worst_ms"], 1000.0)}
    if batches:
        worst = max(figures[f"sglang_b{batch}_max_abs_dlp"] for batch in batches)
        targets["sglang_max_abs_dlp_nats"] = at_most(worst, 0.01)
    finish(figures, targets, "torch", "transformers", "aiohttp")


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of [policy]")
    args = parser.parse_args()
    python = os.environ.get("HEADRACE_SGLANG", "")
    if not python or not Path(python).exists():
        cannot_run("HEADRACE_SGLANG names no interpreter with SGLang; `make test-sglang` builds one")
    changes = [f"policy.{entry}" for entry in ("dtype=bfloat16", *args.set)]
    section = parse("", "--set", changes).policy
    batches = [int(word) for word in args.batches.split(",") if word]
    asyncio.run(measure(os.path.abspath(python), args.tokens, args.repeats, batches, section))


if __name__ == "__main__":
    main()
