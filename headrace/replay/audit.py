"""The audit: verifies from the streams alone that no slot is lost, none is trained twice and no token is too old.

Each slot is counted where it ends, not by subtraction. A trained slot is named by a GroupClosed record and by the
outcome of a step. A dropped slot is named by a record that gives it up. A slot in flight belongs to a group that is
open or waits for its step. A slot that ends nowhere, or twice, makes the sums differ. Streams are read from effect to
cause (steps, closings, ledger), so that every effect has its cause also while the run goes on. Every record that is
counted has its writer's signature, except records of before headrace signed them, which the report counts. A Score that
repeats a verdict has to name an earlier examination of the same content; that record may have been purged since.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import msgspec
from msgspec import UNSET

from headrace.algorithms.staleness import places, staleness
from headrace.bus.connection import Bus
from headrace.ledger import lost_attempts
from headrace.ledger.drops import DropsByLength, Fate, by_length
from headrace.ledger.feedback import FeedbackReport
from headrace.ledger.state import Attempt, Group, RunState
from headrace.messages.base import Message
from headrace.messages.judging import Score
from headrace.messages.ledger import GroupClosed
from headrace.messages.operations import DeadLetter
from headrace.messages.rollout import Trajectory, changes_digest, versions
from headrace.messages.subjects import CLOSE, DLQ, FAIL, LEDGER, SCORE, STEP, TRAJ
from headrace.messages.training import StepDone, StepFailed
from headrace.replay.feedback import feedback_books, purged_users

SKIPPED_NAMED = 100
"""The most unreadable records that the report names; further ones are only counted."""


class Attempts(msgspec.Struct, frozen=True, kw_only=True):
    """Attempts of the train lane: each one that started was kept, is lost, or still runs."""

    started: int
    kept: int
    lost: dict[str, int]
    running: int


class LaneReport(msgspec.Struct, frozen=True, kw_only=True):
    """Slots of one lane."""

    issued: int
    scored: int
    dropped: int
    in_flight: int


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """The line that `headrace audit` prints; slots are those of the train lane unless a field says otherwise."""

    balanced: bool
    issued: int
    trained: int
    dropped: dict[str, int]
    in_flight: int
    attempts: Attempts
    lanes: dict[str, LaneReport]
    staleness_max: int
    staleness_bound: int
    duplicates: int
    """Slots that were trained more than once."""
    skipped_count: int = 0
    """Records that could not be read; no other figure includes them."""
    skipped: tuple[str, ...] = ()
    """The first `SKIPPED_NAMED` of them, forged ones first: stream, sequence, subject and reason."""
    forged: int = 0
    """Skipped records that no writer of their subject signed."""
    dropped_by_length: DropsByLength = DropsByLength()
    reused: int = 0
    """Scores that repeat the verdict of an earlier examination of the same content or of a certificate, of all
    lanes."""
    feedback: FeedbackReport | None = None
    """Ratings of users; None in a run without ratings."""
    branches: dict[str, "AuditReport"] = {}
    """The reports of the branch runs that train on the ratings."""


class Seen(msgspec.Struct, frozen=True):
    """The fields of a Trajectory that the audit reads."""

    lane: str
    group: str
    slot: int
    attempt: int
    versions: tuple[int, ...]
    wall_s: float | None = None
    changes: bytes = b""
    """`messages.rollout.changes_digest`."""
    changed: bool = True
    """Whether it changed anything that is judged."""


async def audit(bus: Bus, run: str) -> AuditReport:
    """The report of a run."""
    return (await prove(bus, run))[0]


async def prove(bus: Bus, run: str, gone_users: frozenset[str] = frozenset()) -> tuple[AuditReport, list[str]]:
    """The report, and a sentence for every fault. gone_users: hashes of users whose records were deleted."""
    steps = await _read(bus, "HR_STEP", STEP.at(run=run))
    scores = await _read(bus, "HR_SCORE", SCORE.where(run=run), CLOSE.where(run=run))
    dead = await _read(bus, "HR_DLQ", DLQ.where(stream="*"))
    seen: dict[int, Seen] = {}
    async for received in bus.history("HR_TRAJ", TRAJ.where(run=run)):
        made = received.message
        if isinstance(made, Trajectory):
            written = tuple(versions(made.turns)) if made.lane == "train" else ()
            seen[received.seq] = Seen(
                *(made.lane, made.group, made.slot, made.attempt, written, made.wall_s, changes_digest(made)),
                changed=bool(made.diff or made.deleted or made.changes),
            )
    ledger = await _read(bus, "HR_LEDGER", LEDGER.where(run=run), FAIL.where(run=run))
    users = gone_users | await purged_users(bus, run)
    report, wrong = examine(run, [*ledger, *scores, *steps], [message for _, message in dead], seen, users)
    feedback, names, faults = await feedback_books(bus, run)
    wrong += faults
    branches: dict[str, AuditReport] = {}
    for name in names:
        branches[name], faults = await prove(bus, name, users)
        wrong += [f"{name}: {fault}" for fault in faults]
    report = msgspec.structs.replace(report, balanced=not wrong, feedback=feedback, branches=branches)
    records = sorted(bus.skipped.values(), key=lambda record: not record.forged)
    skipped = [f"{record.stream} #{record.seq} on {record.subject}: {record.reason}" for record in records]
    report = msgspec.structs.replace(
        report,
        skipped=tuple(skipped[:SKIPPED_NAMED]),
        skipped_count=len(skipped),
        forged=sum(record.forged for record in records),
    )
    return report, wrong


async def _read(bus: Bus, stream: str, *filters: str) -> list[tuple[int, Message]]:
    return [(received.seq, received.message) async for received in bus.history(stream, *filters)]


def examine(
    run: str,
    records: Iterable[tuple[int, Message]],
    dead: Iterable[Message],
    seen: Mapping[int, Seen],
    gone_users: frozenset[str] = frozenset(),
) -> tuple[AuditReport, list[str]]:
    """The audit itself. records: (sequence, message), ledger first, then scores and closings, then steps. seen:
    trajectories by sequence. gone_users: their records may be missing."""
    state = RunState(run)
    for seq, message in records:
        state.apply(message, seq)
    for letter in dead:
        lost = lost_attempts.lost_attempt(letter) if isinstance(letter, DeadLetter) else None
        if lost is not None and lost.run == run:
            state.fail(lost.group, lost.slot, lost.attempt, lost_attempts.REASON)
    wrong = list(state.problems)
    train = [group for group in state.groups.values() if group.first.lane == "train"]
    wrong += _check_closings(state, seen, gone_users) + _check_steps(state)
    wrong += _check_bounds(state) + _check_reuse(state, seen)
    oldest, bound, stale = _staleness(state, seen)
    wrong += stale
    issued = sum(len(group.slots) for group in train)
    trained, dropped, in_flight = _slots(state, train, wrong)
    attempts = _attempts(train)
    ended = attempts.kept + sum(attempts.lost.values()) + attempts.running
    if issued != trained + sum(dropped.values()) + in_flight:
        wrong.append(
            f"{issued} slots were issued, but {trained + sum(dropped.values()) + in_flight} are trained, "
            f"dropped or in flight"
        )
    if attempts.started != ended:
        wrong.append(f"{attempts.started} attempts were started, but {ended} were kept, are lost or still run")
    duplicates = _duplicates(state)
    if duplicates:
        wrong.append(f"{duplicates} slots were trained more than once")
    report = AuditReport(
        balanced=not wrong,
        issued=issued,
        trained=trained,
        dropped=dict(sorted(dropped.items())),
        in_flight=in_flight,
        attempts=attempts,
        lanes=_lanes(state, seen),
        staleness_max=oldest,
        staleness_bound=bound,
        duplicates=duplicates,
        dropped_by_length=by_length(list(_fates(state, train, seen))),
        reused=sum(bool(score.same_as or score.certificate) for score in state.scores.values()),
    )
    return report, wrong


def _outcome_of(state: RunState, group: Group) -> str:
    """``trained``, ``step_failed``, or empty while the group's step is not over."""
    if not group.steps:
        return ""
    return "trained" if isinstance(state.outcomes[group.steps[0]], StepDone) else "step_failed"


def _slots(state: RunState, train: Iterable[Group], wrong: list[str]) -> tuple[int, Counter[str], int]:
    """Trained slots, dropped ones by reason, and those in flight."""
    trained = in_flight = 0
    dropped: Counter[str] = Counter()
    for group in train:
        for _, closed in group.closings:
            named = [slot.slot for slot in closed.slots] + [int(slot) for slot in closed.dropped_slots]
            if sorted(named) != sorted(group.slots):
                wrong.append(
                    f"{group.name}: slots {sorted(group.slots)} were issued, but the record that ends it "
                    f"names {sorted(named)}"
                )
            outcome, left_out = _outcome_of(state, group), state.left_out(group)
            lost = [left_out[slot.trajectory_seq] for slot in closed.slots if slot.trajectory_seq in left_out]
            dropped.update(lost)
            trained += len(closed.slots) - len(lost) if outcome == "trained" else 0
            in_flight += 0 if outcome else len(closed.slots)
            dropped.update({"step_failed": len(closed.slots)} if outcome == "step_failed" else {})
            dropped.update(closed.dropped_slots.values())
        if group.dropped is not None and not group.closings:
            dropped[group.dropped.reason] += len(group.slots)
        if group.open:
            in_flight += len(group.slots)
    return trained, dropped, in_flight


def _fates(state: RunState, train: Iterable[Group], seen: Mapping[int, Seen]) -> Iterator[Fate]:
    """Every slot with the length of its episode; None for a slot without a verdict."""
    for group in train:
        failed = "step_failed" if _outcome_of(state, group) == "step_failed" else ""
        closed = group.closed
        left_out = state.left_out(group)
        for number, slot in group.slots.items():
            reason = failed
            if group.dropped is not None and closed is None:
                reason = group.dropped.reason
            elif closed is not None:
                reason = closed.dropped_slots.get(str(number), failed)
            score = slot.last.score
            reason = reason or (left_out.get(score.trajectory_seq, "") if score is not None else "")
            made = seen.get(score.trajectory_seq) if score is not None else None
            yield Fate(score.sampled_tokens if score else None, made.wall_s if made else None, reason)


def _attempts(train: Iterable[Group]) -> Attempts:
    """Counts every attempt once: started, kept, running, or lost."""
    started = trajectories = running = 0
    lost: Counter[str] = Counter()
    for group in train:
        closed = group.closed
        named = {(slot.slot, slot.attempt) for slot in closed.slots} if closed is not None else set()
        for number, attempt in group.attempts():
            started += 1
            slot = group.slots[number]
            live = attempt is slot.last
            if (number, attempt.number) in named:
                trajectories += 1
                named.discard((number, attempt.number))
            elif group.open and live and not attempt.failed:
                running += 1
            else:
                lost[_why_lost(group, number, attempt, live)] += 1
        trajectories += len(named)  # kept although it never started: the sums differ
    return Attempts(started=started, kept=trajectories, lost=dict(sorted(lost.items())), running=running)


def _why_lost(group: Group, number: int, attempt: Attempt, last: bool) -> str:
    """The reason for which an attempt is not kept."""
    if attempt.failed:
        return attempt.failed
    if not last:
        return "superseded"
    if group.dropped is not None:
        return group.dropped.reason
    closed = group.closed
    return closed.dropped_slots.get(str(number), "unnamed") if closed is not None else "unnamed"


def _check_closings(state: RunState, seen: Mapping[int, Seen], gone_users: frozenset[str]) -> list[str]:
    """Every GroupClosed record names attempts that exist, with their Scores and Trajectories. A record may be missing
    only where its deletion is recorded: with its user, or because the trainer no longer keeps its step."""
    wrong = []
    first_kept = (state.purged.trajectory_seq, state.purged.score_seq) if state.purged is not None else (0, 0)
    for seq, closed in state.closings:
        erased = closed.group.partition(".")[0] in gone_users
        for slot in closed.slots:
            where = f"{closed.group} slot {slot.slot}"
            if state.attempt(closed.group, slot.slot, slot.attempt) is None:
                wrong.append(f"{where}: closed with attempt {slot.attempt}, which was never issued")
            if slot.trajectory_seq not in seen and slot.trajectory_seq >= first_kept[0] and not erased:
                wrong.append(f"{where}: its trajectory {slot.trajectory_seq} is not in the stream or cannot be read")
            score = state.scores.get(slot.score_seq)
            if score is None:
                if (slot.score_seq >= first_kept[1] and not erased) or slot.score_seq >= seq:
                    wrong.append(f"{where}: its score {slot.score_seq} is not in the stream or cannot be read")
                continue
            if (score.group, score.slot, score.attempt) != (closed.group, slot.slot, slot.attempt):
                wrong.append(f"{where}: score {slot.score_seq} belongs to another slot")
            if (score.trajectory_seq, score.reward) != (slot.trajectory_seq, slot.reward):
                wrong.append(
                    f"{where}: score {slot.score_seq} has another trajectory or reward than the GroupClosed record"
                )
    return wrong


def _check_reuse(state: RunState, seen: Mapping[int, Seen]) -> list[str]:
    """Every Score that repeats a verdict names an earlier Score of the run that was itself examined, has the same
    content and found the same. The trajectories show the same changes, whatever the judge wrote about them. One that
    names a certificate failed without a test, and its trajectory changed nothing."""
    wrong = []
    first_kept = state.purged.score_seq if state.purged is not None else 0
    for seq, score in state.scores.items():
        ours = seen.get(score.trajectory_seq)
        if score.certificate:
            verdict = score.same_as, score.verdict, score.value, score.tests, score.steps
            if verdict != (UNSET, "failed", None, (), UNSET) or (ours is not None and ours.changed):
                wrong.append(f"{score.group} slot {score.slot}: score {seq} is no untouched repository's, which fails")
            continue
        if not score.same_as:
            continue
        where = f"{score.group} slot {score.slot}: score {seq} repeats the verdict of score {score.same_as}"
        source = state.scores.get(score.same_as)
        if source is None:
            if score.same_as >= min(seq, first_kept):
                wrong.append(f"{where}, which is not in the stream or cannot be read")
            continue
        theirs = seen.get(source.trajectory_seq)
        if score.same_as >= seq or source.same_as:
            wrong.append(f"{where}, which is no earlier examination")
        elif not score.content or (score.content, score.task) != (source.content, source.task):
            wrong.append(f"{where}, which is of another content")
        elif ours is not None and theirs is not None and ours.changes != theirs.changes:
            wrong.append(f"{where}, whose trajectory has other changes")
        elif _found(score) != _found(source):
            wrong.append(f"{where}, which found something else")
    return wrong


def _found(score: Score) -> tuple[object, ...]:
    return score.judge_version, score.verdict, score.value, score.tests, score.steps, score.reason


def _check_steps(state: RunState) -> list[str]:
    """Batch k has the GroupClosed records kP to kP + P - 1; its manifest and its outcome name the same groups."""
    wrong = []
    per_step = len(next(iter(state.manifests.values())).groups) if state.manifests else 0
    for step in range(state.steps):
        outcome = state.outcomes.get(step)
        if outcome is None:
            wrong.append(f"step {step} has no outcome, but later steps have")
            continue
        manifest = state.manifests.get(outcome.manifest_seq)
        if manifest is None or (manifest.step, manifest.incarnation) != (step, outcome.incarnation):
            wrong.append(f"step {step}: record {outcome.manifest_seq} is not its manifest")
            continue
        batch = _batch(state, step, per_step)
        meant = [(seq, c.group, tuple((s.trajectory_seq, s.score_seq) for s in c.slots)) for seq, c in batch]
        if [(group.close_seq, group.group, group.slots) for group in manifest.groups] != meant:
            wrong.append(f"step {step}: its manifest does not name the closings of its batch")
        if list(outcome.groups) != [closed.group for _, closed in batch]:
            wrong.append(f"step {step}: its outcome does not name the groups of its batch")
        before = state.outcomes.get(manifest.restore - 1)
        if manifest.restore >= 0 and isinstance(outcome, StepFailed) and outcome.reason == "rolled_back":
            if before is not None and before.state_hash != outcome.state_hash:
                wrong.append(f"step {step}: its outcome has other bytes than version {manifest.restore}")
        slots = sum(len(closed.slots) for _, closed in batch)
        counted = (
            outcome.trained_slots + len(outcome.left_out) if isinstance(outcome, StepDone) else outcome.dropped_slots
        )
        if counted != slots:
            wrong.append(f"step {step}: its outcome does not count the slots of its groups")
        named = {slot.trajectory_seq for _, closed in batch for slot in closed.slots}
        if isinstance(outcome, StepDone) and not {each.trajectory_seq for each in outcome.left_out} <= named:
            wrong.append(f"step {step}: its outcome leaves out a trajectory that its batch does not have")
        if outcome.version != step + 1:
            wrong.append(f"step {step} made version {outcome.version}")
    return wrong


def _batch(state: RunState, step: int, per_step: int) -> list[tuple[int, GroupClosed]]:
    closings = places(step, per_step)
    return state.closings[closings.start : closings.stop]


def _staleness(state: RunState, seen: Mapping[int, Seen]) -> tuple[int, int, list[str]]:
    """The age of the oldest trained token, the largest bound, and a sentence for every slot beyond its batch's bound.
    The bound is that of the recorded StalenessBound, if there is one. For a purged trajectory the versions of its
    GroupClosed record count."""
    worst = largest = 0
    wrong = []
    for step, outcome in sorted(state.outcomes.items()):
        if not isinstance(outcome, StepDone):
            continue
        bound = outcome.staleness_bound
        if state.bounds is not None and step >= state.bound_records[0][0].first_batch:
            if bound != state.bounds.at(step):
                wrong.append(f"step {step}: its outcome says bound {bound}, the closings say {state.bounds.at(step)}")
            bound = state.bounds.at(step)
        largest = max(largest, bound)
        for name in outcome.groups:
            group = state.groups.get(name)
            closed = group.closed if group is not None else None
            left_out = {each.trajectory_seq for each in outcome.left_out}
            for slot in closed.slots if closed is not None else ():
                if slot.trajectory_seq in left_out:
                    continue
                made = seen.get(slot.trajectory_seq)
                written = made.versions if made is not None else (slot.oldest_version,)
                where = f"{name} slot {slot.slot} in step {step}"
                if made is not None and (made.group, made.slot, made.attempt) != (name, slot.slot, slot.attempt):
                    wrong.append(f"{where}: trajectory {slot.trajectory_seq} belongs to another slot")
                if any(not 0 <= version <= step for version in written):
                    wrong.append(f"{where}: a token names a version that the run never had")
                    continue
                oldest = max((staleness(step, version) for version in written), default=0)
                worst = max(worst, oldest)
                if oldest > bound:
                    wrong.append(f"{where}: a token is {oldest} versions old, the bound is {bound}")
    return worst, largest, wrong


def _check_bounds(state: RunState) -> list[str]:
    """A record that changes the bound must come before the first GroupClosed record of its batch."""
    per_step = len(next(iter(state.manifests.values())).groups) if state.manifests else 0
    return [
        f"a staleness bound of {record.bound} for batch {record.first_batch} was recorded after {closed} closings"
        for record, closed in state.bound_records
        if record.first_batch * per_step < closed
    ]


def _duplicates(state: RunState) -> int:
    """Slots that were trained more than once."""
    times: Counter[tuple[str, int]] = Counter()
    for outcome in state.outcomes.values():
        if isinstance(outcome, StepDone):
            for name in outcome.groups:
                group = state.groups.get(name)
                left_out = {each.trajectory_seq for each in outcome.left_out}
                for _, closed in group.closings if group is not None else ():
                    times.update((name, slot.slot) for slot in closed.slots if slot.trajectory_seq not in left_out)
    return sum(count > 1 for count in times.values())


def _lanes(state: RunState, seen: Mapping[int, Seen]) -> dict[str, LaneReport]:
    """Slots of each lane: given up, otherwise with a verdict (production: with a Trajectory), otherwise in flight."""
    finished = {(made.group, made.slot) for made in seen.values() if made.lane == "production"}
    lanes: dict[str, Counter[str]] = {}
    for group in state.groups.values():
        lane = lanes.setdefault(group.first.lane, Counter())
        closed, left_out = group.closed, state.left_out(group)
        for number, slot in group.slots.items():
            lane["issued"] += 1
            if group.first.lane == "train":
                given_up = group.dropped is not None or (closed is not None and str(number) in closed.dropped_slots)
                given_up = given_up or _outcome_of(state, group) == "step_failed"
                score = slot.last.score
                given_up = given_up or (score is not None and score.trajectory_seq in left_out)
            else:
                given_up = slot.failed
            done = slot.scored or (group.name, number) in finished
            lane["dropped" if given_up else "scored" if done else "in_flight"] += 1
    return {
        name: LaneReport(
            issued=lane["issued"], scored=lane["scored"], dropped=lane["dropped"], in_flight=lane["in_flight"]
        )
        for name, lane in sorted(lanes.items())
    }
