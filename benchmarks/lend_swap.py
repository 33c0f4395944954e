"""Measures the swaps of a rollout actor that is lent while production serves another version than training.

    python -m benchmarks.lend_swap [--rounds 10] [--sessions 4] [--context 1024] [--dim 96]

The embedded engine serves `--sessions` users with a promoted (pinned) version. In each round the users pause, the actor
is lent, and training's next version is loaded and samples a few turns (the swap at the lend). Then the actor is
reclaimed and every user asks for a turn of the promoted version (the swap at the reclaim). Each round runs twice, in
changing order: `kept`, as the rollout actor does it (`actors/rollout/pins.py`: the promoted version stays loaded), and
`released`, where the promoted version is released in the pause and loaded again. Sessions keep their own keys
and values in both.

Per swap: its wall time, its CPU time (of all threads of the process), and the pause of decoding (`Swap.pause_ms`); and
the wall and CPU time of the users' first turns after the reclaim, the load of the version included. An SGLang server
holds one version, so there each change between the two is a swap: `python -m benchmarks.engines` measures its pause.
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import uvloop

from benchmarks.conditions import Figures, Target, at_most, finish
from headrace.config import Policy
from headrace.engines.base import SampleRequest
from headrace.engines.embedded.engine import EmbeddedEngine
from headrace.messages.rollout import PolicyRef, Sampling
from headrace.policy.layout import hugging_face
from headrace.policy.model import Model
from headrace.policy.numerics_probe import probe
from headrace.weights import tensor_state

PROMOTED = PolicyRef("pinned", 0)
FILES = 3
T = TypeVar("T")
TURN_TOKENS = 1
"""A turn of one token takes the time to the first token."""


class Users:
    """Sessions of users, whose contexts grow turn by turn."""

    def __init__(self, engine: EmbeddedEngine, vocab: int, args: argparse.Namespace) -> None:
        rng = random.Random(1)
        self._engine = engine
        self.contexts = [tuple(rng.randrange(vocab) for _ in range(args.context)) for _ in range(args.sessions)]
        self._asked = 0

    async def turns(self) -> None:
        """A turn of every session, all at once."""
        self._asked += 1
        await asyncio.gather(*(self._turn(place) for place in range(len(self.contexts))))

    async def _turn(self, place: int) -> None:
        sampled = await self._engine.sample(asked(f"user-{place}", self.contexts[place], self._asked, PROMOTED))
        self.contexts[place] = (*self.contexts[place], *sampled.ids, 1)


def asked(session: str, ids: tuple[int, ...], seed: int, policy: PolicyRef) -> SampleRequest:
    """A turn of a user, or of training."""
    return SampleRequest(
        session=session,
        ids=ids,
        policy=policy,
        sampling=Sampling(max_turn_tokens=TURN_TOKENS),
        stop_ids=(),
        seed=seed,
        lane="production" if policy == PROMOTED else "train",
    )


class Clock:
    """Wall time and CPU time of the process, in milliseconds, by the name of the work."""

    def __init__(self) -> None:
        self.spent: dict[str, list[tuple[float, float]]] = defaultdict(list)

    async def time(self, name: str, work: Coroutine[Any, Any, T]) -> T:
        """Await work."""
        wall, cpu = time.perf_counter(), time.process_time()
        done = await work
        self.spent[name].append((1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)))
        return done

    def figures(self) -> Figures:
        """Medians, and the largest wall time."""
        figures: Figures = {}
        for name, spent in self.spent.items():
            walls, cpus = zip(*spent, strict=True)
            figures[f"{name}_p50_ms"] = round(float(np.median(walls)), 3)
            figures[f"{name}_max_ms"] = round(max(walls), 3)
            figures[f"{name}_cpu_p50_ms"] = round(float(np.median(cpus)), 3)
        return figures


async def measure(args: argparse.Namespace, folder: Path) -> tuple[Figures, dict[str, Target]]:
    """Measure the swaps."""
    torch.set_num_threads(1)
    config = hugging_face.from_section(Policy(dim=args.dim, expert_dim=args.dim))
    numerics = probe(config)
    files = [
        (str(folder / f"{seed}"), tensor_state.write(folder / f"{seed}", Model(config, numerics, seed=seed).state()))
        for seed in range(FILES)
    ]
    engine = EmbeddedEngine(config, numerics)
    clock, users = Clock(), Users(engine, config.vocab, args)
    pauses: list[float] = []
    await engine.load(1, *files[1])
    await engine.pin(PROMOTED.version, *files[0])
    await users.turns()

    async def first_turns(released: bool) -> None:
        if released:
            await clock.time("reclaim_load", engine.pin(PROMOTED.version, *files[0]))
        await users.turns()

    version = 1
    for number in range(args.rounds):
        for arm in ("kept", "released") if number % 2 else ("released", "kept"):
            version += 1
            if arm == "released":
                await engine.unpin(PROMOTED.version)
            swap = await clock.time("lend", engine.load(version, *files[1 + version % (FILES - 1)]))
            pauses.append(swap.pause_ms)
            await engine.sample(asked(f"train-{version}", users.contexts[0], version, PolicyRef()))
            await engine.close(f"train-{version}")
            await clock.time(f"reclaim_{arm}_first_turns", first_turns(arm == "released"))
            await clock.time("undisturbed_turns", users.turns())
    await engine.stop()
    figures: Figures = {
        "rounds": args.rounds,
        "sessions": args.sessions,
        "context_tokens": args.context,
        "weights_bytes": Path(files[0][0]).stat().st_size,
        "lend_pause_max_ms": round(max(pauses), 4),
        **clock.figures(),
    }
    ratio = figures["reclaim_kept_first_turns_p50_ms"] / figures["undisturbed_turns_p50_ms"]
    figures["reclaim_kept_over_undisturbed_x"] = round(ratio, 3)
    ratio = figures["reclaim_released_first_turns_p50_ms"] / figures["undisturbed_turns_p50_ms"]
    figures["reclaim_released_over_undisturbed_x"] = round(ratio, 3)
    targets = {
        "reclaim_kept_over_undisturbed_x": at_most(figures["reclaim_kept_over_undisturbed_x"], 1.25),
        "lend_pause_max_ms": at_most(figures["lend_pause_max_ms"], 10.0),
    }
    return figures, targets


def main() -> None:
    """Measure, end with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--sessions", type=int, default=4, help="users of the promoted version")
    parser.add_argument("--context", type=int, default=1024, help="tokens of a user's session at the start")
    parser.add_argument("--dim", type=int, default=96, help="width of the policy and of its experts")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        figures, targets = uvloop.run(measure(args, Path(text)))
    finish(figures, targets, "torch", "numpy")


if __name__ == "__main__":
    main()
