import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from headrace.config import Config
from headrace.policy.config import CheckpointError
from headrace.policy.layout import hugging_face
from headrace.policy.model import Model
from headrace.policy.seam import PolicyModel
from headrace.training.device import TrainerError
from headrace.training.figures.work import Work, work_of
from headrace.training.outcome import StepOutcome
from headrace.training.trainer import PolicyTrainer
from headrace.weights import snapshot, tensor_state
from tests.support.paths import ROOT
from tests.support.recorded_run import without_logprobs
from tests.support.world import CONFIG, NUMERICS, TOKENIZER, batch
from tests.training.test_mid_training import texts


def prepare(folder: Path, config: Config = CONFIG) -> PolicyTrainer:
    return PolicyTrainer.prepare(config, folder, tokenizer_json=TOKENIZER, traces=texts)


def changed(**sections: Mapping[str, object]) -> Config:
    return msgspec.structs.replace(
        CONFIG, **{name: msgspec.structs.replace(getattr(CONFIG, name), **keys) for name, keys in sections.items()}
    )


def models(trainer: PolicyTrainer) -> dict[int, PolicyModel]:
    return dict(trainer.versions)


def advance(trainer: PolicyTrainer, steps: int) -> list[StepOutcome]:
    """Each batch begins under the version before and is finished by the current one."""
    outcomes = []
    for _ in range(steps):
        now = trainer.version
        before = max(0, now - 1)
        outcomes.append(trainer.step(*batch(models(trainer), now, [before, now, now, now], trainer.config)))
    return outcomes


@pytest.mark.parametrize("steps", [8, pytest.param(25, marks=pytest.mark.slow)])
def test_stale_samples_keep_every_law_and_teach(tmp_path: Path, steps: int) -> None:
    outcomes = advance(prepare(tmp_path), steps)
    assert [outcome.version for outcome in outcomes] == list(range(1, steps + 1))
    first, last = (sum(o.reward_mean for o in part) / 4 for part in (outcomes[:4], outcomes[-4:]))
    assert last > first + (0.25 if steps > 20 else 0.0)
    assert all(outcome.max_abs_dlp == 0.0 for outcome in outcomes)
    assert all(outcome.rescored_tokens == 12 and outcome.exact and not outcome.failed for outcome in outcomes)
    assert outcomes[5].staleness == {"0": 48, "1": 16}
    assert len({outcome.state_hash for outcome in outcomes}) == steps


def test_a_frozen_rounded_policy_is_published_exactly_and_resumed_bit_equal(tmp_path: Path) -> None:
    config = changed(trainer={"frozen": ("embedding", "layers.0.*")}, weights={"precision": "bf16"})
    trainer = prepare(tmp_path, config)
    first = trainer.state.published()
    outcomes = advance(trainer, 2)
    assert all(outcome.max_abs_dlp == 0.0 and outcome.exact and not outcome.failed for outcome in outcomes)
    published = trainer.state.published()
    assert all(torch.equal(value, value.bfloat16().float()) for value in published.values())
    same = {name for name, value in published.items() if torch.equal(value, first[name])}
    assert {name for name in published if "embed" in name or ".layers.0." in name} <= same < set(published)
    trainer.save({})
    assert prepare(tmp_path, config).state.hash() == trainer.state.hash()


@pytest.mark.parametrize("pattern", ["layers.9.*", "*"])
def test_frozen_parameters_must_exist_and_leave_some(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(CheckpointError, match="frozen"):
        prepare(tmp_path, changed(trainer={"frozen": (pattern,)}))


def test_a_killed_trainer_goes_on_bit_equal(tmp_path: Path) -> None:
    whole = [o.state_hash for o in advance(prepare(tmp_path / "a"), 6)]
    first = prepare(tmp_path / "b")
    advance(first, 3)
    first.save({"close_seq": 12})
    advance(first, 1)  # lost by the kill, and taken again
    second = prepare(tmp_path / "b")
    assert second.resumed
    assert (second.version, second.position, set(second.versions.earlier)) == (3, {"close_seq": 12}, {2})
    assert [o.state_hash for o in advance(second, 3)] == whole[3:]


def test_a_trainer_that_scores_nothing_again_holds_no_earlier_version(tmp_path: Path) -> None:
    scored, plain = prepare(tmp_path / "a"), prepare(tmp_path / "b", changed(trainer={"rescore": 0}))
    for now in range(3):
        taken = batch(models(scored), now, [max(0, now - 1), now, now, now], scored.config)
        assert scored.step(*taken).state_hash == plain.step(*taken).state_hash
    assert scored.versions.nbytes > 0 and scored.state.log is not None
    assert plain.versions.nbytes == 0 and not plain.versions.earlier and plain.state.log is None
    plain.save({})
    assert prepare(tmp_path / "b", changed(trainer={"rescore": 0})).state.log is None


def test_resuming_another_machine_copy_gives_the_same(tmp_path: Path) -> None:
    first = prepare(tmp_path / "a")
    advance(first, 2)
    first.save({})
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert advance(first, 2)[-1].state_hash == advance(prepare(tmp_path / "b"), 2)[-1].state_hash


def test_publishes_the_served_bytes(tmp_path: Path) -> None:
    trainer = prepare(tmp_path)
    (outcome,) = advance(trainer, 1)
    publication = trainer.publish(tmp_path)
    assert publication.hashed.result() == outcome.state_hash
    path = publication.durable.result()
    served = Model(hugging_face.read(trainer.policy_folder), NUMERICS, seed=None)
    served.load_state(tensor_state.read(path))
    assert snapshot.file_hash(path) == outcome.state_hash


def test_mid_training_comes_first_and_is_not_repeated(tmp_path: Path) -> None:
    config = changed(mid_training={"tokens": 500, "batch_tokens": 100})
    seen: list[int] = []
    made = PolicyTrainer.prepare(
        config, tmp_path, tokenizer_json=TOKENIZER, traces=texts, progress=lambda p: seen.append(p.tokens)
    )
    assert seen[-1] >= 500
    assert made.version == 0
    assert made.state.hash() != prepare(tmp_path / "untrained").state.hash()
    again = PolicyTrainer.prepare(config, tmp_path, tokenizer_json=TOKENIZER, traces=lambda: [])
    assert again.resumed
    assert again.state.hash() == made.state.hash()


KILLED = """
import itertools, os, signal, sys
from pathlib import Path
from headrace.training import mid_training
from headrace.training.trainer import PolicyTrainer
from tests.training.test_mid_training import texts
from tests.training.test_trainer import MIDDLE
from tests.support.world import TOKENIZER

def until(count):
    yield from itertools.islice(texts(), count)
    os.kill(os.getpid(), signal.SIGKILL)

mid_training.KEEP_S = 0.0
mid_training.KEEP_SHARE = float('inf')
PolicyTrainer.prepare(MIDDLE, Path(sys.argv[1]), tokenizer_json=TOKENIZER, traces=lambda: until(int(sys.argv[2])))
"""
MIDDLE = changed(mid_training={"tokens": 1500, "batch_tokens": 100, "processes": 2})


@pytest.mark.slow
def test_kill_9_in_the_middle_of_mid_training_changes_no_bit(tmp_path: Path) -> None:
    never = PolicyTrainer.prepare(MIDDLE, tmp_path / "never", tokenizer_json=TOKENIZER, traces=texts)
    for texts_read in ("50", "90"):
        line = [sys.executable, "-c", KILLED, str(tmp_path / "killed"), texts_read]
        killed = subprocess.run(line, cwd=ROOT)
        assert killed.returncode == -signal.SIGKILL
        assert (tmp_path / "killed" / "mid-training.safetensors").exists()
        assert not (tmp_path / "killed" / "checkpoint.safetensors").exists()
    again = PolicyTrainer.prepare(MIDDLE, tmp_path / "killed", tokenizer_json=TOKENIZER, traces=texts)
    assert again.state.hash() == never.state.hash()
    assert not (tmp_path / "killed" / "mid-training.safetensors").exists()


def test_a_bad_batch_moves_the_version_and_not_the_bytes(tmp_path: Path) -> None:
    trainer = prepare(tmp_path)
    before = trainer.state.hash()
    manifest, trajectories, scores = batch(models(trainer), 0, [0, 0, 0, 0])
    unscored = {seq: without_logprobs(made) for seq, made in trajectories.items()}
    cases = [("bad_batch", unscored), ("bad_batch", {})]
    for number, (reason, records) in enumerate(cases):
        outcome = trainer.step(msgspec.structs.replace(manifest, version=number), records, scores)
        assert (outcome.failed, outcome.version, outcome.state_hash) == (reason, number + 1, before)
        assert outcome.detail
    assert not advance(trainer, 1)[0].failed


def test_the_work_of_a_step_is_computed_beside_its_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, computed = prepare(tmp_path), threading.Event()

    def late(*arguments: Any) -> Work:
        assert computed.wait(30.0), "the gradient waits for it"
        return work_of(*arguments)

    monkeypatch.setattr("headrace.training.trainer.work_of", late)
    outcome = trainer.step(*batch(models(trainer), 0, [0] * 4), computed.set)
    assert not outcome.failed and outcome.work.trained_tokens == outcome.computed_tokens > 0


def test_a_manifest_of_another_version_is_the_callers_mistake(tmp_path: Path) -> None:
    trainer = prepare(tmp_path)
    records = batch(models(trainer), 0, [0, 0, 0, 0])
    trainer.step(*records)
    with pytest.raises(ValueError, match="updates version 0, this is 1"):
        trainer.step(*records)


def test_the_reference_policy_survives_a_restart(tmp_path: Path) -> None:
    config = changed(algorithm={"kl_weight": 0.1})
    first = prepare(tmp_path / "a", config)
    hashes = [o.state_hash for o in advance(first, 4)]
    other = prepare(tmp_path / "b", config)
    advance(other, 2)
    other.save({})
    assert [o.state_hash for o in advance(prepare(tmp_path / "b", config), 2)] == hashes[2:]


def test_a_run_keeps_its_policy_and_tokenizer(tmp_path: Path) -> None:
    prepare(tmp_path)
    with pytest.raises(TrainerError, match=r"config\.json is of another policy"):
        prepare(tmp_path, changed(policy={"dim": 64}))
    with pytest.raises(TrainerError, match=r"tokenizer\.json is of another policy"):
        PolicyTrainer.prepare(CONFIG, tmp_path, tokenizer_json=TOKENIZER + " ", traces=texts)
    with pytest.raises(TrainerError, match="vocab = 300"):
        prepare(tmp_path / "b", changed(policy={"vocab": 300}))
