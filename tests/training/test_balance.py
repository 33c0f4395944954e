"""The balance of a mixture during RL: corrections of the router that follow the load, and nothing else."""

import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import pytest
import torch

from headrace.config import Config
from headrace.policy.config import CheckpointError
from headrace.policy.layout import checkpoint, hugging_face
from headrace.policy.model import Model
from headrace.policy.numerics_probe import probe
from headrace.training.batches.batch import Batch, build
from headrace.training.figures.work import expert_load
from headrace.training.gradient import Recipe
from headrace.training.guard import StateSnapshot
from headrace.training.outcome import StepOutcome
from headrace.training.served.versions import Versions
from headrace.training.state import TrainerState
from headrace.training.step import take
from headrace.weights import tensor_state
from headrace.weights.publishing.encoding import Encoding, describe
from headrace.weights.receiving.staging import StagedFile
from headrace.weights.snapshot import Snapshot
from tests.support.world import CONFIG, POLICY, batch
from tests.training.test_trainer import advance, changed, prepare

MIXTURE = msgspec.structs.replace(
    POLICY, scores="sigmoid", model_type="glm4_moe", experts=8, dense_layers=1, layers=3, rotary_dim=16
)
NUMERICS = probe(MIXTURE)
RATE = 0.02


def mixture(seed: int = 0) -> TrainerState:
    return TrainerState(Model(MIXTURE, NUMERICS, seed=seed))


def sampled(state: TrainerState) -> Batch:
    """A batch that the current version samples."""
    manifest, trajectories, scores = batch({state.version: state.model}, state.version, [state.version] * 4)
    return build(manifest.groups, trajectories, scores)


def taken(state: TrainerState, made: Batch, rate: float = RATE, **changes: Any) -> StepOutcome:
    algorithm = msgspec.structs.replace(CONFIG.algorithm, balance_rate=rate, **changes)
    return take(state, made, Recipe(algorithm, 64, bound=1))


def corrections(state: TrainerState) -> list[list[float]]:
    return [state.model.get_parameter(f"layers.{layer}.correction").tolist() for layer in (1, 2)]


def test_a_step_moves_every_correction_towards_the_mean_load() -> None:
    balanced, plain = mixture(), mixture()
    made = sampled(balanced)
    before = balanced.hash()
    balanced.new_log()
    taken(balanced, made)
    wanted = []
    for layer in (0, 1):  # of those that route; the first layer of the three is dense
        rows = [0] * 8
        for segment in made.segments:
            assert segment.routed is not None
            for expert in segment.routed[:, layer].flatten().tolist():
                rows[expert] += 1
        mean = sum(rows) / 8
        wanted.append([0.0 if row == mean else RATE if row < mean else -RATE for row in rows])
    assert corrections(balanced) == [pytest.approx(layer) for layer in wanted]
    assert {value > 0.0 for layer in wanted for value in layer} == {True, False}
    taken(plain, made, rate=0.0)
    assert corrections(plain) == [[0.0] * 8] * 2, "off by default"
    for name, parameter in plain.model.named_parameters():  # the gradient is the same, bit for bit
        assert name.endswith("correction") or torch.equal(parameter, balanced.model.get_parameter(name)), name
    assert balanced.hash() not in (before, plain.hash())


def test_earlier_versions_have_their_own_corrections() -> None:
    state = mixture()
    versions = Versions(state.model, 0)
    state.new_log()
    taken(state, sampled(state))
    versions.advance(1, state.new_log())
    assert not versions[0].get_parameter("layers.1.correction").any()
    assert versions[1].get_parameter("layers.1.correction").any()


def test_a_refused_step_and_a_rollback_take_corrections_along() -> None:
    state = mixture()
    taken(state, sampled(state))
    before, held = state.hash(), StateSnapshot.of(state)
    refused = taken(state, sampled(state), max_grad_norm=1e-9)
    assert (refused.failed, state.hash()) == ("gradient_spike", before)
    taken(state, sampled(state))
    assert state.hash() != before
    held.restore(state)
    assert state.hash() == before


def run(folder: Path, **sections: Any) -> Config:
    """A run of this mixture, from a folder with its weights."""
    if not (folder / "model").exists():
        checkpoint.save(folder / "model", mixture().model, MIXTURE)
    policy = {"checkpoint": str(folder / "model")}
    return changed(policy=policy, **({"algorithm": {"balance_rate": RATE}} | sections))


def test_a_balanced_run_stays_exact_and_resumes_bit_equal(tmp_path: Path) -> None:
    """Tokens of two versions with other corrections are scored again by the versions that sampled them."""
    first = prepare(tmp_path / "a", run(tmp_path))
    outcomes = advance(first, 2)
    first.save({})
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    outcomes += advance(first, 2)
    for outcome in outcomes:
        assert (outcome.failed, outcome.exact, outcome.max_abs_dlp) == ("", True, 0.0)
        assert outcome.rescored_tokens and all(engine.flips == 0.0 for engine in outcome.engines)
        assert outcome.work.expert_load > 1.0
    second = prepare(tmp_path / "b", run(tmp_path))
    assert [outcome.state_hash for outcome in advance(second, 2)] == [outcome.state_hash for outcome in outcomes[2:]]
    published = tensor_state.read(first.publish(tmp_path).durable.result())
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(published[name], first.state.model.get_parameter("layers.1.correction"))
    assert len(set(published[name].tolist())) > 2, "rates of several steps add up"
    for trainer in (first, second):
        trainer.close()


def test_a_delta_carries_corrections_alone_where_no_attempt_has_an_advantage(tmp_path: Path) -> None:
    """A receiver that builds version 1 from version 0 and the delta has the trainer's bytes."""
    state = mixture()
    files = [tmp_path / "0", tmp_path / "1"]
    first = tensor_state.write(files[0], state.published())
    manifest, trajectories, scores = batch({0: state.model}, 0, [0] * 4)
    equal = {seq: msgspec.structs.replace(score, reward=1.0) for seq, score in scores.items()}
    outcome = taken(state, build(manifest.groups, trajectories, equal))
    assert (outcome.failed, outcome.computed_tokens, state.step) == ("", 0, 0)
    assert tensor_state.write(files[1], state.published()) == outcome.state_hash != first
    base, target = map(Snapshot, files)
    full, delta = Encoding(base, None), Encoding(target, base)
    list(full.pieces())
    chunks = [(describe(data, shard, seq, 0), data) for seq, (shard, data) in enumerate(delta.pieces())]
    made = delta.manifest("r", 1, [info for info, _ in chunks], base=full.manifest("r", 0, [], base=None))
    with StagedFile(tmp_path / "built", made, base) as staged:
        for info, data in chunks:
            staged.add(info, data)
        assert staged.finish() == outcome.state_hash
    assert delta.changed == sum(value != 0.0 for layer in corrections(state) for value in layer) > 0


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"policy": {"checkpoint": ""}}, "no correction of its router"),
        ({"weights": {"precision": "bf16"}}, "precision"),
        ({"trainer": {"lora": msgspec.structs.replace(CONFIG.trainer.lora, rank=2)}}, "rank"),
        ({"trainer": {"frozen": ("layers.1.*",)}}, "frozen"),
    ],
    ids=["softmax", "precision", "adapters", "frozen"],
)
def test_what_cannot_be_balanced_is_refused(tmp_path: Path, sections: dict[str, Any], reason: str) -> None:
    config = changed(**({"policy": {"checkpoint": run(tmp_path).policy.checkpoint}} | sections))
    hugging_face.of_run(config)
    balanced = msgspec.structs.replace(config.algorithm, balance_rate=RATE)
    with pytest.raises(CheckpointError, match=rf"balance_rate.*{reason}|{reason}.*balance_rate"):
        prepare(tmp_path / "run", msgspec.structs.replace(config, algorithm=balanced))


def test_frozen_weights_beside_the_corrections_are_no_obstacle(tmp_path: Path) -> None:
    assert hugging_face.of_run(run(tmp_path, trainer={"frozen": ("embedding", "layers.*.router")})).scores == "sigmoid"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_load_falls_with_the_correction_and_not_without(seed: int) -> None:
    """80 steps of RL. Without a balance the rewarded tokens come to one pair of experts, 4 times the mean load of 8."""
    loads: dict[float, list[float]] = {}
    rewards: dict[float, float] = {}
    for rate in (0.0, 0.01):
        state, loads[rate] = mixture(seed), []
        for _ in range(80):
            made = sampled(state)
            loads[rate].append(expert_load(MIXTURE, made.segments))
            assert not taken(state, made, rate, learning_rate=2e-3).failed
        rewards[rate] = made.reward
    start, plain, balanced = fmean(loads[0.0][:5]), fmean(loads[0.0][-10:]), fmean(loads[0.01][-10:])
    print(f"seed {seed}: load {start:.2f}, then {plain:.2f} without and {balanced:.2f} with; rewards {rewards}")
    assert plain > start > balanced
    assert balanced < 0.75 * plain
    assert rewards[0.01] > rewards[0.0] - 0.1, "it does not cost the reward"
