"""Every engine's mismatch for itself: measured, named, and answered as the configuration says."""

import dataclasses
import math
from pathlib import Path

import msgspec
import pytest
import torch

from headrace.config import Algorithm, Config, Numerics
from headrace.messages.base import Array
from headrace.messages.rollout import Trajectory
from headrace.replay.recipe import changed, recipe
from headrace.training.batches.batch import build
from headrace.training.mismatch import Measured, TooFar, above, answer, compare, measure
from headrace.training.outcome import StepOutcome
from headrace.training.trainer import PolicyTrainer
from tests.support.segments import segments_of
from tests.support.world import CONFIG, NUMERICS, TOKENIZER, Records, batch, episode, model


def spoilt(trajectory: Trajectory, by: float) -> Trajectory:
    """As from an engine whose log-probabilities are off, and whose first token went elsewhere in one layer."""
    turns = []
    for turn in trajectory.turns:
        assert turn.routed is not None
        routes = bytearray(turn.routed.data)
        routes[0], routes[1] = (routes[0] + 1) % 4, (routes[0] + 2) % 4
        turns.append(
            msgspec.structs.replace(
                turn,
                logprobs=Array.of([x + by for x in turn.logprobs.tolist()], "<f4"),
                routed=Array(turn.routed.dtype, turn.routed.shape, bytes(routes)),
            )
        )
    return msgspec.structs.replace(trajectory, turns=tuple(turns))


def mixed(by: float = 0.5) -> Records:
    """A batch of two engines: `good` is the trainer's like, `bad` is neither of its bits nor of its fingerprint."""
    manifest, trajectories, scores = batch({0: model()}, 0, [0, 0, 0, 0])
    for seq, trajectory in trajectories.items():
        if trajectory.slot % 2:
            made = spoilt(trajectory, by) if by else trajectory
            trajectories[seq] = msgspec.structs.replace(made, rollout="bad", fingerprint="another cpu")
        else:
            trajectories[seq] = msgspec.structs.replace(trajectory, rollout="good")
    return manifest, trajectories, scores


def measured(by: float = 0.5, sample: int = 16) -> Measured:
    manifest, trajectories, scores = mixed(by)
    made = build(manifest.groups, trajectories, scores)
    return measure({0: model()}, made, trajectories.values(), sample, 1, NUMERICS.fingerprint)


def test_every_token_of_a_re_scored_trajectory_has_its_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    gaps = measured(0.5).gaps
    assert len(gaps) == len({gap.trajectory for gap in gaps}) == 16
    assert [gap.engine for gap in gaps] == ["good", "bad"] * (len(gaps) // 2)
    for gap in gaps:
        assert gap.tokens > 1 and (gap.gaps is None) == (gap.engine == "good")
        if gap.gaps is not None:
            assert len(gap.gaps) == gap.tokens and gap.gaps.tolist() == pytest.approx([-0.5] * gap.tokens, abs=1e-6)
    assert len(measured(0.5, sample=1).gaps) == 1
    monkeypatch.setattr("headrace.training.mismatch.GAPS_KEPT", 2)
    assert [len(gap.gaps) for gap in measured(0.5).gaps if gap.gaps is not None] == [2] * (len(gaps) // 2)


def step(tmp_path: Path, by: float = 0.5, **numerics: object) -> StepOutcome:
    limits = msgspec.structs.replace(Numerics(), **numerics)
    config: Config = msgspec.structs.replace(
        CONFIG, numerics=limits, trainer=msgspec.structs.replace(CONFIG.trainer, rescore=16)
    )
    trainer = PolicyTrainer.prepare(config, tmp_path, tokenizer_json=TOKENIZER, traces=tuple)
    trainer.state.model.load_state(model().state())
    return trainer.step(*mixed(by))


def test_one_bad_engine_does_not_drown_in_a_mean() -> None:
    bad, good = measured().engines
    assert (good.engine, good.same_fingerprint, good.tokens) == ("good", True, 32)
    assert (good.k1, good.k3, good.max_abs_dlp, good.differ, good.flips) == (0.0, 0.0, 0.0, 0.0, 0.0)
    assert (bad.engine, bad.fingerprint, bad.same_fingerprint) == ("bad", "another cpu", False)
    assert bad.k1 == pytest.approx(0.5, abs=1e-6)
    assert bad.k3 == pytest.approx(math.exp(-0.5) - 1 + 0.5, abs=1e-6)
    assert bad.max_abs_dlp == pytest.approx(0.5, abs=1e-6) and bad.differ == 1.0
    assert 0.0 < bad.flips < 0.3


def test_an_engine_that_was_not_drawn_is_still_named() -> None:
    mismatches = measured(sample=0)
    assert [engine.engine for engine in mismatches.engines] == ["bad", "good"]
    assert math.isnan(mismatches.rescored.max_abs_dlp) and mismatches.rescored.tokens == 0
    assert [engine.same_fingerprint for engine in mismatches.engines] == [False, True]


def test_a_fingerprint_of_its_own_alone_raises_no_alarm() -> None:
    """A server's arithmetic always has another name than the trainer's."""
    limits = Numerics(limit_k3=0.01)
    agreeing = measured(by=0.0)
    assert not agreeing.engines[0].same_fingerprint
    assert (agreeing.alarm(Numerics()), agreeing.alarm(limits)) == ("", "")
    assert measured().alarm(Numerics()) == "", "no limit is set"
    said = measured().alarm(limits)
    assert said.startswith("k3 ") and said.endswith("other numerics fingerprint than the trainer's: bad (another cpu)")


def test_limits_are_per_engine_and_a_nan_is_above_all_of_them() -> None:
    engines = measured().engines
    assert above(engines, Numerics()) == ""
    assert above(engines, Numerics(limit_k3=0.01)).startswith("k3 0.107 of engine bad is above 0.01")
    assert above(engines[1:], Numerics(limit_k3=1e-9)) == ""
    lost = msgspec.structs.replace(engines[1], k3=math.nan)
    assert above([lost], Numerics(limit_k3=1e9)).startswith("k3 nan of engine good")


def test_the_three_answers() -> None:
    mismatches, algorithm = measured(), Algorithm()
    assert answer(mismatches, Numerics(limit_k3=0.01), algorithm) is algorithm
    assert answer(mismatches, Numerics(on_mismatch="stop"), algorithm) is algorithm, "no limit, no answer"
    masked = answer(mismatches, Numerics(on_mismatch="mask", limit_k3=0.01, mask_ratio=1.5), algorithm)
    assert (masked.weighting, masked.tis_clip) == ("masked", 1.5)
    with pytest.raises(TooFar, match="engine bad"):
        answer(mismatches, Numerics(on_mismatch="stop", limit_k3=0.01), algorithm)


def test_warn_mask_and_stop_on_a_trainer(tmp_path: Path) -> None:
    warned = step(tmp_path / "warn", limit_k3=0.01)
    assert not warned.failed and "of engine bad is above 0.01" in warned.alarm
    assert [engine.engine for engine in warned.engines] == ["bad", "good"] and not warned.exact
    masked = step(tmp_path / "mask", limit_k3=0.01, on_mismatch="mask", mask_ratio=1.2)
    assert not masked.failed and masked.clipped == pytest.approx(0.5, abs=0.2)
    assert masked.state_hash != warned.state_hash
    stopped = step(tmp_path / "stop", limit_k3=0.01, on_mismatch="stop")
    assert (stopped.failed, stopped.version) == ("mismatch_over_limit", 1)
    assert stopped.state_hash != warned.state_hash and "engine bad" in stopped.detail


def test_roll_back_takes_back_what_was_learned_since_the_last_good_version(tmp_path: Path) -> None:
    """One version per step, bound 0: version 2 is good after two batches, a far engine at version 4 undoes the rest."""
    config: Config = msgspec.structs.replace(
        CONFIG,
        numerics=Numerics(on_mismatch="roll_back", limit_k3=0.01),
        trainer=msgspec.structs.replace(CONFIG.trainer, rescore=1),
        curriculum=msgspec.structs.replace(CONFIG.curriculum, staleness=0, groups_per_step=2),
    )

    def played(trainer: PolicyTrainer, by: float = 0.0) -> StepOutcome:
        now = trainer.version
        manifest, trajectories, scores = batch({now: trainer.state.model}, now, [now] * 4, config)
        if by:
            trajectories = {seq: spoilt(trajectory, by) for seq, trajectory in trajectories.items()}
        return trainer.step(manifest, trajectories, scores)

    trainer = PolicyTrainer.prepare(config, tmp_path, tokenizer_json=TOKENIZER, traces=tuple)
    early = played(trainer, by=0.5)
    assert (early.failed, early.restored) == ("mismatch_over_limit", -1) and "no good version" in early.detail
    good = [played(trainer) for _ in range(3)]
    assert not any(outcome.failed for outcome in good) and len({outcome.state_hash for outcome in good}) == 3
    trainer.save({})
    far = played(trainer, by=0.5)
    assert (far.failed, far.restored, far.version) == ("mismatch_over_limit", 2, 5)
    assert far.state_hash == good[0].state_hash and "back to version 2" in far.detail
    assert trainer.guard.factor == 1.0 and trainer.state.step == 1, "the optimizer of that version, at the same rate"
    restarted = PolicyTrainer.prepare(config, tmp_path, tokenizer_json=TOKENIZER, traces=tuple)
    assert played(restarted, by=0.5).state_hash == far.state_hash, "a checkpoint knows where to go back to"


def test_recomputing_activations_gives_the_same_step(tmp_path: Path) -> None:
    plain, again = (step(tmp_path / name, by=0.0, recompute=name == "again") for name in ("plain", "again"))
    assert plain.state_hash == again.state_hash and plain.loss == again.loss


def test_implausible_records_are_dropped_only_when_asked(tmp_path: Path) -> None:
    strict, loose, none = (step(tmp_path / str(share), replay_plausible=share) for share in (0.0, 0.99, 1e-9))
    assert strict.state_hash == none.state_hash != loose.state_hash


def test_a_manifest_names_what_is_not_as_ever() -> None:
    assert not any("numerics" in name for name in recipe(CONFIG))
    limits = Numerics(on_mismatch="mask", limit_k3=0.5)
    told = recipe(msgspec.structs.replace(CONFIG, numerics=limits))
    assert told["numerics.limit_k3"] == 0.5
    assert changed(CONFIG, told).numerics == limits


def test_ordinary_arithmetic_counts_flips_in_a_pass_of_its_own() -> None:
    """There the recorded routes are replayed for the log-probabilities, and live ones only counted."""
    (segment,) = segments_of(episode({0: model()}, "g", 0, 1, [0, 0, 0, 0]))
    plain = model()
    plain.numerics = msgspec.structs.replace(NUMERICS, exact=False)
    assert segment.routed is not None
    forced = dataclasses.replace(segment, routed=(segment.routed + 1) % 4)
    comparison = compare({0: plain}, forced)
    assert comparison.flips > 0 and comparison.routed == segment.routed.shape[0] * 2
    assert float((comparison.trainer - segment.behaviour).abs().max()) > 1e-4, "scored under the forced routes"
    assert torch.allclose(compare({0: plain}, segment).trainer, segment.behaviour, atol=1e-5)
