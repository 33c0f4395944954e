"""Shows that a policy learns from the final reward which values to keep in a summary.

    python -m benchmarks.compaction [--seeds 1,2,3] [--arms trained,masked,truncated] [--steps 150] [--processes 2]

An episode has three segments. In the first one the policy reads four marked values; a summary holds one of them;
a second summary summarises the first; the third segment asks for the answer. The key is the third value, and only the
reward of the last segment depends on it; no text names it. Values are digits from 0 to 7.

Every arm starts from one warm-started policy, which summarises by copying a random one of the four and then copies
well: its answer is right in 1/4 + 3/4 x 1/8 = 0.344 of the episodes. `trained` trains every sampled token with the
final reward, as a run does; `masked` leaves summary tokens out of the loss; `truncated` clears the context without a
summary.

The benchmark runs headrace's own engine, terse renderer, `harness.loop.sample_turn`, `harness.context`,
`training.batches` and `training.step`. There are no sandboxes: this file writes the results of the only tool.
"""

import argparse
import asyncio
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch

from benchmarks.conditions import Figures, arguments, at_least, at_most, finish
from headrace.config import Algorithm, MidTraining
from headrace.engines.embedded.engine import EmbeddedEngine
from headrace.harness.context import Context
from headrace.harness.loop import sample_turn
from headrace.messages.base import Array
from headrace.messages.judging import Score
from headrace.messages.rollout import (
    Limits,
    PolicyRef,
    RolloutRequest,
    Sampling,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)
from headrace.messages.tasks import TaskRef
from headrace.messages.training import BatchGroup
from headrace.policy.config import PolicyConfig
from headrace.policy.model import Model
from headrace.policy.numerics_probe import probe
from headrace.rendering.terse import TerseRenderer
from headrace.rendering.tokenizer import Tokenizer
from headrace.training import mid_training
from headrace.training.batches.batch import Batch, build
from headrace.training.batches.segment import Segment
from headrace.training.gradient import Recipe
from headrace.training.state import TrainerState
from headrace.training.step import take
from headrace.weights import tensor_state

VALUES, MARKED, KEY, SEGMENTS = 8, 4, 2, 3
PROMPT, WAIT = "keep", "wait"
ARMS = ("trained", "masked", "truncated")
SLOTS = 16
REF = TaskRef("compaction", "0")


@dataclass(frozen=True)
class Trace:
    """A sequence of the warm start."""

    ids: list[int]
    weights: list[float]


def shown(values: Sequence[int]) -> str:
    """The tool's result in the first segment: a mark before every value."""
    return "".join(f"{mark}{value}," for mark, value in zip("abcd", values, strict=True))


class World:
    """The task: its texts as ids."""

    def __init__(self) -> None:
        texts = [PROMPT, WAIT, *(shown([value] * MARKED) for value in range(VALUES))]
        self.renderer = TerseRenderer(Tokenizer.train(texts * 20, vocab=380))
        self.digits = [self.renderer.tokenizer.encode(str(value))[0] for value in range(VALUES)]

    def results(self, turn: Turn, text: str) -> Turn:
        """A turn whose one call was answered."""
        call = ToolCall(id=f"{turn.index}.0", name="look")
        return replace_turn(turn, (call,), (ToolResult(call_id=call.id, ok=True, output=text),))

    def traces(self, seed: int) -> Iterator[Trace]:
        """Segments for the warm start: a random guess, a summary with a random value, and correct copies."""
        rng = random.Random(seed)
        while True:
            values = [rng.randrange(VALUES) for _ in range(MARKED)]
            first, copied = rng.randrange(2), rng.choice(values)
            summary = () if first else (self.digits[copied],)
            prompt = self.renderer.prompt(PROMPT, summary)
            act = self.digits[rng.randrange(VALUES) if first else copied]
            turn = self.results(empty_turn(), shown(values) if first else WAIT)
            more = self.renderer.delta([turn], stopped=None, summary=True)
            ids = [*prompt, act, *more, self.digits[copied]]
            yield Trace(ids, [float(at in (len(prompt), len(ids) - 1)) for at in range(len(ids))])


def empty_turn() -> Turn:
    """A turn without ids, as the context of the next one."""
    none = Array.of([], "<i4")
    return Turn(index=0, segment=0, prompt_ids=none, ids=none, logprobs=Array.of([], "<f4"), stop="length")


def replace_turn(turn: Turn, calls: tuple[ToolCall, ...], results: tuple[ToolResult, ...]) -> Turn:
    """The turn with another call and its results."""
    return msgspec.structs.replace(turn, calls=calls, results=results)


async def episode(
    world: World, engine: EmbeddedEngine, request: RolloutRequest, values: list[int], arm: str
) -> list[Turn]:
    """Three segments; the last turn is the answer."""
    context = Context(world.renderer, PROMPT, 1 << 20)
    turns: list[Turn] = []
    for segment in range(SEGMENTS):
        session = f"{request.trajectory}/{segment}"
        left = request.limits.max_tokens - sum(len(turn.ids) for turn in turns)
        ids = context.next_ids()
        turn = await sample_turn(engine, world.renderer, request, context, ids, "act", turns, session, left=left)
        last = segment == SEGMENTS - 1
        turn = turn if last else world.results(turn, shown(values) if segment == 0 else WAIT)
        context.take(turn)
        turns.append(turn)
        if not last and arm != "truncated":
            summary = await sample_turn(
                *(engine, world.renderer, request, context, context.summary_ids(), "summary", turns, session),
                left=left - len(turn.ids),
            )
            context.take(summary)
            turns.append(summary)
        elif not last:
            context = Context(world.renderer, PROMPT, 1 << 20)
            context.segment = segment + 1
        await engine.close(session)
    return turns


async def played(
    world: World, engine: EmbeddedEngine, seed: int, step: int, groups: int, arm: str
) -> tuple[Batch, float]:
    """A batch and the share of right answers."""
    rng = random.Random(f"{seed}-{step}")
    tasks = [[rng.randrange(VALUES) for _ in range(MARKED)] for _ in range(groups)]
    requests = [
        RolloutRequest(
            run="compaction", lane="train", group=f"g{group}", slot=slot, attempt=0, task=REF,
            seed=rng.getrandbits(62), policy=PolicyRef(), sampling=Sampling(max_turn_tokens=1), limits=Limits(),
        )
        for group in range(groups) for slot in range(SLOTS)
    ]  # fmt: skip
    episodes = await asyncio.gather(
        *(episode(world, engine, request, tasks[number // SLOTS], arm) for number, request in enumerate(requests))
    )
    trajectories: dict[int, Trajectory] = {}
    scores: dict[int, Score] = {}
    for number, (request, turns) in enumerate(zip(requests, episodes, strict=True)):
        right = turns[-1].ids.tolist() == [world.digits[tasks[number // SLOTS][KEY]]]
        trajectories[number] = Trajectory(
            run=request.run, lane="train", group=request.group, slot=request.slot, attempt=0, id=request.trajectory,
            task=REF, family="compaction", seed=request.seed, policy=request.policy, sampling=request.sampling,
            outcome="finished", turns=tuple(turns), diff={}, fingerprint=engine.fingerprint,
        )  # fmt: skip
        scores[number] = Score(
            run=request.run, lane="train", group=request.group, slot=request.slot, attempt=0, trajectory_seq=number,
            task=REF, family="compaction", judge_version="compaction", verdict="passed" if right else "failed",
            reward=float(right), passed=right,
        )  # fmt: skip
    closed = [
        BatchGroup(
            group=f"g{group}", close_seq=group, slots=tuple((n, n) for n in range(group * SLOTS, (group + 1) * SLOTS))
        )
        for group in range(groups)
    ]
    batch = build(closed, trajectories, scores)
    return (without_summaries(batch) if arm == "masked" else batch), batch.passed / batch.trajectories


def without_summaries(batch: Batch) -> Batch:
    """The batch whose summary tokens have no loss: the second of a segment's two sampled tokens."""

    def act(segment: Segment) -> Segment:
        return replace(
            segment,
            positions=segment.positions[:1],
            targets=segment.targets[:1],
            behaviour=segment.behaviour[:1],
            versions=segment.versions[:1],
        )

    return replace(batch, segments=tuple(map(act, batch.segments)))


def shape(world: World, args: argparse.Namespace) -> PolicyConfig:
    """Two dense layers."""
    return PolicyConfig(
        dim=args.dim, layers=2, heads=4, kv_heads=4, head_dim=args.dim // 4, experts=0, top_k=0,
        expert_dim=4 * args.dim,
        vocab=len(world.renderer.tokenizer),
    )  # fmt: skip


def warm(world: World, config: PolicyConfig, seed: int, args: argparse.Namespace) -> dict[str, torch.Tensor]:
    """The weights with which every arm of a seed starts."""
    model = Model(config, probe(config), seed=seed)
    recipe = MidTraining(tokens=args.warm_tokens, batch_tokens=1024, learning_rate=args.warm_rate, processes=1)
    mid_training.run(model, world.traces(seed), recipe)
    return {name: value.detach().clone() for name, value in model.state().items()}


async def run(
    world: World, start: dict[str, torch.Tensor], arm: str, seed: int, args: argparse.Namespace, folder: Path
) -> Figures:
    """One arm from one seed: the share of right answers before, and over the last ten steps."""
    config = shape(world, args)
    started, spent = time.monotonic(), time.process_time()
    model = Model(config, probe(config), seed=seed)
    model.load_state(start)
    state = TrainerState(model)
    algorithm = Algorithm(learning_rate=args.learning_rate, constant_tokens=2 * SEGMENTS - 1, warmup_steps=2)
    engine = EmbeddedEngine(config, model.numerics, max_batch=args.batch)
    shares: list[float] = []
    k3 = 0.0
    try:
        for step in range(args.steps):
            file = folder / f"{arm}-{seed}-{step % 2}"
            digest = tensor_state.write(file, state.published())
            await engine.load(state.version, str(file), digest)
            batch, share = await played(world, engine, seed, step, args.groups, arm)
            shares.append(share)
            if args.verbose:
                print(arm, seed, step, round(share, 3), flush=True)
            outcome = take(state, batch, Recipe(algorithm, 16384))
            if outcome.failed:
                raise RuntimeError(f"step {step} was refused: {outcome.failed} {outcome.detail}")
            k3 = max(k3, outcome.k3)
            if arm == "trained" and len(shares) >= 10 and statistics.fmean(shares[-10:]) >= args.enough:
                break
    finally:
        await engine.stop()
    return {
        f"{arm}_{seed}_before": round(shares[0], 4),
        f"{arm}_{seed}": round(statistics.fmean(shares[-10:]), 4),
        f"{arm}_{seed}_steps": len(shares),
        f"{arm}_{seed}_k3_max": k3,
        f"{arm}_{seed}_curve": [round(share, 3) for share in shares[:: max(1, len(shares) // 15)]],
        f"{arm}_{seed}_s": round(time.monotonic() - started, 1),
        f"{arm}_{seed}_cpu_s": round(time.process_time() - spent, 1),
    }


def warmed(seed: int, args: argparse.Namespace, folder: Path) -> Figures:
    """Write the weights with which every arm of a seed starts; in a process of its own."""
    torch.set_num_threads(1)
    world, spent = World(), time.process_time()
    torch.save(warm(world, shape(world, args), seed, args), folder / f"warm-{seed}.pt")
    return {f"warm_{seed}_cpu_s": round(time.process_time() - spent, 1)}


def arm_of(seed: int, arm: str, args: argparse.Namespace, folder: Path) -> Figures:
    """One arm of a seed; in a process of its own."""
    torch.set_num_threads(1)
    start = torch.load(folder / f"warm-{seed}.pt", weights_only=True)
    return asyncio.run(run(World(), start, arm, seed, args, folder))


def measure(args: argparse.Namespace) -> Figures:
    """All arms of all seeds, each in a process; `--processes` of them at once."""
    figures, started = Figures(), time.monotonic()
    seeds, arms = list(map(int, args.seeds.split(","))), args.arms.split(",")
    with (
        tempfile.TemporaryDirectory() as root,
        ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn")) as pool,
    ):
        folder = Path(root)
        waiting: set[Future[Figures]] = set()
        begins = {pool.submit(warmed, seed, args, folder): seed for seed in seeds}
        waiting.update(begins)
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                part = future.result()
                print(part, flush=True)
                figures |= part
                if future in begins:
                    waiting |= {pool.submit(arm_of, begins[future], arm, args, folder) for arm in arms}
    figures["processes"] = args.processes
    figures["cpu_s"] = round(sum(value for name, value in figures.items() if name.endswith("_cpu_s")), 1)
    figures["wall_s"] = round(time.monotonic() - started, 1)
    return figures


def settings_of_call() -> argparse.Namespace:
    """The study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--steps", type=int, default=150, help="of masked and truncated, and at most of trained")
    parser.add_argument("--groups", type=int, default=8, help=f"of {SLOTS} episodes each, in every step")
    parser.add_argument("--enough", type=float, default=0.98, help="mean of ten steps at which the trained arm ends")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--warm-tokens", type=int, default=200_000)
    parser.add_argument("--warm-rate", type=float, default=3e-3)
    parser.add_argument("--dim", type=int, default=48)
    parser.add_argument("--batch", type=int, default=64, help="of the engine")
    parser.add_argument("--processes", type=int, default=2, help="arms at once, one thread each")
    parser.add_argument("--verbose", action="store_true", help="print every step's share of right answers")
    return arguments(parser, seeds="1", arms="trained", steps=1, warm_tokens=2000, processes=1)


def main() -> None:
    """Print one line per arm and seed, and the figures with their targets."""
    args = settings_of_call()
    figures = measure(args)
    seeds, arms = args.seeds.split(","), args.arms.split(",")
    worst = {arm: [figures[f"{arm}_{seed}"] for seed in seeds] for arm in arms}
    targets = {}
    if "trained" in arms:
        targets["trained_min"] = at_least(min(worst["trained"]), 0.95)
    if "masked" in arms:
        targets["masked_max"] = at_most(max(worst["masked"]), 0.40)
    if "truncated" in arms:
        targets["truncated_max"] = at_most(max(worst["truncated"]), 0.15)
    targets["wall_s"] = at_most(figures["wall_s"], 600.0)
    finish(figures, targets, "torch")


if __name__ == "__main__":
    main()
