"""A slot that is requested twice: when, which answer counts, that the ledger balances, and the effect on lengths."""

import random

import msgspec
import pytest

from headrace.ledger.schedule import RetrySlot, Rules, decide
from headrace.ledger.speculation import Means, Speculation
from headrace.messages.ledger import GroupClosed
from headrace.replay.audit import Seen, examine
from tests.ledger.test_schedule import World, events
from tests.support import records as r

RULES = Rules(group_size=3, groups_per_step=1, bound=0, steps=2, attempts=3, on_stale="wait", speculate=1)


def waiting_for_the_last(rules: Rules = RULES) -> World:
    """A group of which one slot is missing."""
    world = World(rules)
    world.carry_out()
    for slot in (0, 1):
        world.write("score", r.score("g000000", slot, trajectory_seq=slot + 1))
    return world


def test_only_the_last_slots_are_asked_for_again_and_only_once() -> None:
    world = World(RULES)
    world.carry_out()
    world.write("score", r.score("g000000", 0))
    assert decide(world.state, RULES) == []
    world.write("score", r.score("g000000", 1))
    assert decide(world.state, RULES) == [RetrySlot("g000000", 2, 1, 0, "speculative", speculative=True)]
    world.write("ledger", r.issued("g000000", 2, 1, size=3, speculative=True))
    assert decide(world.state, RULES) == []
    assert decide(waiting_for_the_last().state, RULES._replace(speculate=0)) == [], "off unless asked for"


def test_the_first_verdict_counts_and_the_outrun_attempt_changes_nothing() -> None:
    world = waiting_for_the_last()
    world.carry_out()
    world.write("score", r.score("g000000", 2, 1, trajectory_seq=3))
    (closing,) = decide(world.state, RULES)
    assert isinstance(closing, GroupClosed)
    world.write("score", closing)
    world.write("score", r.score("g000000", 2, 0, trajectory_seq=4))
    slot = world.state.groups["g000000"].slots[2]
    assert (slot.kept.number, slot.last.number, slot.scored) == (1, 1, True)
    assert [named.attempt for named in world.state.closings[0][1].slots] == [0, 0, 1]
    assert world.successor().groups["g000000"].slots[2].kept.number == 1
    assert world.state.problems == []


def test_one_that_fails_leaves_the_other_and_both_are_issued_again() -> None:
    world = waiting_for_the_last()
    world.write("ledger", r.issued("g000000", 2, 1, size=3, speculative=True))
    world.write("ledger", r.failed("g000000", 2, 1))
    slot = world.state.groups["g000000"].slots[2]
    assert not slot.failed and decide(world.state, RULES) == []
    world.write("ledger", r.failed("g000000", 2, 0))
    assert slot.failed
    assert decide(world.state, RULES) == [RetrySlot("g000000", 2, 2, 0, "sandbox_lost")]
    world.write("ledger", r.issued("g000000", 2, 2, size=3))
    assert [attempt.number for attempt in slot.live] == [2], "what was given up does not count any more"


def test_the_books_balance_and_the_bias_is_told() -> None:
    world = waiting_for_the_last()
    world.write("ledger", r.issued("g000000", 2, 1, size=3, speculative=True))
    short = msgspec.structs.replace(r.score("g000000", 2, 1, trajectory_seq=3, passed=False), sampled_tokens=10)
    long = msgspec.structs.replace(r.score("g000000", 2, 0, trajectory_seq=4), sampled_tokens=30)
    world.write("score", short)
    made = ((1, 0, 0, 1.0), (2, 1, 0, 1.0), (3, 2, 1, 2.0), (4, 2, 0, 8.0))
    seen = {seq: Seen("train", "g000000", slot, attempt, (0,), wall) for seq, slot, attempt, wall in made}

    def attempts() -> tuple[int, int, dict[str, int], int]:
        report, wrong = examine(r.RUN, [*world.streams["ledger"], *world.streams["score"]], [], seen)
        assert wrong == []
        return report.attempts.started, report.attempts.kept, report.attempts.lost, report.attempts.running

    assert attempts() == (4, 0, {"outrun": 1}, 3)
    (closing,) = decide(world.state, RULES)
    assert isinstance(closing, GroupClosed)
    world.write("score", closing)
    assert attempts() == (4, 3, {"outrun": 1}, 0)
    world.write("score", long)
    assert attempts() == (4, 3, {"outrun": 1}, 0)
    report, _ = examine(r.RUN, [*world.streams["ledger"], *world.streams["score"]], [], seen)
    assert report.speculation == Speculation(
        slots=1,
        second_kept=1,
        pairs=1,
        kept=Means(sampled_tokens=10, wall_s=2.0, reward=0.0),
        first=Means(sampled_tokens=30, wall_s=8.0, reward=1.0),
    )


@pytest.mark.parametrize("bound", [0, 2])
def test_any_order_of_events_ends(bound: int) -> None:
    for seed in range(6):
        random_ = random.Random(seed)
        world = World(Rules(3, 2, bound, 5, 3, "wait", speculate=2))
        world.carry_out()
        for _ in events(world, random_, failures=0.15):
            assert decide(world.successor(), world.rules) == decide(world.state, world.rules)
            world.carry_out()
        assert (world.state.problems, world.state.steps) == ([], 5)
        assert any(len(slot.live) > 1 for group in world.state.groups.values() for slot in group.slots.values())
        for place, (_, closing) in enumerate(world.state.closings):
            assert place // 2 - closing.oldest_version <= bound
