"""Hand-made records of a run, for tests of the readers of its streams: small, complete, and easy to break."""

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from headrace.messages.base import Array, Message
from headrace.messages.judging import Score
from headrace.messages.ledger import ClosedSlot, GroupClosed, GroupDropped, SlotIssued
from headrace.messages.operations import DeadLetter
from headrace.messages.rollout import Lane, PolicyRef, RolloutRequest, Sampling, SlotFailed, Span, Trajectory, Turn
from headrace.messages.tasks import TaskRef, TestPlan
from headrace.messages.training import BatchGroup, StepDone, StepFailed, StepManifest

RUN = "r20260101-000000-s1"
TASK = TaskRef("generated/train", "t0")
S = TypeVar("S", bound=msgspec.Struct)
USUAL: dict[str, Any] = {
    "run": RUN,
    "lane": "train",
    "role": "rollout",
    "group": "g000000",
    "group_size": 2,
    "isolation": "group",
    "task": TASK,
    "ref": TASK,
    "family": "one_line",
    "allowed": ("**",),
    "tests": TestPlan(),
    "seed": 1,
    "policy": PolicyRef(),
    "sampling": Sampling(),
    "outcome": "finished",
    "verdict": "passed",
    "staleness_bound": 1,
    "state": "running",
    "state_hash": "0" * 32,
    "judge_version": "j1",
    "prompt_ids": Array.of([], "<i4"),
    "ids": Array.of([], "<i4"),
    "logprobs": Array.of([], "<f4"),
}
"""What `of` gives to a field of that name."""
LEAST: dict[type[inspect.Type], Any] = {
    inspect.StrType: "",
    inspect.IntType: 0,
    inspect.FloatType: 0.0,
    inspect.BoolType: False,
    inspect.BytesType: b"",
    inspect.VarTupleType: (),
    inspect.DictType: {},
    inspect.UnionType: None,
}


def of(cls: type[S], **fields: Any) -> S:
    """A struct with the fields that a test cares about. The other required ones have their `USUAL` value, or the least
    of their type; an attempt's id follows from its group, slot and attempt."""
    shape = inspect.type_info(cls)
    assert isinstance(shape, inspect.StructType)
    for field in shape.fields:
        if field.required and field.name not in fields:
            fields[field.name] = USUAL.get(field.name, LEAST.get(type(field.type)))
    if cls is Trajectory and not fields["id"]:
        fields["id"] = "{group}-{slot}-{attempt}".format_map(fields)
    return cls(**fields)


def letter(msg_id: str) -> DeadLetter:
    """The dead letter of a request that nobody could fill."""
    headers = {"Nats-Msg-Id": msg_id}
    return of(
        DeadLetter, stream="HR_TASK", consumer="rollout", type="rollout_request", reason="poison", headers=headers
    )


def issued(
    group: str,
    slot: int = 0,
    attempt: int = 0,
    *,
    size: int = 2,
    index: int = 0,
    oldest: int = 0,
    lane: Lane = "train",
    run: str = RUN,
    task: TaskRef = TASK,
) -> SlotIssued:
    """A slot's issue."""
    return SlotIssued(run=run, lane=lane, group=group, index=index, slot=slot, attempt=attempt, group_size=size,
                      task=task, seed=7, min_version=oldest)  # fmt: skip


def failed(
    group: str, slot: int = 0, attempt: int = 0, reason: str = "sandbox_lost", lane: Lane = "train", run: str = RUN
) -> SlotFailed:
    """Our own parts failed an attempt."""
    return of(SlotFailed, run=run, lane=lane, group=group, slot=slot, attempt=attempt, reason=reason)


def score(
    group: str,
    slot: int = 0,
    attempt: int = 0,
    *,
    trajectory_seq: int = 0,
    version: int = 0,
    passed: bool = True,
    lane: Lane = "train",
    task: TaskRef = TASK,
    family: str = "one_line",
    run: str = RUN,
) -> Score:
    """A verdict."""
    return Score(run=run, lane=lane, group=group, slot=slot, attempt=attempt, trajectory_seq=trajectory_seq, task=task,
                 family=family, judge_version="j1", verdict="passed" if passed else "failed", reward=float(passed),
                 passed=passed, oldest_version=version, sampled_tokens=3, turns=1)  # fmt: skip


def trajectory(
    request: RolloutRequest | SlotIssued,
    versions: Sequence[int] = (0, 0, 0),
    *,
    ids: Sequence[int] = (),
    logprobs: Sequence[float] = (),
    fingerprint: str = "",
) -> Trajectory:
    """One turn: a prompt of two ids, then one sampled id per entry of `versions`, written by that version."""
    count = len(versions)
    spans: list[Span] = []
    for position, version in enumerate([versions[0], *versions]):  # the last sampled id is never forwarded
        if spans and spans[-1].version == version:
            spans[-1] = Span(spans[-1].start, position + 1, version)
        else:
            spans.append(Span(position, position + 1, version))
    turn = Turn(index=0, segment=0, prompt_ids=Array.of([1, 2], "<i4"),
                ids=Array.of(ids or [3] * count, "<i4"), logprobs=Array.of(logprobs or [-1.0] * count, "<f4"),
                spans=tuple(spans))  # fmt: skip
    return Trajectory(
        run=request.run, lane=request.lane, group=request.group, slot=request.slot, attempt=request.attempt,
        id=f"{request.group}-{request.slot}-{request.attempt}", task=request.task, family="one_line", seed=request.seed,
        policy=PolicyRef(), sampling=Sampling(), outcome="finished", turns=(turn,), diff={}, fingerprint=fingerprint,
    )  # fmt: skip


def closed(
    group: str,
    *slots: tuple[int, int, int, int],
    size: int = 2,
    version: int = 0,
    lost: Sequence[int] = (),
    run: str = RUN,
) -> GroupClosed:
    """A closing over (slot, attempt, trajectory sequence, score sequence)."""
    return GroupClosed(
        run=run, group=group, task=TASK, group_size=size,
        slots=tuple(
            ClosedSlot(slot=s, attempt=a, trajectory_seq=t, score_seq=c, reward=1.0, oldest_version=version)
            for s, a, t, c in slots
        ),
        dropped_slots={str(slot): "infra" for slot in lost}, oldest_version=version,
    )  # fmt: skip


def dropped(group: str, reason: str = "infra", size: int = 2, run: str = RUN) -> GroupDropped:
    """A group given up."""
    return GroupDropped(run=run, group=group, reason=reason, group_size=size)  # type: ignore[arg-type]


def manifest(
    step: int, closings: Sequence[tuple[int, GroupClosed]], incarnation: int = 0, run: str = RUN
) -> StepManifest:
    """The manifest of a batch made of (sequence, closing)."""
    groups = tuple(
        BatchGroup(group=c.group, close_seq=seq, slots=tuple((s.trajectory_seq, s.score_seq) for s in c.slots))
        for seq, c in closings
    )
    return StepManifest(run=run, step=step, incarnation=incarnation, version=step, base_hash="h", groups=groups, seed=1,
                        code="headrace", fingerprint="f")  # fmt: skip


def done(
    step: int,
    groups: Sequence[str],
    slots: int,
    *,
    manifest_seq: int = 0,
    bound: int = 1,
    incarnation: int = 0,
    state_hash: str = "h",
    run: str = RUN,
) -> StepDone:
    """A step that was taken."""
    return of(
        StepDone, run=run, step=step, incarnation=incarnation, version=step + 1, state_hash=state_hash,
        manifest_seq=manifest_seq, groups=tuple(groups), trained_slots=slots, staleness_bound=bound, max_abs_dlp=0.0,
        exact=True,
    )  # fmt: skip


def step_failed(step: int, groups: Sequence[str], slots: int, *, manifest_seq: int = 0, run: str = RUN) -> StepFailed:
    """A step that was refused."""
    return StepFailed(run=run, step=step, version=step + 1, state_hash="h", manifest_seq=manifest_seq,
                      groups=tuple(groups), dropped_slots=slots, reason="nan")  # fmt: skip


Records = list[tuple[int, Message]]
