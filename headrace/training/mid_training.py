"""Mid-training: next-token prediction on traces of tool use, before reinforcement learning.

The idea: a randomly initialised policy finds no reward, so it first learns from traces that scripts produce on real
repository content, in exactly the format of its later episodes. Small batches are better here: with batches of 4,096
tokens nothing was learned from 1.5 M tokens, with 1,024 the same tokens were enough. Traces are imperfect on
purpose (they quit early, edit a file that they have not read, write a wrong fix), so that reinforcement has something
to improve.

The weights depend on the traces and the recipe alone, also after a trainer was killed. Weights, moments and the number
of steps are saved regularly. A restarted trainer generates the traces of earlier steps again and skips them, which
takes a twentieth of the time that learning from them took. A Mixture of data is sought to the saved position instead.

`learn` is the recipe; a `Learner` computes. That of `run` is this process; `parallel.mid_training.ranks` has one over
the ranks of a trainer.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import torch

from headrace.algorithms.adamw import OptimizerSettings
from headrace.config import MidTraining
from headrace.errors import HeadraceError
from headrace.policy.seam import PolicyModel
from headrace.training import checkpoint
from headrace.training.data.mixture import Mixture, phase
from headrace.training.parallel.mid_training.shards import Shards, negative_logp, shares
from headrace.training.parallel.mid_training.shards import Text as Trace
from headrace.training.schedule import BETA1, LEAST_RATE
from headrace.training.state import TrainerState

__all__ = ["FILE", "Learner", "MidTrainingFailed", "Progress", "Trace", "batches", "learn", "learning_rate", "run"]


FILE = "mid-training.safetensors"
"""Name of the checkpoint in the trainer's folder, while mid-training runs."""
KEEP_S = 20.0
"""Smallest number of seconds between two checkpoints."""
KEEP_SHARE = 0.05
"""Largest share of the time that checkpoints take: those of a larger model are written less often."""
REPORT_S = 5.0
"""Seconds after which progress is reported, even before `every` steps."""


@dataclass(frozen=True)
class Progress:
    """The progress of mid-training. `loss` is the weighted mean over the tokens since the last report, in nats; NaN
    before the first step."""

    step: int
    tokens: int
    of_tokens: int
    loss: float
    seconds: float
    held_out: Mapping[str, float] = field(default_factory=dict)
    """Loss in nats on held-out documents by source, at steps where it was measured."""


class MidTrainingFailed(HeadraceError):
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
    return recipe.learning_rate * (1.0 - (1.0 - LEAST_RATE) * decayed)


def batches(traces: Iterable[Trace], tokens: int | Callable[[int], int], drawn: int = 0) -> Iterator[list[Trace]]:
    """Traces in order, cut into batches as soon as one has `tokens` or more; the unfinished rest is dropped.

    tokens: a number, or one for each number of targets drawn before the batch, which begins at `drawn`.
    """
    members: list[Trace] = []
    size = 0
    for trace in traces:
        members.append(trace)
        size += len(trace.ids)
        if size >= (tokens if isinstance(tokens, int) else tokens(drawn)):
            drawn += sum(len(member.ids) - 1 for member in members)
            yield members
            members, size = [], 0


class _Batch(NamedTuple):
    """A batch, and the position of the data before it."""

    members: list[Trace]
    position: str


class _Batches:
    """The batches of a run from a resumed step on."""

    def __init__(self, traces: Iterable[Trace], recipe: MidTraining, step: int, tokens: int, position: str) -> None:
        """step, tokens: done before. position: of a Mixture, empty at the start."""
        self._mixture = traces if isinstance(traces, Mixture) else None
        if self._mixture is not None and position:
            self._mixture.seek(position)
        limit = (lambda drawn: phase(recipe, drawn)[1]) if self._mixture is not None else recipe.batch_tokens
        self._batches = batches(traces, limit, tokens)
        if self._mixture is None:
            for _ in range(step):
                next(self._batches, None)

    def position(self) -> str:
        """Of the data, now; empty for what is generated again."""
        return self._mixture.position() if self._mixture is not None else ""

    def next(self) -> _Batch | None:
        """The next batch; None at the end of the data."""
        position = self.position()
        members = next(self._batches, None)
        return _Batch(members, position) if members is not None else None


class Learner(Protocol):
    """The weights, and the arithmetic of their updates."""

    @property
    def step(self) -> int:
        """Number of updates so far."""

    def resume(self, file: Path) -> Mapping[str, int | str] | None:
        """Restore a saved file and return its position; None without a file. CheckpointError."""

    def save(self, file: Path, position: Mapping[str, int | str]) -> None:
        """Replace the file durably."""

    def working(self) -> AbstractContextManager[None]:
        """Gradients are computed in this block."""

    def gradient(self, texts: Sequence[Trace], meanwhile: Callable[[], None]) -> tuple[float, float]:
        """Compute a batch's gradient. Returns the weighted mean loss in nats, and the gradient's Euclidean norm; NaN
        where it is not finite. meanwhile: called once, by any thread."""

    def update(self, rate: float, scale: float) -> None:
        """One update from the last gradient times `scale`."""

    def loss_sum(self, texts: Sequence[Trace]) -> float:
        """The sum of the weighted losses of the texts' targets, in nats."""


class _OneProcess:
    """The learner of one process, whose batches are cut into shares."""

    def __init__(self, model: PolicyModel, recipe: MidTraining, offload: bool) -> None:
        self._model = model
        self._state = TrainerState(model, settings=settings(recipe), offload=offload)
        self._processes = processes(recipe, model.device)
        self._shards: Shards | None = None

    @property
    def step(self) -> int:
        return self._state.step

    def resume(self, file: Path) -> Mapping[str, int | str] | None:
        try:
            return checkpoint.load(file, self._state).position
        except FileNotFoundError:
            return None

    def save(self, file: Path, position: Mapping[str, int | str]) -> None:
        checkpoint.save(file, self._state, position=position)

    @contextmanager
    def working(self) -> Iterator[None]:
        with Shards(self._model, self._processes) as self._shards:
            yield

    def gradient(self, texts: Sequence[Trace], meanwhile: Callable[[], None]) -> tuple[float, float]:
        assert self._shards is not None, "call it within `working`"
        loss = self._shards.backward(texts, meanwhile)
        return loss, self._state.gradient_norm()

    def update(self, rate: float, scale: float) -> None:
        self._state.apply(rate, scale)

    @torch.no_grad()
    def loss_sum(self, texts: Sequence[Trace]) -> float:
        total = 0.0
        for text in texts:
            (share,) = shares([text], 1)
            loss = negative_logp(self._model, share)
            total += 0.0 if loss is None else float(loss) * share.divisor
        return total


def settings(recipe: MidTraining, moments: torch.dtype = torch.float32) -> OptimizerSettings:
    """The optimizer's settings. moments: dtype of both moments."""
    return OptimizerSettings((BETA1, recipe.beta2), moments=moments)


def processes(recipe: MidTraining, device: torch.device) -> int:
    """Number of shares into which a batch is cut first: a part of the recipe, because it decides the order of sums."""
    return recipe.processes if device.type == "cpu" else 1


def run(
    model: PolicyModel,
    traces: Iterable[Trace],
    recipe: MidTraining,
    progress: Callable[[Progress], None] = lambda _: None,
    every: int = 50,
    file: Path | None = None,
    offload: bool = False,
) -> int:
    """`learn` in this process: `model` is changed in place. offload: as in TrainerState."""
    return learn(_OneProcess(model, recipe, offload), traces, recipe, progress, every, file)


def learn(
    learner: Learner,
    traces: Iterable[Trace],
    recipe: MidTraining,
    progress: Callable[[Progress], None] = lambda _: None,
    every: int = 50,
    file: Path | None = None,
) -> int:
    """Train on `recipe.tokens` tokens, or until `traces` end; returns the number of steps.

    `progress` is called every `every` steps or REPORT_S and at the end, from this thread. `file` is the one to
    continue from, if it exists, and to write every KEEP_S or more (KEEP_SHARE); `traces` begin with the first one in
    either case. MidTrainingFailed when the numbers break or the file is of another recipe, CheckpointError when it is
    damaged.
    """
    started = time.perf_counter()
    tokens, position = _resume(file, learner, recipe) if file is not None else (0, "")
    saved = reported = started
    cost = 0.0
    seen: list[float] = []
    stream = _Batches(traces, recipe, learner.step, tokens, position)
    batch = stream.next()
    following: list[_Batch | None] = []

    def prefetch() -> None:
        following.append(stream.next())

    if isinstance(traces, Mixture) and not tokens:
        if first := held_out_loss(learner, traces, recipe.evaluate_tokens):
            progress(Progress(0, 0, recipe.tokens, math.nan, time.perf_counter() - started, first))
    with learner.working():
        while batch is not None and tokens < recipe.tokens:
            loss, norm = learner.gradient(batch.members, prefetch)
            if not math.isfinite(norm):
                raise MidTrainingFailed(f"step {learner.step}: loss {loss}, gradient norm {norm}")
            rate = learning_rate(recipe, min(1.0, tokens / recipe.tokens))
            learner.update(rate, min(1.0, 1.0 / norm) if norm else 1.0)
            seen.append(loss)
            tokens += sum(len(trace.ids) - 1 for trace in batch.members)
            batch = following.pop()
            ended = batch is None or tokens >= recipe.tokens
            held_out: Mapping[str, float] = {}
            if isinstance(traces, Mixture) and (ended or learner.step % recipe.evaluate_every == 0):
                held_out = held_out_loss(learner, traces, recipe.evaluate_tokens)
            now = time.perf_counter()
            if learner.step % every == 0 or now - reported >= REPORT_S or ended or held_out:
                progress(Progress(learner.step, tokens, recipe.tokens, sum(seen) / len(seen), now - started, held_out))
                reported = now
                seen.clear()
            if file is not None and now - saved >= max(KEEP_S, cost / KEEP_SHARE):
                at = batch.position if batch is not None else stream.position()
                about: dict[str, int | str] = {"tokens": tokens, "recipe": _words(recipe)}
                learner.save(file, about | ({"data": at} if at else {}))
                saved = time.perf_counter()
                cost = saved - now
    return learner.step


def held_out_loss(learner: Learner, mixture: Mixture, most: int) -> dict[str, float]:
    """The mean loss per target of each source's held-out documents, in nats, over about `most` tokens at most. Sources
    without such documents are left out."""
    losses: dict[str, float] = {}
    for name, documents in mixture.held_out().items():
        texts: list[Trace] = []
        read, weight = 0, 0.0
        for document in documents:
            texts.append(document)
            weight += sum(document.weights[1:])
            read += len(document.ids)
            if read >= most:
                break
        if weight:
            losses[name] = learner.loss_sum(texts) / weight
    return losses


def _resume(file: Path, learner: Learner, recipe: MidTraining) -> tuple[int, str]:
    """Restore the saved file, if there is one. Returns the number of tokens that were read before it was written, and
    the position of the data."""
    position = learner.resume(file)
    if position is None:
        return 0, ""
    if not _same(str(position["recipe"]), recipe):
        raise MidTrainingFailed(f"{file} was begun under another [mid_training]: go back to that, or remove the file")
    return int(position["tokens"]), str(position.get("data", ""))


def _same(saved: str, recipe: MidTraining) -> bool:
    """Whether a recipe is the saved one. A key that is younger than the file had its default then."""
    try:
        return msgspec.json.decode(saved, type=MidTraining) == recipe
    except msgspec.ValidationError:
        return False


def _words(recipe: MidTraining) -> str:
    return msgspec.json.encode(recipe).decode()
