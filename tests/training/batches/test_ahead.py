"""Tensors that are built before their step are those that the step would build; only the step refuses a record."""

import dataclasses
from pathlib import Path

import msgspec
import pytest
import torch

from headrace.messages.rollout import Trajectory
from headrace.training.batches.ahead import Ahead
from headrace.training.batches.batch import build
from headrace.training.batches.segment import Segment, tensors_of
from headrace.training.trainer import PolicyTrainer
from tests.support import world
from tests.support.recorded_run import without_logprobs
from tests.training.test_mid_training import texts

BUILD = "headrace.training.batches.batch.tensors_of"


def refuse(trajectory: Trajectory) -> list[Segment]:
    raise AssertionError(f"{trajectory.id} is built in the step")


def records() -> world.Records:
    return world.batch({0: world.model()}, 0, [0, 0, 0, 0])


def trainer(folder: Path) -> PolicyTrainer:
    return PolicyTrainer.prepare(world.CONFIG, folder, tokenizer_json=world.TOKENIZER, traces=texts)


def test_a_batch_from_tensors_that_were_built_before_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, trajectories, scores = records()
    want = build(manifest.groups, trajectories, scores)
    ahead = Ahead(1)
    ahead.add(trajectories)
    built = ahead.take([*trajectories, 10**6])
    assert built.keys() == trajectories.keys() and not ahead.take(trajectories), "each is taken once"
    ahead.close()
    ahead.add(trajectories)
    assert not ahead.take(trajectories), "nothing is built after the end"
    monkeypatch.setattr(BUILD, refuse)
    got = build(manifest.groups, trajectories, scores, built=built)
    assert dataclasses.replace(got, segments=()) == dataclasses.replace(want, segments=())
    for one, other in zip(got.segments, want.segments, strict=True):
        for field in dataclasses.fields(Segment):
            left, right = getattr(one, field.name), getattr(other, field.name)
            same = torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right
            assert same, field.name


def test_a_step_does_not_build_what_was_expected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = trainer(tmp_path / "a")
    manifest, trajectories, scores = world.batch(dict(want.versions), 0, [0, 0, 0, 0])
    state_hash = want.step(manifest, trajectories, scores).state_hash
    early = trainer(tmp_path / "b")
    early.expect(trajectories)
    monkeypatch.setattr(BUILD, refuse)
    outcome = early.step(manifest, trajectories, scores)
    assert not outcome.failed and outcome.state_hash == state_hash and outcome.max_abs_dlp == 0.0


def test_a_record_that_contradicts_itself_is_left_out_in_its_step(tmp_path: Path) -> None:
    now = trainer(tmp_path)
    manifest, trajectories, scores = world.batch(dict(now.versions), 0, [0, 0, 0, 0])
    first = min(trajectories)
    spoilt = trajectories | {first: without_logprobs(trajectories[first])}
    now.expect(spoilt)
    outcome = now.step(manifest, spoilt, scores)
    assert [(each.trajectory_seq, each.reason) for each in outcome.left_out] == [(first, "bad_record")]


def test_routes_stay_as_small_as_in_the_record() -> None:
    _, trajectories, _ = records()
    for made in trajectories.values():
        for segment in tensors_of(made):
            assert segment.routed is not None and segment.routed.dtype == torch.uint8
            assert segment.routes is not None and segment.routes.dtype == torch.int64
            assert torch.equal(segment.routes, segment.routed.long())
    late = [msgspec.structs.replace(turn, routed=None) for turn in made.turns[:1]]
    (partly,) = tensors_of(msgspec.structs.replace(made, turns=(*late, *made.turns[1:])))
    assert partly.routes is not None and int(partly.routes[0].max()) == -1, "its first turn has no record"
