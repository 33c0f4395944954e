"""Rewards of turns: from the reward function through the Score to the advantages of the turn's tokens."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from headrace.algorithms.advantages import normalised, to_go
from headrace.algorithms.rewards import Judged
from headrace.judging.candidates import Candidate
from headrace.judging.scoring import Rewarder, score_of
from headrace.judging.verdicts import NoVerdict, Verdict
from headrace.messages.judging import Score, TurnRewards
from headrace.messages.rollout import Trajectory
from headrace.messages.tasks import Oracle, Task
from headrace.messages.tasks import TestPlan as Plan
from headrace.messages.training import StepManifest
from headrace.registry import admit
from headrace.training.batches.batch import build
from tests.support import world
from tests.training.test_trainer import models, prepare


class More(msgspec.Struct):
    """Options of `parity`."""

    more: int = 0
    """Rewards for turns that do not exist."""


def parity(judged: Judged, options: More) -> TurnRewards:
    """For each turn the share of its even ids, and one point for a pass."""
    shares = [sum(id % 2 == 0 for id in turn.ids.tolist()) / len(turn.ids) for turn in judged.trajectory.turns]
    return TurnRewards(final=float(judged.passed), turns=(*shares, *[0.0] * options.more))


async def scored(made: Trajectory, passed: bool, **options: int) -> Score:
    admit("rewards", [name := f"{__name__}:parity"])
    rewarder = Rewarder(name, {}, 30.0, options)
    verdict = Verdict(decision="passed" if passed else "failed")
    task = Task(ref=made.task, family="even", prompt="", files={}, allowed=(), tests=Plan())
    oracle = Oracle(ref=made.task, hidden={}, tests=Plan(), expected=(), solution={})
    reward = await rewarder.reward(made, verdict)
    return score_of(Candidate(trajectory=made, task=task, oracle=oracle), 1, verdict, reward, by=rewarder, wall_s=0.0)


Records = tuple[StepManifest, dict[int, Trajectory], dict[int, Score]]


async def records(trainer: Any) -> Records:
    """A batch of real samples whose first slot of each group passes."""
    manifest, trajectories, _ = world.batch(models(trainer), 0, [0, 0, 0, 0])
    return manifest, trajectories, {1000 + seq: await scored(t, t.slot == 0) for seq, t in trajectories.items()}


@pytest.mark.anyio
async def test_a_turn_s_tokens_get_what_the_turn_and_the_later_ones_earned(tmp_path: Path) -> None:
    trainer = prepare(tmp_path)
    manifest, trajectories, scores = await records(trainer)
    made = build(manifest.groups, trajectories, scores)
    for group in manifest.groups:
        judged = [(trajectories[at], scores[by]) for at, by in group.slots]
        pool = [reward for _, score in judged if score.by_turn for reward in score.by_turn.turns]
        mean, passed = sum(pool) / len(pool), sum(score.passed for _, score in judged) / len(judged)
        for trajectory, score in judged:
            assert score.by_turn is not None and score.reward == pytest.approx(sum(score.by_turn.turns) + score.passed)
            assert score.parts == {f"{__name__}:parity": score.passed, "turns": pytest.approx(sum(score.by_turn.turns))}
            first, second = (reward - mean for reward in score.by_turn.turns)
            want = [score.passed - passed + first + second] * 2 + [score.passed - passed + second] * 2
            (segment,) = (each for each in made.segments if each.trajectory == trajectory.id)
            assert segment.advantages.tolist() == pytest.approx(want)
    outcome = trainer.step(manifest, trajectories, scores)
    assert not outcome.failed and outcome.turn_reward_mean == pytest.approx(sum(made.turn_rewards) / 32)
    other = prepare(tmp_path / "plain")
    plain = {seq: msgspec.structs.replace(score, by_turn=None) for seq, score in scores.items()}
    assert build(manifest.groups, trajectories, plain).segments[0].turn_advantages is None
    assert other.step(manifest, trajectories, plain).state_hash != outcome.state_hash


@pytest.mark.anyio
async def test_deepseekmath_s_formula_and_what_contradicts_itself(tmp_path: Path) -> None:
    trainer = prepare(tmp_path)
    manifest, trajectories, scores = await records(trainer)
    score = next(iter(scores.values()))
    assert score.by_turn is not None
    with pytest.raises(NoVerdict, match="expected TurnRewards with one reward for each of 2 turns, got 3"):
        await scored(next(iter(trajectories.values())), True, more=1)
    for by_class in (False, True):  # one class: the pool is the batch
        made = build(manifest.groups, trajectories, scores, normalised, by_class=by_class)
        some = manifest.groups if by_class else manifest.groups[:1]
        pool = [
            reward for group in some for _, by in group.slots for reward in (scores[by].by_turn or score.by_turn).turns
        ]
        values = torch.tensor(pool, dtype=torch.float64)
        std = values.std(unbiased=False)
        want = to_go(((values[:2] - values.mean()) / (std + 1e-6)).tolist())
        assert made.segments[0].turn_advantages is not None
        assert made.segments[0].turn_advantages.tolist() == pytest.approx([want[0]] * 2 + [want[1]] * 2)
