"""The card of a judge: how well its answers agree with labels, per criterion, and whether a criterion may count.

Agreement is Cohen's kappa, because a judge that always answers "met" agrees with half of the labels. A criterion counts
when its kappa is at least `KAPPA` and at most `FLIPS` of its answers change with the order in which the words are
offered; otherwise its weight is 0. The labels are pairs: two works on one task, of which one meets the statement.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from headrace.judging.rubrics.rubric import RubricError, digest
from headrace.messages.judging import Agreement
from headrace.messages.tasks import Criterion

KAPPA = 0.4
FLIPS = 0.10
RESAMPLES = 1000


class Label(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of a labels file."""

    criterion: str
    task: str
    met: str
    """A work that meets the statement."""
    not_met: str
    """A work that does not."""


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """The judge's answers about one work."""

    label: bool
    votes: tuple[bool, ...]
    first: bool
    """The answer of one vote."""
    turned: bool
    """The same vote with the words in the other order."""
    again: bool
    """The same question with another seed."""
    longer: bool
    """Whether it is the longer work of its pair."""

    @property
    def verdict(self) -> bool:
        """The majority; a tie is "not met"."""
        return 2 * sum(self.votes) > len(self.votes)


Pair = tuple[Item, Item]


class CriterionCard(msgspec.Struct, frozen=True, kw_only=True):
    """The quality of a judge's answers on one criterion."""

    id: str
    digest: str
    """Hash of the statement: another wording is another criterion."""
    pairs: int
    accuracy: float
    kappa: float
    kappa_low: float
    kappa_high: float
    flips: float
    """Share of answers that change with the order of the words."""
    retest: float
    """Share of answers that another seed repeats."""
    length_bias: float
    """Length bias: the mean of verdict minus label over the longer works of the pairs, minus the same mean over the
    shorter works. 0 without bias, from -2 to 2."""
    counts: bool
    reason: str = ""
    """Why the criterion does not count; empty when it counts."""


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """The card of one judge, over all criteria."""

    judge: str
    """Model, settings and version of the instructions (`RubricJudge.identity`)."""
    criteria: tuple[CriterionCard, ...]
    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0

    def keeps(self, criterion: Criterion) -> bool:
        """Whether a criterion counts; a criterion that is not on the card does not."""
        measured = self._of(criterion)
        return measured is not None and measured.counts

    def agreement(self, criterion: Criterion) -> Agreement | None:
        """The agreement with labels on a criterion; None where the card does not have it."""
        measured = self._of(criterion)
        if measured is None:
            return None
        return Agreement(kappa=measured.kappa, low=measured.kappa_low, high=measured.kappa_high, pairs=measured.pairs)

    def _of(self, criterion: Criterion) -> CriterionCard | None:
        measured = {each.id: each for each in self.criteria}.get(criterion.id)
        return measured if measured is not None and measured.digest == digest(criterion.text) else None

    def require(self, judge: str, criteria: Sequence[Criterion], path: str) -> None:
        """RubricError when the card is about another judge, or lacks a criterion."""
        if self.judge != judge:
            raise RubricError(
                f"{path} is the card of {self.judge}, but [judge] uses {judge}: run `headrace eval "
                f"--judge` for that judge"
            )
        digests = {each.id: each.digest for each in self.criteria}
        for criterion in criteria:
            if digests.get(criterion.id) != digest(criterion.text):
                raise RubricError(
                    f"{path} has no figures for the criterion {criterion.id!r} in its present wording: "
                    "add labels for it and run `headrace eval --judge` again"
                )


def load(path: str) -> Card:
    """Read a card. RubricError."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Card)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RubricError(f"{path} is not the card of a judge: {error}") from None


def labels(path: str) -> list[Label]:
    """Read a labels file. RubricError names the line."""
    labels: list[Label] = []
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise RubricError(f"{path}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        try:
            labels.append(msgspec.json.decode(line, type=Label))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RubricError(f"{path}, line {number}: {error}; expected criterion, task, met and not_met") from None
    if not labels:
        raise RubricError(f"{path} holds no labels")
    return labels


def kappa(items: Sequence[Item]) -> float:
    """Cohen's kappa between verdicts and labels; 0 where agreement by chance is already complete."""
    total = len(items)
    agree = sum(item.verdict == item.label for item in items) / total
    said, true = sum(item.verdict for item in items) / total, sum(item.label for item in items) / total
    chance = said * true + (1 - said) * (1 - true)
    return (agree - chance) / (1 - chance) if chance < 1.0 else 0.0


def interval(pairs: Sequence[Pair], seed: int = 0) -> tuple[float, float]:
    """The 95 % interval of kappa: the bootstrap over pairs, because the works of a pair resemble each other."""
    rng = random.Random(seed)
    values = sorted(
        kappa([item for pair in rng.choices(pairs, k=len(pairs)) for item in pair]) for _ in range(RESAMPLES)
    )
    return values[int(0.025 * RESAMPLES)], values[int(0.975 * RESAMPLES) - 1]


def criterion_card(criterion: Criterion, pairs: Sequence[Pair]) -> CriterionCard:
    """The figures of one criterion, from one judged pair or more."""
    items = [item for pair in pairs for item in pair]
    low, high = interval(pairs)
    agreement = kappa(items)
    flips = fmean(item.first != item.turned for item in items)
    excess: dict[bool, list[int]] = {True: [], False: []}
    for item in items:
        excess[item.longer].append(item.verdict - item.label)
    reasons = []
    if agreement < KAPPA:
        reasons.append(f"kappa {agreement:.2f} is below {KAPPA}")
    if flips > FLIPS:
        reasons.append(f"{flips:.0%} of the answers change with the order of the words, more than {FLIPS:.0%}")
    return CriterionCard(
        id=criterion.id,
        digest=digest(criterion.text),
        pairs=len(pairs),
        accuracy=fmean(item.verdict == item.label for item in items),
        kappa=agreement,
        kappa_low=low,
        kappa_high=high,
        flips=flips,
        retest=fmean(item.first == item.again for item in items),
        length_bias=fmean(excess[True]) - fmean(excess[False]) if excess[True] and excess[False] else 0.0,
        counts=not reasons,
        reason="; ".join(reasons),
    )
