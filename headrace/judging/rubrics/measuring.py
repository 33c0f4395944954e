"""Makes the card of a judge: asks about every label as in a run, then with the words reversed and with another seed."""

import asyncio
from collections.abc import Sequence

from headrace.config import Judge as Section
from headrace.judging.rubrics.card import Card, CriterionCard, Item, Label, Pair, criterion_card
from headrace.judging.rubrics.judge import RubricJudge, Usage
from headrace.judging.rubrics.rubric import RubricError
from headrace.messages.tasks import Criterion

RETEST_SEED = 7919
"""Seed of the answer that is compared with the first one; no vote has this seed."""


async def measure(judge: RubricJudge, section: Section, labels: Sequence[Label]) -> Card:
    """The card. RubricError for a label of no criterion, or a criterion without labels; EndpointFailed."""
    criteria = {criterion.id: criterion for criterion in judge.rubric.criteria}
    if strange := sorted({label.criterion for label in labels} - criteria.keys()):
        raise RubricError(f"labels name the criterion {strange[0]!r}; the rubric has {', '.join(criteria)}")
    usage = Usage()
    cards: list[CriterionCard] = []
    for criterion in criteria.values():
        labelled = [label for label in labels if label.criterion == criterion.id]
        if not labelled:
            raise RubricError(f"the criterion {criterion.id!r} has no labels: add pairs for it, or take it out")
        pairs = await asyncio.gather(*(_pair(judge, criterion, label, usage) for label in labelled))
        cards.append(criterion_card(criterion, pairs))
    prices = section.model_prices
    return Card(
        judge=judge.identity,
        criteria=tuple(cards),
        calls=usage.calls,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cost=(usage.prompt_tokens * prices[0] + usage.completion_tokens * prices[1]) / 1e6,
    )


async def _pair(judge: RubricJudge, criterion: Criterion, label: Label, usage: Usage) -> Pair:
    met, not_met = await asyncio.gather(
        _item(judge, criterion, label.task, label.met, True, len(label.met) > len(label.not_met), usage),
        _item(judge, criterion, label.task, label.not_met, False, len(label.not_met) > len(label.met), usage),
    )
    return met, not_met


async def _item(
    judge: RubricJudge, criterion: Criterion, task: str, work: str, label: bool, longer: bool, usage: Usage
) -> Item:
    votes = await judge.votes(criterion, task, work, usage)
    turned, again = await asyncio.gather(
        judge.answer(criterion.text, task, work, usage, order=1, seed=0),
        judge.answer(criterion.text, task, work, usage, order=0, seed=RETEST_SEED),
    )
    return Item(
        label=label,
        votes=tuple(vote.met for vote in votes),
        first=votes[0].met,
        turned=turned.met,
        again=again.met,
        longer=longer,
    )
