"""Mid-training: next-token prediction on traces of tool use, before reinforcement learning.

The idea: a randomly initialised policy finds no reward, so it first learns from traces that scripts produce on real
repository content, in exactly the format of its later episodes. Small batches are better here: with batches of 4,096
tokens nothing was learned from 1.5 M tokens, with 1,024 the same tokens were enough. Traces are imperfect on
purpose (they quit early, edit a file that they have not read, write a wrong fix), so that reinforcement has something
to improve.

The weights depend on the traces and the recipe alone, also after a trainer was killed. Weights, moments and the number
of steps are saved regularly. A restarted trainer generates the traces of earlier steps again and skips them, which
takes a twentieth of the time that learning from them took.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headrace.algorithms.adamw import OptimizerSettings
from headrace.config import MidTraining
from headrace.policy.model import Model
from headrace.training import checkpoint
from headrace.training.parallel.shards import Shards
from headrace.training.parallel.shards import Text as Trace
from headrace.training.state import TrainerState

__all__ = ["MidTrainingFailed", "Progress", "Trace", "batches", "learning_rate", "run"]


KEEP_S = 20.0
"""Smallest number of seconds between two checkpoints."""
KEEP_SHARE = 0.05
"""Largest share of the time that checkpoints take: those of a larger model are written less often."""
REPORT_S = 5.0
"""Seconds after which progress is reported, even before `every` steps."""


@dataclass(frozen=True)
class Progress:
    """The progress of mid-training. `loss` is the weighted mean over the tokens since the last report, in nats."""

    step: int
    tokens: int
    of_tokens: int
    loss: float
    seconds: float


class MidTrainingFailed(Exception):
    """The loss or the gradient of a step is not finite, or the saved file is of another recipe; the text says which."""


def learning_rate(recipe: MidTraining, done: float) -> float:
    """Linear warm-up over the first `warmup` share, then the recipe's schedule. `done`: share of tokens, 0 to 1."""
    if done < recipe.warmup:
        return recipe.learning_rate * (done + 1e-3) / (recipe.warmup + 1e-3)
    if recipe.schedule == "constant" or recipe.warmup == 1.0:
        return recipe.learning_rate
    decayed = (done - recipe.warmup) / (1.0 - recipe.warmup)
    if recipe.schedule == "cosine":
        decayed = (1.0 - math.cos(math.pi * decayed)) / 2.0
    return recipe.learning_rate * (1.0 - (1.0 - recipe.min_rate) * decayed)


def batches(traces: Iterable[Trace], tokens: int) -> Iterator[list[Trace]]:
    """Traces in order, cut into batches as soon as one has `tokens` or more; the unfinished rest is dropped."""
    members: list[Trace] = []
    size = 0
    for trace in traces:
        members.append(trace)
        size += len(trace.ids)
        if size >= tokens:
            yield members
            members, size = [], 0


def run(
    model: Model,
    traces: Iterable[Trace],
    recipe: MidTraining,
    progress: Callable[[Progress], None] = lambda _: None,
    every: int = 50,
    kept: Path | None = None,
) -> int:
    """Train `model` in place on `recipe.tokens` tokens, or until `traces` end; returns the number of steps.

    `progress` is called every `every` steps or REPORT_S and at the end, from this thread. `kept` is a file to continue
    from, if it exists, and to write every KEEP_S or more (KEEP_SHARE); `traces` begin with the first one in either
    case. MidTrainingFailed when the numbers break or the file is of another recipe, CheckpointError when it is damaged.
    """
    state = TrainerState(model, settings=OptimizerSettings((recipe.beta1, recipe.beta2), recipe.weight_decay))
    started = time.perf_counter()
    tokens = _resume(kept, state, recipe) if kept is not None else 0
    saved = reported = started
    cost = 0.0
    seen: list[float] = []
    stream = batches(traces, recipe.batch_tokens)
    for _ in range(state.step):
        next(stream, None)
    members = next(stream, None)
    following: list[list[Trace] | None] = []

    def prefetch() -> None:
        following.append(next(stream, None))

    on_cpu = model.embedding.device.type == "cpu"
    with Shards(model, recipe.processes if on_cpu else 1) as shards:
        while members is not None and tokens < recipe.tokens:
            loss = shards.backward(members, prefetch)
            norm = state.gradient_norm()
            if not math.isfinite(norm):
                raise MidTrainingFailed(f"step {state.step}: loss {loss}, gradient norm {norm}")
            state.apply(learning_rate(recipe, min(1.0, tokens / recipe.tokens)), min(1.0, 1.0 / norm) if norm else 1.0)
            seen.append(loss)
            tokens += sum(len(trace.ids) - 1 for trace in members)
            members = following.pop()
            now = time.perf_counter()
            if state.step % every == 0 or now - reported >= REPORT_S or tokens >= recipe.tokens:
                progress(Progress(state.step, tokens, recipe.tokens, sum(seen) / len(seen), now - started))
                reported = now
                seen.clear()
            if kept is not None and now - saved >= max(KEEP_S, cost / KEEP_SHARE):
                checkpoint.save(kept, state, position={"tokens": tokens, "recipe": _words(recipe)})
                saved = time.perf_counter()
                cost = saved - now
    return state.step


def _resume(kept: Path, state: TrainerState, recipe: MidTraining) -> int:
    """Restore the saved file, if there is one. Returns the number of tokens that were read before it was written."""
    try:
        saved = checkpoint.load(kept, state)
    except FileNotFoundError:
        return 0
    if not _same(str(saved.position["recipe"]), recipe):
        raise MidTrainingFailed(f"{kept} was begun under another [mid_training]: go back to that, or remove the file")
    return int(saved.position["tokens"])


def _same(saved: str, recipe: MidTraining) -> bool:
    """Whether a recipe is the saved one. A key that is younger than the file had its default then."""
    try:
        return msgspec.json.decode(saved, type=MidTraining) == recipe
    except msgspec.ValidationError:
        return False


def _words(recipe: MidTraining) -> str:
    return msgspec.json.encode(recipe).decode()
