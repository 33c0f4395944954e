"""An attempt without a verdict ends its slot: the group goes on with the others."""

import pytest

from headrace.messages.rollout import LEFT_OUT
from tests.ledger.test_schedule import RULES, World
from tests.support import records as r


@pytest.mark.parametrize("reason", LEFT_OUT)
def test_a_slot_without_a_verdict_is_left_out_without_another_attempt(reason: str) -> None:
    world = World(RULES._replace(group_size=3))
    world.carry_out()
    world.write("ledger", r.failed("g000000", 0, 0, reason))
    for slot in (1, 2):
        world.write("score", r.score("g000000", slot))
    world.carry_out()
    group = world.state.groups["g000000"]
    assert len(group.slots[0].attempts) == 1
    assert group.closed is not None and [slot.slot for slot in group.closed.slots] == [1, 2]
