"""The records of attempts that were sampled here, without a bus: as a rollout actor and a judge would publish them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec import UNSET

from headrace.engines.base import Sample
from headrace.messages.base import Array
from headrace.messages.judging import Score
from headrace.messages.rollout import PolicyRef, Sampling, Trajectory, Turn
from headrace.messages.tasks import Task
from headrace.messages.training import BatchGroup, StepManifest

RUN, GROUP = "try", "try"
SCORES = 1000
"""Sequence of the first score."""


class TrialRecords(NamedTuple):
    """A batch of one group, as a trainer takes it."""

    manifest: StepManifest
    trajectories: dict[int, Trajectory]
    scores: dict[int, Score]


def batch(task: Task, prompt: Sequence[int], samples: Sequence[Sample], version: int, fingerprint: str) -> TrialRecords:
    """The records of attempts of one turn. The first half of them passes, so that the batch has a gradient."""
    trajectories = {
        seq: _trajectory(task, prompt, sample, seq - 1, fingerprint) for seq, sample in enumerate(samples, 1)
    }
    passed = {seq: seq <= (len(samples) + 1) // 2 for seq in trajectories}
    scores = {
        SCORES + seq: Score(
            run=RUN, lane="train", group=GROUP, slot=seq - 1, attempt=0, trajectory_seq=seq, task=task.ref,
            family=task.family, judge_version="try", verdict="passed" if passed[seq] else "failed",
            reward=float(passed[seq]), passed=passed[seq],
        )
        for seq in trajectories
    }  # fmt: skip
    slots = tuple((seq, SCORES + seq) for seq in trajectories)
    manifest = StepManifest(
        run=RUN, step=version, version=version, base_hash="", seed=version, code="try", fingerprint=fingerprint,
        groups=(BatchGroup(group=GROUP, close_seq=1, slots=slots),),
    )  # fmt: skip
    return TrialRecords(manifest, trajectories, scores)


def _trajectory(task: Task, prompt: Sequence[int], sample: Sample, slot: int, fingerprint: str) -> Trajectory:
    turn = Turn(
        index=0,
        segment=0,
        prompt_ids=Array.of(list(prompt), "<i4"),
        ids=Array.of(list(sample.ids), "<i4"),
        logprobs=Array.of(np.asarray(sample.logprobs, "<f4").tolist(), "<f4"),
        routed=sample.routed,
        routed_start=sample.routed_start if sample.routed is not None else UNSET,
        spans=sample.spans,
        stop=sample.stop,
    )
    return Trajectory(
        run=RUN, lane="train", group=GROUP, slot=slot, attempt=0, id=f"try-{slot}", task=task.ref, family=task.family,
        seed=slot, policy=PolicyRef(), sampling=Sampling(), outcome="finished", turns=(turn,), diff={},
        fingerprint=fingerprint,
    )  # fmt: skip
