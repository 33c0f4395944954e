"""The number of a sandbox's slot comes from its request, and says nothing about the lane."""

from collections import Counter
from typing import Any

from headrace.messages.sandbox import Acquire
from headrace.vmhost.node import slot_assignment


def ask(group: str, slot: int = 0, **changes: Any) -> Acquire:
    fields: dict[str, Any] = {"run": "r1", "lane": "train", "role": "rollout", "attempt": 0, "isolation": "group"}
    return Acquire(group=group, slot=slot, **(fields | changes))


def test_a_groups_slots_stay_apart_and_the_next_attempt_takes_what_is_left() -> None:
    for group in range(20):
        unused = set(range(8))
        for slot in range(8):
            unused.remove(slot_assignment.choose(ask(f"g{group}", slot), unused, 8))
        assert not unused
        unused = {1, 5}
        taken = {slot_assignment.choose(ask(f"g{group}", slot, attempt=1), unused, 8) for slot in range(8)}
        assert taken == unused


def test_the_same_request_has_the_same_number_in_every_lane() -> None:
    for group in range(50):
        lanes = [ask(f"g{group}", 2, lane=lane, isolation="episode") for lane in ("train", "production", "eval")]
        numbers = {slot_assignment.choose(one, range(8), 8) for one in (ask(f"g{group}", 2), *lanes)}
        assert len(numbers) == 1


def test_sandboxes_with_a_machine_of_their_own_have_any_number() -> None:
    """As a group's do: a session of a user's is a group of one."""
    drawn = Counter(slot_assignment.choose(ask(f"{n:064x}.1", lane="production"), range(8), 8) for n in range(4000))
    assert set(drawn) == set(range(8)) and max(drawn.values()) < 1.25 * min(drawn.values())
    assert {slot_assignment.choose(ask(f"g{n}"), range(1), 1) for n in range(20)} == {0}, (
        "an imported image has one slot"
    )
