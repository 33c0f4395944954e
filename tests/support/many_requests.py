"""Requests of many trajectories at once, for one rollout actor."""

from collections.abc import Sequence

from headrace.messages.rollout import Limits, PolicyRef, RolloutRequest, Sampling
from headrace.messages.tasks import TaskRef
from headrace.tasks import open_suite

SLOTS = 8
"""Of a group."""


def requests(
    run: str, numbers: range, *, turns: int, tokens: int, policies: Sequence[PolicyRef] = (PolicyRef(),)
) -> list[RolloutRequest]:
    """The requests with these numbers, in groups, for one policy after the other."""
    task = TaskRef("generated/train", open_suite("generated/train").ids()[0])
    return [
        RolloutRequest(
            run=run,
            lane="train",
            group=f"g{number // SLOTS}",
            slot=number % SLOTS,
            attempt=0,
            task=task,
            seed=number,
            policy=policies[number % len(policies)],
            sampling=Sampling(max_turn_tokens=tokens),
            limits=Limits(max_turns=turns, context_tokens=4096),
        )
        for number in numbers
    ]
