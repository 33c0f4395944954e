"""Measures the pause of a request in flight when weights are swapped.

    python -m benchmarks.swap_pause [--swaps 100] [--batch 16] [--tokens 96] [--dim 96]

The embedded engine in exact mode decodes `--batch` streams of requests without a break while `--swaps` versions, one
after the other, are read from their files, hashed, built and switched to: `Engine.load` as the rollout actor calls it.
The pause of a request is the time between two of its tokens. One run has three kinds of steps: steps with a switch,
steps during which the next version is staged (in slices between the steps), and undisturbed steps, as many after each
swap as its staging took. So neighbouring steps are compared, and other load affects all kinds; times are wall time.

Afterwards the records are checked: spans of every request ascend without gaps, and the log-probabilities of
requests that were running during a switch are computed again, each token with the version that its span names, and must
be bit-equal.
"""

import argparse
import asyncio
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import uvloop

from benchmarks.conditions import Figures, Target, arguments, at_least, at_most, cannot_run, finish
from headrace.config import Policy
from headrace.engines.base import EngineError, Sample, SampleRequest, Swap
from headrace.engines.embedded.engine import EmbeddedEngine
from headrace.engines.embedded.jobs import EngineJob
from headrace.engines.embedded.staging import LoadedWeights
from headrace.messages.rollout import PolicyRef, Sampling
from headrace.policy.config import PolicyConfig
from headrace.policy.layout import hugging_face
from headrace.policy.model import Model
from headrace.policy.numerics_probe import probe
from headrace.policy.scoring import score
from headrace.weights import tensor_state

PROMPT = 32
FILES = 4
Kind = Literal["swap", "staging", "calm"]


class Watch:
    """Stamps every decode step of an engine's worker, from inside its thread."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.steps: dict[Kind, list[float]] = {"swap": [], "staging": [], "calm": []}
        self.staging = False
        self.seen = 0
        self._last: dict[int, float] = {}
        self._flipped = False
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, asyncio.AbstractEventLoop, asyncio.Event]] = []
        worker = engine._worker
        take, flip = worker._take, worker.flip

        def taken(jobs: list[EngineJob], ids: list[int], logprobs: list[float]) -> None:
            take(jobs, ids, logprobs)
            self._step(jobs)

        def flipped(weights: LoadedWeights) -> Swap:
            swap = flip(weights)
            self._flipped = True
            return swap

        worker._take = taken  # type: ignore[method-assign]
        worker.flip = flipped  # type: ignore[method-assign]

    def _step(self, jobs: list[EngineJob]) -> None:
        now = time.perf_counter()
        gaps = [now - self._last[id(job)] for job in jobs if id(job) in self._last]
        for job in jobs:
            if job.future.done():
                self._last.pop(id(job), None)
            else:
                self._last[id(job)] = now
        if not gaps:
            return
        kind: Kind = "swap" if self._flipped else "staging" if self.staging else "calm"
        self._flipped = False
        self.steps[kind].append(1e3 * max(gaps))
        with self._lock:
            self.seen += 1
            ready = [one for one in self._waiting if one[0] <= self.seen]
            self._waiting = [one for one in self._waiting if one[0] > self.seen]
        for _, loop, event in ready:
            loop.call_soon_threadsafe(event.set)

    async def more(self, count: int) -> None:
        """Return after so many more steps."""
        event = asyncio.Event()
        with self._lock:
            self._waiting.append((self.seen + count, asyncio.get_running_loop(), event))
        await event.wait()


class Load:
    """Streams of requests without a break between them."""

    def __init__(self, engine: EmbeddedEngine, config: PolicyConfig, tokens: int) -> None:
        self.engine, self.config, self.tokens = engine, config, tokens
        self.done: list[tuple[SampleRequest, Sample]] = []
        self.failed = 0
        self.over = False

    async def stream(self, name: int) -> None:
        """One request after the other."""
        rng = random.Random(name)
        count = 0
        while not self.over:
            count += 1
            request = SampleRequest(
                session=f"{name}-{count}",
                ids=tuple(rng.randrange(self.config.vocab) for _ in range(PROMPT)),
                policy=PolicyRef(),
                sampling=Sampling(max_turn_tokens=rng.randint(self.tokens // 2, self.tokens)),
                stop_ids=(),
                seed=count * 1000 + name,
            )
            try:
                self.done.append((request, await self.engine.sample(request)))
            except EngineError as error:
                print(f"request {request.session} failed: {error}")
                self.failed += 1
            await self.engine.close(request.session)


def proof(load: Load, models: list[Model], most: int) -> Figures:
    """Check the spans of all requests, and the bits of up to `most` that ran during a switch. AssertionError when a
    record is wrong."""
    swapped = [pair for pair in load.done if len(pair[1].spans) > 1]
    for request, sample in load.done:
        versions = [span.version for span in sample.spans]
        assert versions == sorted(set(versions)), f"versions of {request.session} do not ascend: {versions}"
        assert [span.start for span in sample.spans[1:]] == [span.end for span in sample.spans[:-1]]
        assert (sample.spans[0].start, sample.spans[-1].end) == (0, PROMPT + len(sample.ids) - 1)
    wrong = tokens = 0
    for request, sample in swapped[:: max(1, len(swapped) // most)][:most]:
        ids = (*request.ids, *sample.ids)
        served = {span.version: models[span.version % FILES] for span in sample.spans}
        scored = score(served, ids, sample.spans, range(PROMPT, len(ids)), 1.0)
        wrong += int((scored != torch.tensor(sample.logprobs)).sum())
        tokens += len(sample.ids)
    return {
        "requests": len(load.done),
        "requests_that_saw_a_swap": len(swapped),
        "failed_requests": load.failed,
        "tokens_rescored": tokens,
        "tokens_with_other_bits": wrong,
    }


async def measure(args: argparse.Namespace, folder: Path) -> tuple[Figures, dict[str, Target]]:
    """Measure swaps under load."""
    torch.set_num_threads(1)
    config = hugging_face.from_section(Policy(dim=args.dim, expert_dim=args.dim))
    numerics = probe(config, exact=True)
    if not numerics.exact:
        cannot_run(f"exact mode cannot be had on this machine: {numerics.reason}")
    models, files = [], []
    for seed in range(FILES):
        model = Model(config, numerics, seed=seed)
        with torch.no_grad():
            model.head_weight.mul_(20)  # an untrained head is nearly flat: versions would hardly differ
        models.append(model)
        files.append((str(folder / f"{seed}"), tensor_state.write(folder / f"{seed}", model.state())))
    engine = EmbeddedEngine(config, numerics, max_batch=args.batch)
    watch = Watch(engine)
    await engine.load(0, *files[0])
    load = Load(engine, config, args.tokens)
    streams = [asyncio.create_task(load.stream(n)) for n in range(args.batch)]
    await watch.more(200)
    for steps in watch.steps.values():
        steps.clear()
    flips, loads = [], []
    for version in range(1, args.swaps + 1):
        before, began = watch.seen, time.perf_counter()
        watch.staging = True
        swap = await engine.load(version, *files[version % FILES])
        loads.append(1e3 * (time.perf_counter() - began))
        await watch.more(1)
        watch.staging = False
        flips.append(swap.pause_ms)
        await watch.more(max(20, watch.seen - before))
    load.over = True
    await asyncio.gather(*streams)
    await engine.stop()
    figures: Figures = {
        "swaps": args.swaps,
        "batch": args.batch,
        "weights_bytes": Path(files[0][0]).stat().st_size,
        "load_p50_ms": round(float(np.median(loads)), 3),
        "flip_p50_ms": round(float(np.median(flips)), 4),
        "flip_max_ms": round(max(flips), 4),
    }
    for kind, steps in watch.steps.items():
        figures[f"{kind}_steps"] = len(steps)
        for share in (50, 99):
            figures[f"{kind}_step_p{share}_ms"] = round(float(np.percentile(steps, share)), 3) if steps else None
    print(figures, flush=True)
    figures |= proof(load, models, args.rescore)
    over_calm = figures["swap_step_p99_ms"] / figures["calm_step_p99_ms"]
    figures["staging_over_calm_p99_x"] = round(figures["staging_step_p99_ms"] / figures["calm_step_p99_ms"], 3)
    targets = {
        "swap_step_p50_ms": at_most(figures["swap_step_p50_ms"], round(figures["calm_step_p50_ms"] + 1, 3)),
        "swap_over_calm_p99_x": at_most(round(over_calm, 3), 1.5),
        "staging_over_calm_p99_x": at_most(figures["staging_over_calm_p99_x"], 1.5),
        "failed_requests": at_most(load.failed, 0),
        "tokens_with_other_bits": at_most(figures["tokens_with_other_bits"], 0),
        "requests_that_saw_a_swap": at_least(figures["requests_that_saw_a_swap"], 1),
        "swaps_with_a_step_in_flight": at_least(figures["swap_steps"], args.swaps),
    }
    return figures, targets


def main() -> None:
    """Measure, end with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--swaps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--dim", type=int, default=96, help="width of the policy and of its experts")
    parser.add_argument("--rescore", type=int, default=40, help="requests that are scored again")
    args = arguments(parser, swaps=2, batch=2, tokens=16, dim=32, rescore=2)
    with tempfile.TemporaryDirectory() as text:
        figures, targets = uvloop.run(measure(args, Path(text)))
    finish(figures, targets, "torch", "numpy")


if __name__ == "__main__":
    main()
