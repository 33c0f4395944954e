"""The curriculum's next action: credit, order of closings, failed slots, the end, and a successor that agrees."""

import random
from collections.abc import Iterator
from typing import Literal

import msgspec
import pytest

from headrace.algorithms.staleness import first_batch_of
from headrace.config import ConfigError, parse
from headrace.ledger.schedule import IssueGroup, RetrySlot, Rules, decide, finished
from headrace.ledger.state import RunState
from headrace.messages.base import Message
from headrace.messages.judging import TurnRewards
from headrace.messages.ledger import GroupDropped, StalenessBound
from headrace.messages.training import StepDone
from tests.support import records as r

RULES = Rules(group_size=2, groups_per_step=2, bound=1, steps=3, attempts=3, on_stale="wait")


class World:
    """Carries out decisions as the curriculum would, and keeps every record so that a successor can read them."""

    def __init__(self, rules: Rules = RULES) -> None:
        self.rules = rules
        self.state = RunState(r.RUN)
        self.streams: dict[str, r.Records] = {"ledger": [], "score": [], "step": []}

    def write(self, stream: str, message: Message) -> int:
        seq = len(self.streams[stream]) + 1
        self.streams[stream].append((seq, message))
        self.state.apply(message, seq)
        return seq

    def carry_out(self) -> None:
        while decisions := decide(self.state, self.rules):
            for decision in decisions:
                match decision:
                    case IssueGroup():
                        for slot in decision.slots:
                            issued = r.issued(
                                decision.group,
                                slot,
                                size=self.rules.group_size,
                                index=decision.index,
                                oldest=decision.min_version,
                            )
                            self.write("ledger", issued)
                    case RetrySlot():
                        again = r.issued(
                            decision.group,
                            decision.slot,
                            decision.attempt,
                            size=self.rules.group_size,
                            oldest=decision.min_version,
                        )
                        self.write("ledger", again)
                    case _:
                        self.write("score", decision)

    def finish(self, group: str, version: int = 0) -> None:
        for slot, place in sorted(self.state.groups[group].slots.items()):
            if not place.scored:
                self.write("score", r.score(group, slot, place.last.number, version=version))

    def step(self) -> StepDone:
        k, per_step = self.state.steps, self.rules.groups_per_step
        batch = [closing.group for _, closing in self.state.closings[k * per_step : (k + 1) * per_step]]
        assert len(batch) == per_step
        done = r.done(k, batch, 0, bound=self.rules.bound)
        self.write("step", done)
        return done

    def successor(self) -> RunState:
        state = RunState(r.RUN)
        for stream in ("ledger", "score", "step"):
            for seq, message in self.streams[stream]:
                state.apply(message, seq)
        return state

    @property
    def closings(self) -> list[str]:
        return [closing.group for _, closing in self.state.closings]


def test_issue_stops_at_the_credit_and_goes_on_when_a_step_retires_its_groups() -> None:
    world = World()
    world.carry_out()
    assert list(world.state.open) == ["g000000", "g000001", "g000002", "g000003"]  # (1 + 1) x 2
    for group in list(world.state.open)[:2]:
        world.finish(group)
    world.carry_out()
    assert len(world.state.groups) == 4, "a closed group keeps its credit until its step is over"
    world.step()
    world.carry_out()
    fresh = [group.first for name, group in world.state.groups.items() if name > "g000003"]
    assert [(issue.group, issue.index, issue.min_version) for issue in fresh] == [("g000004", 4, 1), ("g000005", 5, 1)]


def test_an_issue_that_was_cut_short_is_completed_before_anything_new() -> None:
    world = World()
    world.write("ledger", r.issued("g000000", 0))
    assert decide(world.state, RULES) == [IssueGroup("g000000", 0, 0, 0, (1,))]


def test_groups_of_clients_are_issued_in_their_order_and_none_without_an_offer() -> None:
    world = World()
    assert decide(world.state, RULES, []) == []
    assert decide(world.state, RULES, ["u.b", "u.a"]) == [IssueGroup("u.b", 0, 0, 0, (0, 1))]
    world.write("ledger", r.issued("u.b", 0, size=2))
    (rest,) = decide(world.state, RULES, ["u.a"])
    assert isinstance(rest, IssueGroup) and (rest.group, rest.slots) == ("u.b", (1,))


def test_a_failed_slot_is_issued_again_until_its_attempts_are_used_up() -> None:
    rules = RULES._replace(group_size=3)
    world = World(rules)
    world.carry_out()
    for attempt in range(3):
        assert world.state.groups["g000000"].slots[0].last.number == attempt
        world.write("ledger", r.failed("g000000", 0, attempt))
        world.carry_out()
    for slot in (1, 2):
        world.write("score", r.score("g000000", slot))
    world.carry_out()
    closing = world.state.groups["g000000"].closed
    assert closing is not None
    assert [slot.slot for slot in closing.slots] == [1, 2]
    assert closing.dropped_slots == {"0": "infra"}


def test_a_group_with_one_survivor_is_dropped_and_another_takes_its_number() -> None:
    world = World()
    world.carry_out()
    world.write("score", r.score("g000001", 1))
    for attempt in range(3):
        world.write("ledger", r.failed("g000001", 0, attempt))
        world.carry_out()
    dropped = world.state.groups["g000001"].dropped
    assert dropped is not None
    assert dropped.reason == "infra"
    assert world.state.groups["g000004"].first.index == 3, "dropped groups are not counted"


def test_a_group_with_two_verdicts_on_one_diff_is_quarantined() -> None:
    world = World()
    world.carry_out()
    world.write("score", msgspec.structs.replace(r.score("g000000", 0), again="other"))
    world.carry_out()
    assert world.state.groups["g000000"].open, "it is still running"
    world.finish("g000000")
    world.finish("g000001")
    world.carry_out()
    dropped = world.state.groups["g000000"].dropped
    assert dropped is not None and dropped.reason == "quarantined" and "slot 0" in dropped.detail
    assert world.state.groups["g000001"].dropped is None


def test_the_verdict_of_an_attempt_that_was_given_up_does_not_count() -> None:
    world = World()
    world.carry_out()
    world.write("ledger", r.failed("g000000", 0))
    world.carry_out()
    world.write("score", r.score("g000000", 0, 0))
    world.write("score", r.score("g000000", 1, 0))
    world.carry_out()
    assert world.closings == []
    world.write("score", r.score("g000000", 0, 1))
    world.carry_out()
    closing = world.state.groups["g000000"].closed
    assert closing is not None
    assert [(slot.slot, slot.attempt) for slot in closing.slots] == [(0, 1), (1, 0)]


def test_among_finished_groups_the_oldest_token_goes_first() -> None:
    world = World(RULES._replace(bound=2))
    world.carry_out()
    for group in ("g000000", "g000001"):
        world.finish(group)
    world.carry_out()
    for group in ("g000004", "g000005"):
        world.finish(group, version=0)
    world.carry_out()
    assert world.closings == ["g000000", "g000001", "g000004", "g000005"], "one batch beyond the one in work"
    world.finish("g000003", version=1)
    world.finish("g000002", version=0)
    world.step()
    world.carry_out()
    assert world.closings[4:] == ["g000002", "g000003"]


def test_wait_keeps_the_places_of_a_straggler() -> None:
    world = World()
    world.carry_out()
    for group in ("g000001", "g000002"):
        world.finish(group)
    world.carry_out()
    world.step()
    world.carry_out()
    world.finish("g000004", version=1)
    world.finish("g000005", version=1)
    world.carry_out()
    assert world.closings == ["g000001", "g000002"], "places 2 and 3 belong to g000000 and g000003"
    world.finish("g000003")
    world.finish("g000000")
    world.carry_out()
    assert sorted(world.closings[2:4]) == ["g000000", "g000003"]


def test_drop_gives_up_a_straggler_only_when_its_place_would_fill_the_batch() -> None:
    world = World(RULES._replace(on_stale="drop"))
    world.carry_out()
    for group in ("g000001", "g000002"):
        world.finish(group)
    world.carry_out()
    world.finish("g000003")
    world.carry_out()
    world.step()
    world.carry_out()
    assert world.state.groups["g000000"].dropped is None, "nobody else wants the place yet"
    world.finish("g000004", version=1)
    world.carry_out()
    dropped = world.state.groups["g000000"].dropped
    assert dropped is not None
    assert dropped.reason == "stale"
    assert world.closings == ["g000001", "g000002", "g000003", "g000004"]


@pytest.mark.parametrize("on_stale", ["wait", "drop"])
def test_a_token_older_than_allowed_is_never_closed(on_stale: Literal["wait", "drop"]) -> None:
    world = World(RULES._replace(bound=0, on_stale=on_stale))
    world.carry_out()
    for group in ("g000000", "g000001"):
        world.finish(group)
    world.carry_out()
    world.step()
    world.carry_out()
    world.finish("g000002", version=0)  # an engine that ignored min_version
    world.carry_out()
    dropped = world.state.groups["g000002"].dropped
    assert dropped is not None
    assert dropped.reason == "stale"


def test_a_smaller_bound_drops_what_no_longer_fits_instead_of_waiting_for_ever() -> None:
    world = World(RULES._replace(bound=2))
    world.carry_out()
    world.rules = RULES._replace(bound=0)
    for group in list(world.state.open)[:2]:
        world.finish(group)
    world.carry_out()
    assert len(world.closings) == 2
    assert [g.dropped.reason for g in world.state.groups.values() if g.dropped is not None] == ["stale"] * 4
    world.step()
    world.carry_out()
    assert [(group.name, group.first.min_version) for group in world.state.open.values()] == [
        ("g000006", 1),
        ("g000007", 1),
    ]


@pytest.mark.parametrize("on_stale", ["wait", "drop"])
def test_the_bound_may_change_at_any_moment(on_stale: Literal["wait", "drop"]) -> None:
    for seed in range(8):
        random_ = random.Random(seed)
        world = World(Rules(2, 3, 1, 12, 3, on_stale))
        world.write("score", StalenessBound(run=r.RUN, bound=1, first_batch=0))
        world.carry_out()
        for _ in events(world, random_, failures=0.1):
            state = world.state
            if random_.random() < 0.06 and state.bounds is not None:
                wanted = random_.randint(0, 4)
                drop = on_stale == "drop"
                first = first_batch_of(state.bounds, wanted, len(state.closings), state.index, 3, drop=drop)
                world.write("score", StalenessBound(run=r.RUN, bound=wanted, first_batch=first))
            world.carry_out()
        state = world.state
        assert state.problems == []
        assert state.bounds is not None and len(state.bound_records) > 2
        reasons = [group.dropped.reason for group in state.groups.values() if group.dropped is not None]
        assert on_stale == "drop" or "stale" not in reasons, "waiting keeps a place for everyone"
        assert {place // 3 - c.oldest_version - state.bounds.at(place // 3) <= 0
                for place, (_, c) in enumerate(state.closings)} == {True}  # fmt: skip
        assert world.successor().bounds == state.bounds


def test_the_end_cancels_what_is_open() -> None:
    world = World(RULES._replace(steps=1))
    world.carry_out()
    assert len(world.state.groups) == 2, "no more groups than the run can train on"
    world.rules = RULES._replace(steps=2)
    world.carry_out()
    for group in ("g000000", "g000001"):
        world.finish(group)
    world.carry_out()
    world.step()
    world.rules = RULES._replace(steps=1)
    world.carry_out()
    assert {g.name: g.dropped.reason for g in world.state.groups.values() if g.dropped is not None} == {
        "g000002": "cancelled",
        "g000003": "cancelled",
    }
    assert finished(world.state, world.rules)


def events(world: World, random_: random.Random, failures: float) -> Iterator[None]:
    """One thing that may happen: a slot is scored or fails, or the trainer takes a step."""
    per_step = world.rules.groups_per_step
    while not finished(world.state, world.rules):
        state = world.state
        steps = state.steps
        running = [(g, s) for g, group in state.open.items() for s, slot in group.slots.items() if not slot.scored]
        can_step = len(state.closings) >= (steps + 1) * per_step
        assert running or can_step, "nothing runs and the trainer has no batch: the run is stuck"
        if can_step and (not running or random_.random() < 0.3):
            world.step()
        else:
            group, slot = random_.choice(running) if random_.random() < 0.5 else running[-1]
            attempt = state.groups[group].slots[slot].last
            if random_.random() < failures:
                world.write("ledger", r.failed(group, slot, attempt.number))
            else:
                version = random_.randint(attempt.issued.min_version, steps)
                world.write("score", r.score(group, slot, attempt.number, version=version))
        yield


@pytest.mark.parametrize("bound", [0, 1, 2, 4])
@pytest.mark.parametrize("on_stale", ["wait", "drop"])
def test_any_order_of_events_ends_and_keeps_the_bound(bound: int, on_stale: Literal["wait", "drop"]) -> None:
    for seed in range(6):
        random_ = random.Random(seed)
        world = World(Rules(2, 3, bound, 8, 3, on_stale))
        world.carry_out()
        for _ in events(world, random_, failures=0.15):
            if random_.random() < 0.1:  # killed: a successor rebuilds the state and wants the very same things
                rebuilt = world.successor()
                assert decide(rebuilt, world.rules) == decide(world.state, world.rules)
                assert rebuilt.problems == []
                assert (rebuilt.issued, rebuilt.dropped, rebuilt.retired) == (
                    world.state.issued,
                    world.state.dropped,
                    world.state.retired,
                )
                world.state = rebuilt
            world.carry_out()
            live = world.state.issued - world.state.retired
            assert live <= (bound + 1) * 3
        assert world.state.problems == []
        assert world.state.steps == 8
        reasons = [group.dropped.reason for group in world.state.groups.values() if group.dropped is not None]
        assert on_stale == "drop" or "stale" not in reasons, "waiting keeps a place for everyone"
        for place, (_, closing) in enumerate(world.state.closings):
            assert place // 3 - closing.oldest_version <= bound
        assert len(world.closings) == len(set(world.closings)) == 24


def test_groups_with_equal_rewards_are_replaced_up_to_the_limit() -> None:
    """One a batch: the first is dropped and replaced, the next takes its place, and the batch after it has its own."""
    text = "[curriculum]\ngroup_size = 2\ngroups_per_step = 2\nsteps = 3\nreplace_flat = 1\n"
    world = World(Rules.of(parse(text).curriculum))
    world.carry_out()
    for group in ("g000000", "g000001"):
        world.finish(group)
        world.carry_out()
    drops = [message for _, message in world.streams["score"] if isinstance(message, GroupDropped)]
    assert [(drop.group, drop.reason, drop.detail) for drop in drops] == [("g000000", "flat", "all 2 rewards are 1")]
    assert [closing.group for _, closing in world.state.closings] == ["g000001"]
    assert world.state.issued == 5 and world.state.index == 4, "another group takes its place"
    world.write("score", r.score("g000002", 0))
    world.write("score", r.score("g000002", 1, passed=False))
    world.carry_out()
    assert [closing.group for _, closing in world.state.closings] == ["g000001", "g000002"], "an advantage is kept"
    for slot, turns in ((0, TurnRewards(turns=(1.0, 0.0))), (1, TurnRewards(turns=(0.0, 1.0)))):
        world.write("score", msgspec.structs.replace(r.score("g000003", slot), by_turn=turns))
    world.finish("g000004")
    world.carry_out()
    assert world.state.closings[-1][1].group == "g000003", "turns differ although the sums are equal"
    assert world.state.groups["g000004"].dropped is not None, "the second batch has begun"
    assert world.successor().flat == world.state.flat == 2
    with pytest.raises(ConfigError, match=r"curriculum\.replace_flat: expected 0 with algorithm\.baseline = class"):
        parse("[curriculum]\nreplace_flat = 1\n[algorithm]\nbaseline = 'class'\n")
