"""An attempt that cannot be trained on is left out: the step is that of a batch which never had it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.messages.base import Array
from headrace.messages.judging import Score, TurnRewards
from headrace.messages.rollout import Span, Trajectory
from headrace.messages.training import LeftOut, StepManifest
from headrace.training.batches.batch import build
from headrace.training.trainer import PolicyTrainer
from tests.support import world
from tests.support.world import CONFIG, TOKENIZER

FIRST = 5
"""Trajectory of the first slot of the second group; its score is 1000 more."""


def turns(made: Trajectory, **changes: Any) -> Trajectory:
    """With changed fields in the last turn; a function gets the old value."""
    last = made.turns[-1]
    fields = {name: change(getattr(last, name)) if callable(change) else change for name, change in changes.items()}
    return msgspec.structs.replace(made, turns=(*made.turns[:-1], msgspec.structs.replace(last, **fields)))


def filled(value: float, dtype: str = "<f4") -> Callable[[Array], Array]:
    return lambda old: Array.of([value, *old.tolist()[1:]], dtype)


def routes(old: Array) -> Array:
    return Array(old.dtype, old.shape, bytes([CONFIG.policy.experts]) * len(old.data))


def one_layer(old: Array) -> Array:
    return Array(old.dtype, (old.shape[0], 1, old.shape[1] * old.shape[2]), old.data)


Records = tuple[dict[int, Trajectory], dict[int, Score]]
Spoil = Callable[[Trajectory], Trajectory | None]
TRAJECTORIES: dict[str, tuple[str, Spoil]] = {
    "nan": ("logprobs_not_finite", lambda made: turns(made, logprobs=filled(float("nan")))),
    "inf": ("logprobs_not_finite", lambda made: turns(made, logprobs=filled(float("inf")))),
    "minus inf": ("logprobs_not_finite", lambda made: turns(made, logprobs=filled(float("-inf")))),
    "purged": ("bad_record", lambda made: None),
    "no log-probabilities": ("bad_record", lambda made: turns(made, logprobs=Array.of([], "<f4"))),
    "another dtype": ("bad_record", lambda made: turns(made, logprobs=filled(-1.0, "<f8"))),
    "two dimensions": ("bad_record", lambda made: turns(made, prompt_ids=Array.of([3, 4], "<i4", (1, 2)))),
    "uncovered": ("bad_record", lambda made: turns(made, spans=(Span(0, 1, 0),), routed=None)),
    "no such id": ("bad_record", lambda made: turns(made, prompt_ids=Array.of([3, world.VOCAB], "<i4"))),
    "a negative id": ("bad_record", lambda made: turns(made, ids=filled(-1, "<i4"))),
    "no routes": (
        "routes_missing",
        lambda made: msgspec.structs.replace(
            made, turns=tuple(msgspec.structs.replace(turn, routed=None) for turn in made.turns)
        ),
    ),
    "no such expert": ("routes_missing", lambda made: turns(made, routed=routes)),
    "other layers": (
        "routes_missing",
        lambda made: msgspec.structs.replace(
            made, turns=tuple(msgspec.structs.replace(t, routed=one_layer(t.routed)) for t in made.turns if t.routed)
        ),
    ),
}


def trainer(folder: Path) -> PolicyTrainer:
    return PolicyTrainer.prepare(CONFIG, folder, tokenizer_json=TOKENIZER, traces=tuple)


def without(manifest: StepManifest, *sequences: int) -> StepManifest:
    """The manifest of a batch that never had these trajectories."""
    groups = [
        msgspec.structs.replace(group, slots=tuple(slot for slot in group.slots if slot[0] not in sequences))
        for group in manifest.groups
    ]
    return msgspec.structs.replace(manifest, groups=tuple(group for group in groups if group.slots))


def assert_left_out(folder: Path, spoil: Callable[[Records], Records], lost: dict[int, str]) -> None:
    """A step leaves these trajectories out, and is else the step without them."""
    now = trainer(folder / "a")
    manifest, trajectories, scores = world.batch({0: now.state.model}, 0, [0, 0, 0, 0])
    outcome = now.step(manifest, *spoil((trajectories, scores)))
    assert not outcome.failed
    assert {each.trajectory_seq: each.reason for each in outcome.left_out} == lost
    assert all(isinstance(each, LeftOut) and each.detail for each in outcome.left_out)
    assert outcome.trained_slots == 16 - len(lost)
    other = trainer(folder / "b").step(without(manifest, *lost), trajectories, scores)
    assert (outcome.state_hash, outcome.loss, outcome.grad_norm) == (other.state_hash, other.loss, other.grad_norm)
    assert other.left_out == () and outcome.reward_mean == other.reward_mean


@pytest.mark.parametrize("kind", TRAJECTORIES)
def test_a_trajectory_that_cannot_be_trained_on(tmp_path: Path, kind: str) -> None:
    reason, change = TRAJECTORIES[kind]

    def spoil(records: Records) -> Records:
        made = change(records[0][FIRST])
        rest = {seq: one for seq, one in records[0].items() if seq != FIRST}
        return rest if made is None else rest | {FIRST: made}, records[1]

    assert_left_out(tmp_path, spoil, {FIRST: reason})


@pytest.mark.parametrize(
    "change",
    [
        lambda score: None,
        lambda score: msgspec.structs.replace(score, slot=3),
        lambda score: msgspec.structs.replace(score, by_turn=TurnRewards(turns=(1.0,))),
    ],
    ids=["purged", "of another slot", "of other turns"],
)
def test_a_score_that_does_not_fit(tmp_path: Path, change: Callable[[Score], Score | None]) -> None:
    def spoil(records: Records) -> Records:
        score = change(records[1][1000 + FIRST])
        rest = {seq: one for seq, one in records[1].items() if seq != 1000 + FIRST}
        return records[0], rest if score is None else rest | {1000 + FIRST: score}

    assert_left_out(tmp_path, spoil, {FIRST: "bad_record"})


def test_a_group_of_which_one_attempt_remains_is_left_out(tmp_path: Path) -> None:
    spoilt = range(FIRST, FIRST + 3)

    def spoil(records: Records) -> Records:
        nan = TRAJECTORIES["nan"][1]
        changed = {seq: made for seq in spoilt if (made := nan(records[0][seq])) is not None}
        return records[0] | changed, records[1]

    lost = dict.fromkeys(spoilt, "logprobs_not_finite") | {FIRST + 3: "group_too_small"}
    assert_left_out(tmp_path, spoil, lost)


def test_an_attempt_with_a_baseline_of_its_own_needs_no_other() -> None:
    manifest, trajectories, scores = world.batch({0: world.model()}, 0, [0, 0, 0, 0])
    scores = {seq: msgspec.structs.replace(score, baseline=0.25) for seq, score in scores.items()}
    for seq in range(FIRST, FIRST + 3):
        del trajectories[seq]
    made = build(manifest.groups, trajectories, scores)
    assert [each.trajectory_seq for each in made.left_out] == [FIRST, FIRST + 1, FIRST + 2]
    assert made.trajectories == 13
