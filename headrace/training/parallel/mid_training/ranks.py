"""Mid-training over the ranks of a trainer: the first one runs the recipe, and all of them compute.

The idea: the first process makes the texts, which are small, and follows `training.mid_training.learn`. It sends each
batch, each update and each checkpoint to the others as an order. A batch is cut into the shares of one process and
these into micro-batches of at most `[trainer] micro_tokens`, which are dealt over the processes and summed as in a
step. The same layout of ranks makes the same weights, bit for bit. Numerics are the ordinary ones, as in one process.
Moments are kept in the format of `[algorithm] moments`.

A process that ends, ends the group, and a restarted one continues from the newest checkpoint of mid-training, which has
all rows and does not depend on the number of processes.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from headrace.policy.numerics_probe import probe
from headrace.training import checkpoint
from headrace.training.mid_training import FILE, Progress, Trace, learn, processes, settings
from headrace.training.parallel.mid_training.shards import Share, first_share, negative_logp, shares
from headrace.training.parallel.trainer import ShardedTrainer
from headrace.training.schedule import optimizer_settings


class Fresh(msgspec.Struct, frozen=True, tag=True):
    """Make the weights to start from."""


class LoadData(msgspec.Struct, frozen=True, tag=True):
    """Continue from a checkpoint."""

    file: str


class Save(msgspec.Struct, frozen=True, tag=True):
    """Write a checkpoint."""

    file: str
    position: dict[str, int | str]


class Gradient(msgspec.Struct, frozen=True, tag=True):
    """Compute the gradient of a batch."""

    batch: list[Share]


class Update(msgspec.Struct, frozen=True, tag=True):
    """Update the weights."""

    rate: float
    scale: float


class LossSum(msgspec.Struct, frozen=True, tag=True):
    """Compute the loss of some texts."""

    texts: Share


class End(msgspec.Struct, frozen=True, tag=True):
    """Leave version 0 behind."""


Order = Fresh | LoadData | Save | Gradient | Update | LossSum | End
"""An order of the first process to the others."""


def cut(batch: Iterable[Share], most: int) -> list[Share]:
    """The micro-batches of a batch's shares, in their order: consecutive texts of a share with at most `most` inputs; a
    longer text is one by itself. Those without a target that counts are left out."""
    out: list[Share] = []
    for share in batch:
        begin = end = inputs = 0
        lengths: list[int] = []
        for length in share.lengths:
            if lengths and inputs + length - 1 > most:
                out.append(_part(share, lengths, begin, end))
                begin, inputs, lengths = end, 0, []
            lengths.append(length)
            end, inputs = end + length, inputs + length - 1
        if lengths:
            out.append(_part(share, lengths, begin, end))
    return [part for part in out if _teaches(part)]


def _part(share: Share, lengths: list[int], begin: int, end: int) -> Share:
    return Share(lengths, share.ids[begin:end], share.weights[begin:end], share.divisor)


def _teaches(share: Share) -> bool:
    """Whether a token besides the first of each text has a weight."""
    counts = torch.tensor(share.weights) > 0
    counts[torch.tensor([0, *share.lengths[:-1]]).cumsum(0)] = False
    return bool(counts.any())


class LearningPart:
    """The part of every process: what it does at an order."""

    def __init__(self, trainer: ShardedTrainer, source: Path | None) -> None:
        """source: of the weights to start from, as in `ShardedTrainer.fill`."""
        self._trainer, self._state, self._source = trainer, trainer.sharded, source
        config, model = trainer.config, trainer.state.model
        self._most = config.trainer.micro_tokens
        model.numerics = probe(model.config, exact=False, device=trainer.world.device)  # as in one process
        model.recompute = config.numerics.recompute
        self._state.log = None
        self._state.configure(settings(config.mid_training, optimizer_settings(config.algorithm).moments))

    def take(self, order: Order) -> Any:
        """Follow an order, and return its result."""
        match order:
            case Fresh():
                return self._trainer.fill(self._source)
            case LoadData(file):
                return self._load(Path(file))
            case Save(file, position):
                return self._save(Path(file), position)
            case Gradient(batch):
                return self._gradient(batch)
            case Update(rate, scale):
                return self._state.apply(rate, scale)
            case LossSum(texts):
                return self._loss_sum(texts)
            case End():
                return self._end()

    def _end(self) -> None:
        """Leave version 0 behind."""
        trainer = self._trainer
        self._state.begin(optimizer_settings(trainer.config.algorithm))
        trainer.state.model.numerics = trainer.numerics
        trainer.clock.lap()  # the time until here belongs to no step

    def _load(self, file: Path) -> Mapping[str, int | str]:
        position: Mapping[str, int | str] = json.loads(self._state.read(file, self._state.source(file))["position"])
        return position

    def _save(self, file: Path, position: Mapping[str, int | str]) -> None:
        self._state.sharded.reshard()
        about = checkpoint.facts(self._state, [], position, None)
        self._state.write(file, *self._state.whole(self._state.tensors()), about)

    def _gradient(self, batch: Sequence[Share]) -> tuple[float, float]:
        """Loss and norm."""
        self._state.zero_grad()

        def one(share: Share) -> Tensor:
            loss = self._loss(share)
            torch.autograd.backward(loss)
            return loss.detach()

        losses = self._each(cut(batch, self._most), one)
        return sum(losses, 0.0), self._state.gradient_norm()

    @torch.no_grad()
    def _loss_sum(self, texts: Share) -> float:
        return sum(self._each(cut([texts], self._most), self._loss), 0.0) * texts.divisor

    def _loss(self, share: Share) -> Tensor:
        loss = negative_logp(self._state.model, share)
        assert loss is not None, "a micro-batch without a target was not left out"
        return loss

    def _each(self, members: Sequence[Share], work: Callable[[Share], Tensor]) -> list[float]:
        """The results of all micro-batches in their order, in every process."""

        def one(at: int, contributes: bool) -> Tensor:
            member = members[at]
            return work(member if contributes else msgspec.structs.replace(member, divisor=math.inf))

        return [float(loss) for loss in self._trainer.world.each(len(members), one, Tensor)]


class LearningRanks:
    """A `mid_training.Learner`: the first process, which sends each order before it follows it."""

    def __init__(self, trainer: ShardedTrainer, source: Path | None) -> None:
        """source: as in `LearningPart`."""
        self._trainer, self._part = trainer, LearningPart(trainer, source)
        self._texts: ThreadPoolExecutor | None = None

    def _all(self, order: Order) -> Any:
        self._trainer.world.tell(order)
        return self._part.take(order)

    @property
    def step(self) -> int:
        """Number of updates so far."""
        return self._trainer.state.step

    def resume(self, file: Path) -> Mapping[str, int | str] | None:
        """As `Learner`; without a file every process makes its rows of the weights to start from."""
        if not file.exists():
            self._all(Fresh())
            return None
        position: Mapping[str, int | str] = self._all(LoadData(str(file)))
        return position

    def save(self, file: Path, position: Mapping[str, int | str]) -> None:
        """As `Learner`, each process its own rows."""
        self._all(Save(str(file), dict(position)))

    @contextmanager
    def working(self) -> Iterator[None]:
        """As `Learner`: texts are made beside the gradient, which computes on another device or in other processes."""
        with ThreadPoolExecutor(1, thread_name_prefix="texts") as self._texts:
            yield

    def gradient(self, texts: Sequence[Trace], meanwhile: Callable[[], None]) -> tuple[float, float]:
        """As `Learner`."""
        assert self._texts is not None, "call it within `working`"
        made = self._texts.submit(meanwhile)
        count = processes(self._trainer.config.mid_training, self._trainer.world.device)
        loss, norm = self._all(Gradient(shares(texts, count, first_share(self._trainer.state.model.config))))
        made.result()  # not a part of the order: the group does not wait for itself
        return loss, norm

    def update(self, rate: float, scale: float) -> None:
        """As `Learner`."""
        self._all(Update(rate, scale))

    def loss_sum(self, texts: Sequence[Trace]) -> float:
        """As `Learner`, several texts in one forward pass."""
        (share,) = shares(texts, 1)
        return float(self._all(LossSum(share)))

    def end(self) -> None:
        """Let every process leave version 0 behind."""
        self._all(End())


def lead(
    trainer: ShardedTrainer,
    source: Path | None,
    traces: Iterable[Trace],
    progress: Callable[[Progress], None],
) -> None:
    """In the first process: mid-train from `source`, as `LearningPart`, or from the checkpoint of an earlier call.
    Raises as `mid_training.learn`, and RuntimeError when another process has ended."""
    ranks = LearningRanks(trainer, source)
    learn(ranks, traces, trainer.config.mid_training, progress, file=trainer.folder / FILE)
    ranks.end()


def follow(trainer: ShardedTrainer, source: Path | None) -> None:
    """In every other process: follow the orders of `lead` to its end."""
    part = LearningPart(trainer, source)
    ended = False
    while not ended:
        order: Order = trainer.world.hear(Order)
        part.take(order)
        ended = isinstance(order, End)
