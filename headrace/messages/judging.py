"""Verdicts."""

from typing import Literal

from headrace.messages.base import Message, message
from headrace.messages.rollout import Lane
from headrace.messages.sandbox import TestOutcome
from headrace.messages.tasks import TaskRef


@message("score")
class Score(Message, frozen=True, kw_only=True):
    """The judge's word on one trajectory, by sequence."""

    run: str
    lane: Lane
    group: str
    slot: int
    attempt: int
    trajectory_seq: int
    task: TaskRef
    family: str
    judge_version: str
    verdict: Literal["passed", "failed", "cheating", "candidate_crash"]
    reward: float
    """After penalties (length); the verdict alone decides pass rates."""
    passed: bool
    tests: tuple[TestOutcome, ...] = ()
    suspicions: tuple[str, ...] = ()
    again: Literal["", "same", "other"] = ""
    """Judged a second time, alone in a machine: whether that gave the same. If not, the group is quarantined."""
    oldest_version: int = -1
    sampled_tokens: int = 0
    turns: int = 0
    calls: int = 0
    wall_ms: float = 0.0
