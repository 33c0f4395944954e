"""The state of a run, folded from its streams: groups, slots, attempts and steps.

The records are SlotIssued, SlotFailed, Score, GroupClosed, GroupDropped, StepDone and StepFailed. The streams can be
folded one after the other (ledger, scores and closings, steps) or record by record as they arrive: the state is the
same, because every decision that matters is a record itself. A contradiction is collected as a problem and not raised,
because the audit reports all of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from headrace.algorithms.staleness import Bounds
from headrace.messages.base import Message
from headrace.messages.judging import Score
from headrace.messages.ledger import GroupClosed, GroupDropped, SlotIssued, StalenessBound
from headrace.messages.rollout import LEFT_OUT, SlotFailed
from headrace.messages.training import RecordsPurged, StepDone, StepFailed, StepManifest

Outcome = StepDone | StepFailed


@dataclass(slots=True)
class Attempt:
    """One attempt at a slot, from its SlotIssued on."""

    issued: SlotIssued
    seq: int
    failed: str = ""
    """The reason of its failure (SlotFailed, or its dead letter); empty while it has not failed."""
    score: Score | None = None
    score_seq: int = 0

    @property
    def number(self) -> int:
        """Ordinal of the attempt at its slot; 0 for the first."""
        return self.issued.attempt

    def final(self, attempts: int) -> bool:
        """Whether its failure ends the slot: it can have no verdict, or it was the last of `attempts`."""
        return bool(self.failed) and (self.failed in LEFT_OUT or self.number + 1 >= attempts)


@dataclass(slots=True)
class Slot:
    """A place in a group. Its newest attempt counts."""

    attempts: list[Attempt] = field(default_factory=list)

    @property
    def last(self) -> Attempt:
        """The newest attempt."""
        return self.attempts[-1]

    @property
    def scored(self) -> bool:
        """Whether the attempt that counts has its verdict. A score outranks a failure of the same attempt."""
        return self.last.score is not None

    @property
    def failed(self) -> bool:
        """Whether the attempt that counts has ended without a verdict."""
        return not self.scored and bool(self.last.failed)


@dataclass(slots=True)
class Group:
    """A group from its first SlotIssued to its retirement."""

    name: str
    first: SlotIssued
    slots: dict[int, Slot] = field(default_factory=dict)
    closings: list[tuple[int, GroupClosed]] = field(default_factory=list)
    """(sequence, record); more than one is a fault that the audit reports."""
    dropped: GroupDropped | None = None
    steps: list[int] = field(default_factory=list)
    """Steps whose outcome names the group; more than one is a fault that the audit reports."""

    @property
    def closed(self) -> GroupClosed | None:
        """The record that closed the group; None while it is not closed."""
        return self.closings[0][1] if self.closings else None

    @property
    def open(self) -> bool:
        """Whether the group is neither closed nor dropped."""
        return not self.closings and self.dropped is None

    @property
    def retired(self) -> bool:
        """Whether the group's credit is free again: the step of its batch is over, or the group was dropped."""
        return self.dropped is not None or bool(self.steps)

    @property
    def missing(self) -> str:
        """The scores that an open group waits for, in words."""
        slots = [str(number) for number, slot in self.slots.items() if slot.last.score is None]
        return f"scores of group {self.name}, slots {', '.join(slots)}"

    def attempts(self) -> Iterator[tuple[int, Attempt]]:
        """Every (slot, attempt)."""
        for number, slot in self.slots.items():
            for attempt in slot.attempts:
                yield number, attempt


class RunState:
    """All lanes of one run. `apply` is idempotent: applying a record again changes nothing."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.groups: dict[str, Group] = {}
        self.open: dict[str, Group] = {}
        """Groups of the train lane that are neither closed nor dropped, in the order of issue."""
        self.closings: list[tuple[int, GroupClosed]] = []
        """(sequence, record) in the order that decides batches."""
        self.manifests: dict[int, StepManifest] = {}
        """By stream sequence."""
        self.outcomes: dict[int, Outcome] = {}
        """Step to its outcome; if several incarnations of the step exist, the outcome of the highest one."""
        self.scores: dict[int, Score] = {}
        """By stream sequence."""
        self.close_seq = 0
        """Sequence of the last record on the run's closing subjects, fences included."""
        self.bounds: Bounds | None = None
        """The staleness bound of every batch; None before the run's first StalenessBound."""
        self.bound_records: list[tuple[StalenessBound, int]] = []
        """(record, number of closings before it)."""
        self.purged: RecordsPurged | None = None
        """The newest record of what the trainer has deleted."""
        self.issued = 0
        self.flat = 0
        """Groups that were dropped because their rewards were equal."""
        self.dropped = 0
        self.retired = 0
        """Retired groups of the train lane; `algorithms.staleness.credit` compares them with `issued`."""
        self.problems: list[str] = []

    @property
    def index(self) -> int:
        """Index of the next group of the train lane, without dropped groups."""
        return self.issued - self.dropped

    @property
    def steps(self) -> int:
        """Finished steps; also the newest version of the trainer."""
        return max(self.outcomes, default=-1) + 1

    def problem(self, text: str) -> None:
        """Record a contradiction for the audit."""
        self.problems.append(text)

    def apply(self, message: Message, seq: int) -> bool:
        """Apply one record. True when it changed the state."""
        match message:
            case SlotIssued():
                return self._issued(message, seq)
            case SlotFailed():
                return self._failed(message)
            case Score():
                return self._scored(message, seq)
            case GroupClosed():
                return self._closed(message, seq)
            case GroupDropped():
                return self._dropped(message, seq)
            case StalenessBound():
                return self._bounded(message, seq)
            case StepManifest():
                return self.manifests.setdefault(seq, message) is message
            case StepDone() | StepFailed():
                return self._stepped(message)
            case RecordsPurged():
                self.purged = message
        return False

    def fail(self, group: str, slot: int, attempt: int, reason: str) -> bool:
        """Record that an attempt ended without a verdict. True when this changed the state."""
        entry = self.attempt(group, slot, attempt)
        if entry is None or entry.failed:
            return False
        entry.failed = reason
        return True

    def left_out(self, group: Group) -> dict[int, str]:
        """The slots of a group that its step did not train on: sequence of the trajectory to the reason. Empty where
        the group has no step, or a failed one."""
        outcome = self.outcomes[group.steps[0]] if group.steps else None
        return {each.trajectory_seq: each.reason for each in outcome.left_out} if isinstance(outcome, StepDone) else {}

    def attempt(self, group: str, slot: int, attempt: int) -> Attempt | None:
        """An issued attempt; None when the ledger has none with these numbers."""
        slots = self.groups[group].slots if group in self.groups else {}
        attempts = slots[slot].attempts if slot in slots else []
        return next((entry for entry in attempts if entry.number == attempt), None)

    def _issued(self, message: SlotIssued, seq: int) -> bool:
        group = self.groups.get(message.group)
        if group is None:
            group = self.groups[message.group] = Group(message.group, message)
            if message.lane == "train":
                self.issued += 1
                self.open[group.name] = group
        slot = group.slots.setdefault(message.slot, Slot())
        earlier = next((entry for entry in slot.attempts if entry.number == message.attempt), None)
        if earlier is not None:
            if earlier.seq != seq:
                self.problem(f"{message.group} slot {message.slot}: attempt {message.attempt} was issued twice")
            return False
        if message.attempt != len(slot.attempts):
            self.problem(f"{message.group} slot {message.slot}: attempt {message.attempt} was issued out of order")
        if not group.open and message.lane == "train":
            self.problem(f"{message.group} slot {message.slot}: issued after the group's end")
        slot.attempts.append(Attempt(message, seq))
        return True

    def _failed(self, message: SlotFailed) -> bool:
        if self.attempt(message.group, message.slot, message.attempt) is None:
            self.problem(f"{message.group} slot {message.slot}: attempt {message.attempt} failed but was never issued")
            return False
        return self.fail(message.group, message.slot, message.attempt, message.reason)

    def _scored(self, message: Score, seq: int) -> bool:
        if seq in self.scores:
            return False
        self.scores[seq] = message
        entry = self.attempt(message.group, message.slot, message.attempt)
        if entry is None:
            self.problem(f"{message.group} slot {message.slot}: attempt {message.attempt} scored but never issued")
            return False
        if entry.score is not None:
            return False
        entry.score, entry.score_seq = message, seq
        return True

    def _closed(self, message: GroupClosed, seq: int) -> bool:
        if seq <= self.close_seq:
            return False
        self.close_seq = seq
        self.closings.append((seq, message))
        group = self.groups.get(message.group)
        if group is None:
            self.problem(f"{message.group}: closed but never issued")
            return True
        if group.closings:
            self.problem(f"{message.group}: closed twice")
        if group.dropped is not None:
            self.problem(f"{message.group}: closed after it was dropped")
        group.closings.append((seq, message))
        self.open.pop(message.group, None)
        return True

    def _dropped(self, message: GroupDropped, seq: int) -> bool:
        if seq <= self.close_seq:
            return False
        self.close_seq = seq
        group = self.groups.get(message.group)
        if group is None:
            self.problem(f"{message.group}: dropped but never issued")
            return True
        if group.closings or group.dropped is not None:
            self.problem(f"{message.group}: dropped after its end")
            return True
        group.dropped = message
        self.dropped += 1
        self.flat += message.reason == "flat"
        self.retired += 1
        self.open.pop(message.group, None)
        return True

    def _bounded(self, message: StalenessBound, seq: int) -> bool:
        if seq <= self.close_seq:
            return False
        self.close_seq = seq
        self.bound_records.append((message, len(self.closings)))
        try:
            bounds, first, bound = self.bounds, message.first_batch, message.bound
            self.bounds = bounds.changed(first, bound) if bounds else Bounds.constant(bound)
        except ValueError as error:
            self.problem(f"staleness bound at {seq}: {error}")
        return True

    def _stepped(self, message: Outcome) -> bool:
        earlier = self.outcomes.get(message.step)
        if earlier is not None and earlier.incarnation >= message.incarnation:
            if earlier != message:
                self.problem(f"step {message.step}: incarnation {message.incarnation} has two outcomes")
            return False
        self.outcomes[message.step] = message
        for name in earlier.groups if earlier is not None else ():
            if name in self.groups and message.step in self.groups[name].steps:
                self.groups[name].steps.remove(message.step)
                self.retired -= not self.groups[name].retired
        for name in message.groups:
            group = self.groups.get(name)
            if group is None:
                self.problem(f"step {message.step}: {name} was never issued")
                continue
            self.retired += not group.retired
            group.steps.append(message.step)
        return True
