"""The audit: an honest run balances at every moment, and each kind of dishonesty does not."""

from collections.abc import Callable
from secrets import token_hex

import msgspec
import pytest

from headrace.ledger.drops import Bucket, DropsByLength
from headrace.messages.base import Message
from headrace.messages.judging import Score
from headrace.messages.ledger import GroupClosed, SlotIssued, StalenessBound
from headrace.messages.rollout import Span, versions
from headrace.messages.subjects import CLOSE, LEDGER, SCORE, STEP, TRAJ
from headrace.messages.training import LeftOut, RecordsPurged, StepDone, StepManifest
from headrace.replay.audit import Attempts, AuditReport, LaneReport, Seen, audit, examine
from tests.conftest import Connect
from tests.support import records as r

P, SIZE = 2, 2


class Streams:
    """A run of whole steps, written as its actors would."""

    def __init__(self) -> None:
        self.ledger: r.Records = []
        self.scores: r.Records = []
        self.steps: r.Records = []
        self.seen: dict[int, Seen] = {}
        self.dead: list[Message] = []

    def put(self, stream: r.Records, message: Message) -> int:
        stream.append((len(stream) + 1, message))
        return len(stream)

    def group(self, name: str, version: int = 0, failing: bool = False) -> int:
        """Issue, score and close a group; the closing's sequence. failing: its first slot needs two attempts."""
        for slot in range(SIZE):
            self.put(self.ledger, r.issued(name, slot))
        if failing:
            self.put(self.ledger, r.failed(name, 0))
            self.put(self.ledger, r.issued(name, 0, 1))
        named = []
        for slot in range(SIZE):
            attempt = int(failing and slot == 0)
            seq = len(self.seen) + 1
            self.seen[seq] = Seen("train", name, slot, attempt, (version, version))
            score = r.score(name, slot, attempt, trajectory_seq=seq, version=version)
            named.append((slot, attempt, seq, self.put(self.scores, score)))
        return self.put(self.scores, r.closed(name, *named, version=version))

    def step(self, number: int, incarnation: int = 0) -> None:
        """Take the step of the next batch."""
        batch = [(seq, c) for seq, c in self.scores if isinstance(c, GroupClosed)][number * P : (number + 1) * P]
        seq = self.put(self.steps, r.manifest(number, batch, incarnation))
        names = [closed.group for _, closed in batch]
        slots = sum(len(closed.slots) for _, closed in batch)
        self.put(self.steps, r.done(number, names, slots, manifest_seq=seq, incarnation=incarnation))

    def examine(self) -> tuple[AuditReport, list[str]]:
        return examine(r.RUN, [*self.ledger, *self.scores, *self.steps], self.dead, self.seen)


def run() -> Streams:
    """Two steps, one group in flight, one open, one dropped."""
    streams = Streams()
    streams.group("g000000")
    streams.group("g000001", failing=True)
    streams.step(0)
    streams.group("g000002", version=0)
    streams.group("g000003", version=1)
    streams.step(1)
    streams.group("g000004", version=1)
    streams.put(streams.ledger, r.issued("g000005", 0))
    streams.put(streams.ledger, r.issued("g000005", 1))
    streams.put(streams.ledger, r.issued("g000006", 0))
    streams.put(streams.ledger, r.issued("g000006", 1))
    streams.put(streams.ledger, r.failed("g000006", 1, reason="engine_error"))
    streams.put(streams.scores, r.dropped("g000006"))
    return streams


def test_an_honest_run_balances() -> None:
    report, wrong = run().examine()
    assert wrong == []
    assert report == AuditReport(
        balanced=True,
        issued=14,
        trained=8,
        dropped={"infra": 2},
        in_flight=4,
        attempts=Attempts(started=15, kept=10, lost={"engine_error": 1, "infra": 1, "sandbox_lost": 1}, running=2),
        lanes={"train": LaneReport(issued=14, scored=10, dropped=2, in_flight=2)},
        staleness_max=1,
        staleness_bound=1,
        duplicates=0,
        dropped_by_length=DropsByLength(
            tokens=(Bucket(up_to=3, slots=10, dropped={}),), wall_s=(), unknown={"infra": 2}
        ),
    )


def test_the_line_has_the_keys_that_are_promised() -> None:
    line = msgspec.to_builtins(run().examine()[0])
    assert list(line) == [
        "balanced",
        "issued",
        "trained",
        "dropped",
        "in_flight",
        "attempts",
        "lanes",
        "staleness_max",
        "staleness_bound",
        "duplicates",
        "skipped_count",
        "skipped",
        "forged",
        "dropped_by_length",
        "reused",
        "feedback",
        "branches",
    ]
    assert list(line["attempts"]) == ["started", "kept", "lost", "running"]
    assert list(line["lanes"]["train"]) == ["issued", "scored", "dropped", "in_flight"]


def test_it_balances_at_every_moment() -> None:
    """Cut anywhere, in the order in which streams are read: effects never without their causes."""
    whole = run()
    for steps in range(len(whole.steps) + 1):
        for scores in range(len(whole.scores) + 1):
            cut = Streams()
            cut.ledger, cut.seen = whole.ledger, whole.seen
            cut.scores, cut.steps = whole.scores[:scores], whole.steps[:steps]
            named = {group.close_seq for _, m in cut.steps if isinstance(m, StepManifest) for group in m.groups}
            if not named or max(named) <= scores:
                report, wrong = cut.examine()
                assert wrong == []
                assert report.issued == 14


def test_a_failed_step_drops_its_slots_and_a_new_incarnation_counts_once() -> None:
    streams = run()
    failed = r.step_failed(1, ["g000002", "g000003"], 4, manifest_seq=3)
    streams.steps[3] = (4, failed)
    report, wrong = streams.examine()
    assert wrong == []
    assert (report.trained, report.dropped, report.staleness_max) == (4, {"infra": 2, "step_failed": 4}, 0)
    again = run()
    again.step(1, incarnation=1)
    assert again.examine()[0] == run().examine()[0]


def leave_out(streams: Streams, *sequences: int, trained: int) -> None:
    """The outcome of step 1 leaves some trajectories out."""
    left_out = tuple(LeftOut(trajectory_seq=seq, reason="bad_record", detail="d") for seq in sequences)
    replace(streams.steps, 3, trained_slots=trained, left_out=left_out)


def test_a_slot_that_its_step_left_out_is_dropped_for_that_reason() -> None:
    streams = run()
    streams.seen[6] = Seen("train", "g000002", 1, 0, (-1,))  # what is not trained may name any version
    leave_out(streams, 5, 6, trained=2)
    report, wrong = streams.examine()
    assert wrong == []
    assert (report.issued, report.trained, report.dropped, report.in_flight) == (
        14,
        6,
        {"bad_record": 2, "infra": 2},
        4,
    )
    assert report.lanes["train"] == LaneReport(issued=14, scored=8, dropped=4, in_flight=2)
    assert report.attempts == run().examine()[0].attempts
    assert report.dropped_by_length.tokens == (Bucket(up_to=3, slots=10, dropped={"bad_record": 2}),)


def left_out_and_counted(streams: Streams) -> None:
    """Its outcome trains on a slot that it leaves out."""
    leave_out(streams, 5, trained=4)


def left_out_of_another_batch(streams: Streams) -> None:
    leave_out(streams, 1, trained=3)


def test_a_dead_letter_names_why_an_attempt_was_lost() -> None:
    streams = Streams()
    streams.put(streams.ledger, r.issued("g000000"))
    streams.put(streams.ledger, r.issued("g000000", attempt=1))
    assert streams.examine()[0].attempts.lost == {"superseded": 1}
    letter = r.letter(f"{r.RUN}.g000000-0-0")
    streams.dead.append(letter)
    assert streams.examine()[0].attempts.lost == {"dead_letter": 1}


def test_lanes_are_told_apart() -> None:
    streams = run()
    for slot in range(3):
        streams.put(streams.ledger, r.issued("eheldout-000000", slot, lane="eval"))
    streams.put(streams.ledger, r.failed("eheldout-000000", 1, lane="eval"))
    streams.put(streams.scores, r.score("eheldout-000000", 0, lane="eval"))
    for user in ("u1.s1", "u1.s2"):
        streams.put(streams.ledger, r.issued(user, lane="production", size=1))
    streams.seen[99] = Seen("production", "u1.s1", 0, 0, ())
    report, wrong = streams.examine()
    assert wrong == []
    assert report.issued == 14
    assert report.lanes["eval"] == LaneReport(issued=3, scored=1, dropped=1, in_flight=1)
    assert report.lanes["production"] == LaneReport(issued=2, scored=1, dropped=0, in_flight=1)


def replace(stream: r.Records, at: int, **fields: object) -> None:
    seq, message = stream[at]
    stream[at] = (seq, msgspec.structs.replace(message, **fields))


def closing(streams: Streams, group: str) -> int:
    return next(at for at, (_, m) in enumerate(streams.scores) if isinstance(m, GroupClosed) and m.group == group)


def lose_a_slot(streams: Streams) -> None:
    """The closing of a trained group lacks one of its slots, and all later records agree with it."""
    at = closing(streams, "g000000")
    closed = streams.scores[at][1]
    assert isinstance(closed, GroupClosed)
    replace(streams.scores, at, slots=closed.slots[:1])
    manifest = streams.steps[0][1]
    assert isinstance(manifest, StepManifest)
    first = msgspec.structs.replace(manifest.groups[0], slots=manifest.groups[0].slots[:1])
    replace(streams.steps, 0, groups=(first, manifest.groups[1]))
    replace(streams.steps, 1, trained_slots=3)


def train_twice(streams: Streams) -> None:
    """A superseded trainer takes a batch again."""
    manifest = streams.steps[0][1]
    done = streams.steps[1][1]
    assert isinstance(manifest, StepManifest)
    assert isinstance(done, StepDone)
    seq = streams.put(streams.steps, msgspec.structs.replace(manifest, step=2, version=2))
    streams.put(streams.steps, msgspec.structs.replace(done, step=2, version=3, manifest_seq=seq))


def close_twice(streams: Streams) -> None:
    streams.put(streams.scores, streams.scores[closing(streams, "g000004")][1])


def bound_that_came_too_late(streams: Streams) -> None:
    """A larger bound is written behind the closings that need it."""
    streams.put(streams.scores, StalenessBound(run=r.RUN, bound=1, first_batch=0))


def bound_of_the_trainers_own(streams: Streams) -> None:
    """The trainer claims a bound that the closings never gave it."""
    streams.scores.insert(0, (1, StalenessBound(run=r.RUN, bound=0, first_batch=0)))


def stale_token(streams: Streams) -> None:
    """The closing says version 1, one token says otherwise."""
    streams.group("g000007", version=1)
    streams.step(2)
    made = streams.seen[max(streams.seen)]
    streams.seen[max(streams.seen)] = msgspec.structs.replace(made, versions=(1, 0, 1))


def token_of_no_version(streams: Streams) -> None:
    streams.seen[1] = msgspec.structs.replace(streams.seen[1], versions=(0, -1))


def swapped_places(streams: Streams) -> None:
    """The trainer takes groups 0 and 2 first: not the order of the closings."""
    replace(streams.steps, 1, groups=("g000000", "g000002"))


def forged_manifest(streams: Streams) -> None:
    manifest = streams.steps[0][1]
    assert isinstance(manifest, StepManifest)
    replace(streams.steps, 0, groups=manifest.groups[::-1])


def missing_step(streams: Streams) -> None:
    del streams.steps[:2]


def miscounted_step(streams: Streams) -> None:
    replace(streams.steps, 1, trained_slots=3)


def never_issued(streams: Streams) -> None:
    streams.ledger[:] = [(s, m) for s, m in streams.ledger if getattr(m, "group", "") != "g000002"]


def issued_twice(streams: Streams) -> None:
    streams.put(streams.ledger, streams.ledger[0][1])


def dropped_after_training(streams: Streams) -> None:
    streams.put(streams.scores, r.dropped("g000000", "stale"))


def forged_reward(streams: Streams) -> None:
    at = closing(streams, "g000003")
    closed = streams.scores[at][1]
    assert isinstance(closed, GroupClosed)
    changed = msgspec.structs.replace(closed.slots[0], reward=5.0)
    replace(streams.scores, at, slots=(changed, *closed.slots[1:]))


def score_of_another(streams: Streams) -> None:
    at = closing(streams, "g000003") - 1
    replace(streams.scores, at, group="g000004")


def trajectory_of_another(streams: Streams) -> None:
    streams.seen[2] = msgspec.structs.replace(streams.seen[2], group="g000001")


def purge(streams: Streams, trajectory_seq: int, score_seq: int) -> None:
    """Delete records as the trainer does, which says so first."""
    streams.put(streams.steps, RecordsPurged(run=r.RUN, step=1, trajectory_seq=trajectory_seq, score_seq=score_seq))
    streams.seen = {seq: made for seq, made in streams.seen.items() if seq >= trajectory_seq}
    streams.scores[:] = [(seq, m) for seq, m in streams.scores if seq >= score_seq or not isinstance(m, Score)]


def test_records_of_steps_that_are_not_kept_may_be_missing() -> None:
    streams = run()
    before = streams.examine()[0]
    purge(streams, 5, 7)
    report, wrong = streams.examine()
    assert wrong == []
    assert (report.trained, report.in_flight, report.staleness_max) == (8, before.in_flight, before.staleness_max)


def test_records_of_a_user_may_be_missing() -> None:
    streams = Streams()
    streams.group("aaaa.1")
    streams.group("bbbb.1")
    streams.step(0)
    for seq in [seq for seq, made in streams.seen.items() if made.group == "aaaa.1"]:
        del streams.seen[seq]
    streams.scores[:] = [(seq, m) for seq, m in streams.scores if not isinstance(m, Score) or m.group != "aaaa.1"]
    records = [*streams.ledger, *streams.scores, *streams.steps]
    assert examine(r.RUN, records, [], streams.seen, frozenset({"aaaa"}))[1] == []
    faults = examine(r.RUN, records, [], streams.seen, frozenset({"bbbb"}))[1]
    assert len(faults) == 4 and all(fault.startswith("aaaa.1 slot") for fault in faults)


def lost_trajectory(streams: Streams) -> None:
    """A damaged block of the store: a record in the middle is gone."""
    del streams.seen[3]


def lost_first_trajectory(streams: Streams) -> None:
    del streams.seen[1]


def lost_first_score(streams: Streams) -> None:
    """The stream begins later, and nothing says that its first record was deleted."""
    del streams.scores[0]


def lost_waiting_trajectory(streams: Streams) -> None:
    """Of a group that waits for its step."""
    del streams.seen[max(streams.seen)]


def deleted_beyond_the_record(streams: Streams) -> None:
    """More is gone than the trainer said."""
    purge(streams, 3, 3)
    del streams.seen[3]


@pytest.mark.parametrize(
    "breaks",
    [
        lost_trajectory,
        lost_first_trajectory,
        lost_first_score,
        lost_waiting_trajectory,
        deleted_beyond_the_record,
        lose_a_slot,
        train_twice,
        close_twice,
        bound_that_came_too_late,
        bound_of_the_trainers_own,
        stale_token,
        token_of_no_version,
        swapped_places,
        forged_manifest,
        missing_step,
        miscounted_step,
        left_out_and_counted,
        left_out_of_another_batch,
        never_issued,
        issued_twice,
        dropped_after_training,
        forged_reward,
        score_of_another,
        trajectory_of_another,
    ],
)
def test_a_broken_run_does_not_balance(breaks: Callable[[Streams], None]) -> None:
    streams = run()
    breaks(streams)
    report, wrong = streams.examine()
    assert not report.balanced
    assert wrong


def test_what_is_broken_is_counted() -> None:
    twice = run()
    train_twice(twice)
    assert twice.examine()[0].duplicates == 4
    stale = run()
    stale_token(stale)
    report, wrong = stale.examine()
    assert (report.staleness_max, report.staleness_bound) == (2, 1)
    assert wrong == ["g000007 slot 1 in step 2: a token is 2 versions old, the bound is 1"]
    lost = run()
    lose_a_slot(lost)
    report = lost.examine()[0]
    assert report.issued - report.trained - sum(report.dropped.values()) - report.in_flight == 1


def test_versions_are_read_from_spans_token_by_token() -> None:
    made = r.trajectory(r.issued("g000000"), [2, 2, 3, 3, 4])
    assert versions(made.turns) == [2, 2, 3, 3, 4]
    turn = msgspec.structs.replace(made.turns[0], spans=(Span(2, 4, 2),))
    assert versions([turn]) == [-1, 2, 2, -1, -1]


@pytest.mark.anyio
async def test_the_streams_of_a_real_broker_are_read(connect: Connect) -> None:
    """The same run, written to a broker beside another one's records."""
    bus = await connect()
    mine, other = f"r{token_hex(4)}", f"r{token_hex(4)}"
    for name in (mine, other):
        streams = run()
        moved: dict[int, int] = {}
        for seq, made in streams.seen.items():
            at = SlotIssued(
                run=name, lane="train", group=made.group, index=0, slot=made.slot, attempt=made.attempt, group_size=2,
                task=r.TASK, seed=1, min_version=0,
            )  # fmt: skip
            where = TRAJ.at(run=name, group=made.group)
            moved[seq] = await bus.publish(where, r.trajectory(at, made.versions))
        for _, message in streams.ledger:
            group = str(getattr(message, "group", ""))
            where = LEDGER.at(run=name, group=group)
            where = where if isinstance(message, SlotIssued) else where.replace("hr.ledger", "hr.fail")
            await bus.publish(where, msgspec.structs.replace(message, run=name))
        places: dict[int, int] = {}
        for seq, message in streams.scores:
            fields: dict[str, object] = {"run": name}
            group = str(getattr(message, "group", ""))
            where = CLOSE.at(run=name, group=group)
            if message.type_name == "score":
                where = SCORE.at(run=name, judge="j1", group=group)
                fields["trajectory_seq"] = moved[getattr(message, "trajectory_seq", 0)]
            elif isinstance(message, GroupClosed):
                fields["slots"] = tuple(
                    msgspec.structs.replace(s, trajectory_seq=moved[s.trajectory_seq], score_seq=places[s.score_seq])
                    for s in message.slots
                )
            places[seq] = await bus.publish(where, msgspec.structs.replace(message, **fields))
        closings = [
            (m.seq, m.message) async for m in bus.history("HR_SCORE", CLOSE.where(run=name))
            if isinstance(m.message, GroupClosed)
        ]  # fmt: skip
        for number in range(2):
            batch = closings[number * P : (number + 1) * P]
            at_step = await bus.publish(STEP.at(run=name), r.manifest(number, batch, run=name))
            names = [closed.group for _, closed in batch]
            await bus.publish(STEP.at(run=name), r.done(number, names, 4, manifest_seq=at_step, run=name))
    balance = await audit(bus, mine)
    by_time = balance.dropped_by_length.wall_s
    assert by_time == (Bucket(up_to=0.0, slots=10, dropped={}),)
    told = msgspec.structs.replace(balance.dropped_by_length, wall_s=())
    assert msgspec.structs.replace(balance, dropped_by_length=told) == run().examine()[0]


def repeating(streams: Streams, **changes: object) -> None:
    """Group g000000's second score repeats the verdict of the first."""
    same = {"content": "c", "tests": (), "verdict": "passed", "passed": True}
    replace(streams.scores, 0, **same)
    replace(streams.scores, 1, **(same | {"same_as": 1} | changes))


def test_a_verdict_may_be_repeated() -> None:
    streams = run()
    repeating(streams)
    report, wrong = streams.examine()
    assert (wrong, report.reused) == ([], 1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"content": "d"}, "is of another content"),
        ({"content": ""}, "is of another content"),
        ({"same_as": 2}, "is no earlier examination"),
        ({"same_as": 3}, "is not in the stream"),
        ({"verdict": "failed"}, "found something else"),
        ({"value": 0.5}, "found something else"),
    ],
)
def test_a_repeated_verdict_names_an_examination_of_its_content(changes: dict[str, object], reason: str) -> None:
    streams = run()
    repeating(streams, **changes)
    _, wrong = streams.examine()
    assert [reason in sentence for sentence in wrong] == [True], wrong


def test_a_repeated_verdict_needs_a_trajectory_with_the_same_changes() -> None:
    streams = run()
    repeating(streams)
    streams.seen[2] = msgspec.structs.replace(streams.seen[2], changes=b"other")
    _, wrong = streams.examine()
    assert [sentence.partition(", whose ")[2] for sentence in wrong] == ["trajectory has other changes"]


def test_a_certificates_verdict_is_of_an_untouched_repository() -> None:
    """It fails, has no tests, and its trajectory shows that nothing was changed."""
    certified = {"certificate": "h", "verdict": "failed", "passed": False, "tests": ()}
    for changes, changed, right in (
        ({}, False, True),
        ({}, True, False),
        ({"verdict": "passed", "passed": True}, False, False),
        ({"value": 0.5}, False, False),
        ({"same_as": 1}, False, False),
    ):
        streams = run()
        replace(streams.scores, 1, **(certified | changes))
        streams.seen[2] = msgspec.structs.replace(streams.seen[2], changed=changed)
        report, wrong = streams.examine()
        assert (report.reused, not [each for each in wrong if "untouched" in each]) == (1, right)
