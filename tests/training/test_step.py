import dataclasses
import functools
import math
from typing import Any

import msgspec
import pytest
import torch

from headrace.algorithms.adamw import OptimizerSettings
from headrace.config import Algorithm, parse
from headrace.policy.seam import PolicyModel
from headrace.training.batches.batch import Batch, build
from headrace.training.batches.micro_batch import micro_batches
from headrace.training.batches.segment import Segment
from headrace.training.gradient import Helpers, Recipe, accumulate, minibatches
from headrace.training.outcome import StepOutcome
from headrace.training.schedule import learning_rate
from headrace.training.state import TrainerState
from headrace.training.step import take
from tests.support.world import CONFIG, POLICY, batch, model


@functools.cache
def played(version: int) -> Any:
    """Manifest, trajectories and scores of one batch: records, which no test changes."""
    return batch({0: model()}, version, [0, 0, 0, 0])


def made(version: int = 0, **changes: float) -> Batch:
    manifest, trajectories, scores = played(version)
    scores = {seq: msgspec.structs.replace(score, **changes) for seq, score in scores.items()}
    return build(manifest.groups, trajectories, scores)


def one_step(state: TrainerState, data: Batch, micro_tokens: int = 64, **changes: object) -> StepOutcome:
    algorithm = msgspec.structs.replace(CONFIG.algorithm, **changes)
    return take(state, data, Recipe(algorithm, micro_tokens, bound=1))


def test_the_same_inputs_give_the_same_bits() -> None:
    outcomes = []
    for _ in range(2):
        state = TrainerState(model())
        outcomes.append([one_step(state, made()), one_step(state, made())])
    assert [o.state_hash for o in outcomes[0]] == [o.state_hash for o in outcomes[1]]
    assert outcomes[0][0].state_hash != outcomes[0][1].state_hash


def test_trainer_and_sampler_agree_on_fresh_samples() -> None:
    outcome = one_step(TrainerState(model()), made())
    assert outcome.k1 == outcome.k3 == 0.0
    assert outcome.clipped == 0.0
    assert 0 < outcome.entropy < 6
    assert (outcome.version, outcome.tokens, outcome.trained_slots, outcome.staleness) == (1, 64, 16, {"0": 64})


def test_stale_samples_are_seen_and_weighed() -> None:
    state = TrainerState(model())
    one_step(state, made())
    outcome = one_step(state, made())
    assert outcome.staleness == {"1": 64}
    assert outcome.staleness_max == 1
    assert outcome.k3 > 0.0
    refused = one_step(state, made())
    assert refused.failed == "too_stale"
    assert refused.version == 3


def test_the_gradient_is_that_of_the_objective() -> None:
    state, data = TrainerState(model()), made()
    figures = accumulate(state, data, Recipe(CONFIG.algorithm, 10_000))
    head = state.model.get_parameter("head")
    nudge = 1e-3 * torch.randn(head.shape, generator=torch.Generator().manual_seed(1))
    assert head.grad is not None
    slope = float((head.grad * nudge).sum())

    def objective(sign: float) -> float:
        with torch.no_grad():
            head.add_(nudge, alpha=sign)
            total = 0.0
            for segment in data.segments:
                hidden = state.model(segment.ids, [len(segment.ids)], segment.routed)
                logp, _ = state.model.selected_logprobs(hidden[segment.positions], segment.targets, 1.0)
                total -= segment.advantage * float(logp.double().sum())
            head.sub_(nudge, alpha=sign)
        return total / (data.trajectories * CONFIG.algorithm.constant_tokens)

    assert (objective(1.0) - objective(-1.0)) / 2 == pytest.approx(slope, rel=1e-2)
    assert figures.loss == pytest.approx(objective(0.0), rel=1e-4)


def test_micro_batches_change_only_the_rounding() -> None:
    norms = []
    for tokens in (16, 64, 10_000):
        state = TrainerState(model())
        accumulate(state, made(), Recipe(CONFIG.algorithm, tokens))
        norms.append(state.gradient_norm())
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-5)
    assert len(micro_batches(made().segments, 16, POLICY)) == 8
    assert len(micro_batches(made().segments, 10_000, POLICY)) == 1


def test_groups_without_advantage_are_counted_but_not_computed() -> None:
    state = TrainerState(model())
    before = state.hash()
    outcome = one_step(state, made(reward=1.0))
    assert (outcome.failed, outcome.computed_tokens, outcome.trained_slots, outcome.tokens) == ("", 0, 16, 64)
    assert outcome.state_hash == before
    assert (outcome.version, state.step) == (1, 0)


def cut_off(data: Batch, names: set[str]) -> Batch:
    """The batch, as if a limit of length had ended these attempts."""
    segments = [dataclasses.replace(segment, cut_off=segment.trajectory in names) for segment in data.segments]
    return dataclasses.replace(data, segments=tuple(segments))


@pytest.mark.parametrize(
    "objective",
    [{}, {"constant_tokens": 0}, {"sequence_mean": True, "kl_weight": 0.5}, {"minibatches": 2, "weighting": "clipped"}],
    ids=["constant", "tokens", "mean and KL", "minibatches"],
)
def test_overlong_attempts_are_masked_and_stay_in_the_baseline(objective: dict[str, Any]) -> None:
    """The loss is that of a batch without these attempts, whose others have the advantages of the whole group."""
    data = made()
    names = {segment.trajectory for segment in data.segments if segment.trajectory.endswith("-1-0")}  # slot 1 of each
    assert len(names) == 4 and any(segment.trained for segment in data.segments if segment.trajectory in names)
    rest = tuple(segment for segment in data.segments if segment.trajectory not in names)
    without = dataclasses.replace(data, segments=rest, trajectories=data.trajectories - 4)

    def taken(batch: Batch, **changes: Any) -> StepOutcome:
        algorithm = msgspec.structs.replace(CONFIG.algorithm, **objective, **changes)
        return take(TrainerState(model()), batch, Recipe(algorithm, 64, bound=1), helpers=Helpers(model(seed=1)))

    masked, expected = taken(cut_off(data, names), overlong="mask"), taken(without)
    assert (masked.state_hash, masked.loss, masked.grad_norm) == (
        expected.state_hash,
        expected.loss,
        expected.grad_norm,
    )
    assert masked.computed_tokens == expected.computed_tokens
    assert (masked.trained_slots, masked.tokens, masked.reward_mean) == (16, 64, data.reward), "figures of all attempts"
    assert taken(cut_off(data, names)).state_hash == taken(data).state_hash != masked.state_hash, "the default trains"


def test_a_batch_of_masked_attempts_alone_changes_nothing() -> None:
    state, data = TrainerState(model()), made()
    before = state.hash()
    outcome = one_step(state, cut_off(data, {segment.trajectory for segment in data.segments}), overlong="mask")
    assert (outcome.failed, outcome.computed_tokens, outcome.state_hash) == ("", 0, before)


def test_a_step_says_the_share_of_tokens_that_dual_clip_bounds() -> None:
    data = made()
    fallen = [segment for segment in data.segments if segment.advantage < 0.0][:2]
    for segment in fallen:
        segment.behaviour[0] -= 13.0
    wild = one_step(TrainerState(model()), data, weighting="clipped")
    held = one_step(TrainerState(model()), data, weighting="clipped", dual_clip=3.0)
    assert wild.dual_clipped == 0.0 and held.dual_clipped == held.clipped == 2 / held.computed_tokens
    assert wild.grad_norm > 1000 * held.grad_norm > 0.0


def test_a_refused_step_keeps_the_bytes() -> None:
    state = TrainerState(model())
    before = state.hash()
    with torch.no_grad():
        spoilt = made()
        spoilt.segments[0].behaviour.fill_(float("nan"))
    outcome = one_step(state, spoilt)
    assert outcome.failed == "loss_not_finite"
    assert "nan" in outcome.detail
    assert (outcome.state_hash, outcome.version, outcome.trained_slots) == (before, 1, 0)
    assert one_step(state, made(), max_grad_norm=1e-9).failed == "gradient_spike"
    assert state.hash() == before


def test_routes_are_replayed() -> None:
    """Forcing other experts changes the log-probabilities; the recorded ones give the sampler's."""
    data = made()
    forced = []
    for segment in data.segments:
        assert segment.routed is not None
        forced.append(dataclasses.replace(segment, routed=(segment.routed + 1) % 4))
    outcome = one_step(TrainerState(model()), dataclasses.replace(data, segments=tuple(forced)))
    assert outcome.k3 > 1e-6


def test_kl_holds_a_policy_to_its_reference() -> None:
    moved, reference = TrainerState(model()), model()
    one_step(moved, made())
    algorithm = msgspec.structs.replace(CONFIG.algorithm, kl_weight=0.5)
    outcome = take(moved, made(reward=0.0), Recipe(algorithm, 64, bound=9), helpers=Helpers(reference))
    assert outcome.computed_tokens == 64  # without an advantage the KL term still pulls
    assert outcome.grad_norm > 0.0


def test_tokens_far_off_policy_can_be_masked() -> None:
    losses, cut = [], []
    for weighting in ("truncated", "masked"):
        data = made()
        for segment in data.segments:
            segment.behaviour.sub_(1.0)  # every ratio is e
        outcome = one_step(TrainerState(model()), data, weighting=weighting)
        losses.append(outcome.grad_norm)
        cut.append(outcome.clipped)
    assert cut == [1.0, 1.0]
    assert losses[0] > 0.0
    assert losses[1] == 0.0


def test_warm_up() -> None:
    algorithm = Algorithm(learning_rate=1.0, warmup_steps=4)
    assert [learning_rate(algorithm, step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_schedules_fall_from_the_peak_to_their_floor() -> None:
    linear = Algorithm(schedule="linear", learning_rate=1.0, warmup_steps=2, decay_steps=4)
    assert [learning_rate(linear, step) for step in range(8)] == pytest.approx(
        [0.5, 1.0, 0.775, 0.55, 0.325, 0.1, 0.1, 0.1]
    )
    cosine = [learning_rate(msgspec.structs.replace(linear, schedule="cosine"), step) for step in range(8)]
    assert cosine[:2] == [0.5, 1.0] and cosine[3] == pytest.approx(0.55) and cosine[5:] == pytest.approx([0.1] * 3)
    with pytest.raises(ValueError, match="decay_steps"):
        Algorithm(schedule="cosine")


def test_weight_decay_and_betas_reach_the_optimizer() -> None:
    state = TrainerState(model())
    before = {name: master.clone() for name, master in state.master.items()}
    state.configure(OptimizerSettings((0.5, 0.6), weight_decay=0.1))
    for parameter in state.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    state.apply(1e-1)
    for name, master in state.master.items():  # without a gradient only the decay moves a weight
        spared = "norm" in name or name == "embedding"
        assert torch.equal(master, before[name] * (1.0 if spared else 1.0 - 1e-1 * 0.1)), name


WEIGHTINGS = ["truncated", "masked", "clipped", "decoupled", "sequence", "sequence_masked"]


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_on_policy_every_correction_takes_the_same_step(weighting: str) -> None:
    plain = one_step(TrainerState(model()), made())
    other = one_step(TrainerState(model()), made(), weighting=weighting)
    assert other.grad_norm == pytest.approx(plain.grad_norm, rel=1e-4)
    assert other.clipped == 0.0


@pytest.mark.parametrize("weighting", ["truncated", "decoupled"])
def test_a_batch_may_be_several_updates(weighting: str) -> None:
    state = TrainerState(model())
    outcome = one_step(state, made(), minibatches=4, weighting=weighting)
    assert (outcome.failed, outcome.version, state.step) == ("", 1, 4)
    assert (outcome.k1, outcome.computed_tokens) == (0.0, 64), "said of the model before the step"
    assert outcome.state_hash != one_step(TrainerState(model()), made(), weighting=weighting).state_hash
    again = one_step(TrainerState(model()), made(), minibatches=4, weighting=weighting)
    assert outcome.state_hash == again.state_hash


def test_minibatches_are_whole_trajectories_in_their_order() -> None:
    segments = made().segments
    parts = minibatches(segments, 3)
    assert [len(part) for part in parts] == [5, 5, 6]
    assert [segment for part in parts for segment in part] == list(segments)
    assert [len(part) for part in minibatches(segments[:2], 5)] == [1, 1]
    assert minibatches([], 3) == [[]]


def test_a_later_update_that_is_refused_takes_the_earlier_ones_back() -> None:
    state, data = TrainerState(model()), made()
    before = state.hash()
    wild = [dataclasses.replace(segment, advantage=1e4) for segment in data.segments[8:]]
    spoilt = dataclasses.replace(data, segments=(*data.segments[:8], *wild))
    outcome = one_step(state, spoilt, minibatches=2, max_grad_norm=100.0)
    assert (outcome.failed, outcome.state_hash, state.step) == ("gradient_spike", before, 0)
    fresh = TrainerState(model())
    fresh.version = 1
    assert one_step(state, made()).state_hash == one_step(fresh, made()).state_hash, "the optimizer too"


def test_a_step_takes_its_objective_from_toml() -> None:
    """GSPO's ratios and means, an asymmetric band and k3, against the same loss written out per segment."""
    state, reference, data = TrainerState(model()), model(), made()
    one_step(state, data)  # so that ratios and KL are not those of equal policies

    def logprobs(own: PolicyModel, segment: Segment) -> torch.Tensor:
        with torch.no_grad():
            hidden = own(segment.ids, [len(segment.ids)], segment.routed)[segment.positions]
            return own.selected_logprobs(hidden, segment.targets, 1.0)[0].double()

    pairs = [(logprobs(state.model, segment), logprobs(reference, segment)) for segment in data.segments]
    ratios = [math.exp(float((now - s.behaviour).mean())) for s, (now, _) in zip(data.segments, pairs, strict=True)]
    raised = [ratio for ratio, segment in zip(ratios, data.segments, strict=True) if segment.advantage > 0.0]
    high = (min(raised) + max(raised)) / 2  # cuts some of them, and spares others
    config = parse(f"""
    [algorithm]
    weighting = "sequence"
    ratio_low = 1e-6
    ratio_high = {high!r}
    sequence_mean = true
    kl = "k3"
    kl_weight = 0.1
    """)
    wanted = 0.0
    for segment, ratio, (now, before) in zip(data.segments, ratios, pairs, strict=True):
        bounded = min(ratio, high) if segment.advantage > 0.0 else ratio
        gap = before - now
        wanted -= bounded * segment.advantage - 0.1 * float((gap.exp() - 1.0 - gap).mean())
    outcome = take(state, data, Recipe(config.algorithm, 64, bound=1), helpers=Helpers(reference))
    assert outcome.loss == pytest.approx(wanted / len(data.segments), rel=1e-3, abs=1e-5)
    cut = sum(
        len(s.targets) for s, ratio in zip(data.segments, ratios, strict=True) if s.advantage > 0 and ratio > high
    )
    assert outcome.clipped == cut / outcome.computed_tokens > 0.0
    assert not outcome.failed and outcome.grad_norm > 0.0
