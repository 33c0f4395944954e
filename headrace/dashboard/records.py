"""The stored records of a finished run that its report needs, read once."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.bus.connection import Bus
from headrace.ledger.evaluation import group_prefix
from headrace.messages import subjects
from headrace.messages.evaluation import EvalRequest
from headrace.messages.judging import Score
from headrace.messages.ledger import SlotIssued
from headrace.messages.rollout import Trajectory
from headrace.messages.weights import WeightManifest


@dataclass
class EvaluatedAttempts:
    """The attempts of one evaluation, by task."""

    scores: dict[str, Score] = field(default_factory=dict)
    trajectories: dict[str, Trajectory] = field(default_factory=dict)


@dataclass
class RunRecords:
    """The records of a run; some kinds are only counted."""

    episodes: int = 0
    tool_calls: int = 0
    sampled_tokens: int = 0
    malformed_calls: int = 0
    feedback: int = 0
    backends: set[str] = field(default_factory=set)
    evaluations: dict[str, EvaluatedAttempts] = field(default_factory=dict)
    """Reason of an EvalRequest to its attempts."""
    deltas: list[WeightManifest] = field(default_factory=list)
    sessions: dict[str, float] = field(default_factory=dict)
    """Group of a production request to the time at which it was issued."""
    session_s: list[float] = field(default_factory=list)
    """Seconds from issue to trajectory, per production request that was finished."""
    first_issue: float = 0.0
    """When the first slot of the train lane was issued; 0 when none was."""


async def collect(bus: Bus, run: str, asked: Sequence[EvalRequest]) -> RunRecords:
    """Read the streams of a run. asked: its evaluations."""
    records = RunRecords()
    reasons = {group_prefix(request.id): request.reason for request in asked}

    def evaluation_of(group: str) -> EvaluatedAttempts | None:
        reason = reasons.get(group.rpartition("-")[0])
        return records.evaluations.setdefault(reason, EvaluatedAttempts()) if reason is not None else None

    async for received in bus.history("HR_LEDGER", subjects.LEDGER.where(run=run)):
        message = received.message
        if isinstance(message, SlotIssued):
            if message.lane == "production" and message.attempt == 0:
                records.sessions[message.group] = received.time
            elif message.lane == "train" and not records.first_issue:
                records.first_issue = received.time
    async for received in bus.history("HR_SCORE", subjects.SCORE.where(run=run)):
        message = received.message
        if isinstance(message, Score) and (evaluation := evaluation_of(message.group)) is not None:
            evaluation.scores[message.task.task] = message
    async for received in bus.history("HR_TRAJ", subjects.TRAJ.where(run=run)):
        message = received.message
        if not isinstance(message, Trajectory):
            continue
        records.episodes += 1
        records.tool_calls += sum(len(turn.calls) for turn in message.turns)
        records.sampled_tokens += sum(len(turn.ids) for turn in message.turns)
        records.malformed_calls += message.malformed_calls
        if message.backend:  # an episode without a sandbox has no backend
            records.backends.add(message.backend)
        if message.lane == "production" and message.group in records.sessions:
            records.session_s.append(received.time - records.sessions[message.group])
        elif (evaluation := evaluation_of(message.group)) is not None:
            evaluation.trajectories[message.task.task] = message
    async for received in bus.history("HR_WEIGHTS", subjects.WEIGHT_MANIFEST.where(run=run, version="*")):
        message = received.message
        if isinstance(message, WeightManifest) and message.base_version >= 0:
            records.deltas.append(message)
    async for _ in bus.history("HR_FEEDBACK", subjects.FEEDBACK.where()):
        records.feedback += 1
    return records
