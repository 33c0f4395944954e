"""A loss and an advantage from outside of headrace: a step uses them and refuses another source."""

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace import registry
from headrace.actors.trainer import records
from headrace.config import Config
from headrace.config.training import Options
from headrace.messages.rollout import Trajectory
from headrace.messages.training import StepManifest
from headrace.training.device import TrainerError
from headrace.training.outcome import StepOutcome
from headrace.training.trainer import PolicyTrainer, plugins_of
from tests.support.world import CONFIG, TOKENIZER, batch

SOURCE = """
import msgspec
from headrace.algorithms.corrections import Corrected

class Floor(msgspec.Struct):
    floor: float = -1e9

def plain(tokens, settings, options: Floor):
    below = tokens.logp.detach() < options.floor
    return Corrected(tokens.advantage * tokens.logp, below, metrics={"logp": tokens.logp, "below": below})

class Factor(msgspec.Struct, frozen=True):
    factor: float
    passed_alone: bool = False

def scaled(group, options: Factor):
    mean = sum(attempt.reward for attempt in group) / len(group)
    assert all(attempt.score.group == attempt.trajectory.group for attempt in group)
    return [
        0.0 if options.passed_alone and not attempt.score.passed else options.factor * (attempt.reward - mean)
        for attempt in group
    ]

def short(group):
    return [0.0]

def flat(tokens, settings):
    return Corrected(tokens.logp.sum(), tokens.logp < 0.0)

def odd_name(tokens, settings):
    return Corrected(tokens.logp, tokens.logp < 0.0, metrics={"k1 {x}": tokens.logp})
"""
NAMES = {"losses": ("plain", "flat", "odd_name"), "advantages": ("scaled", "short")}


@pytest.fixture(autouse=True)
def my_objective(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "my_objective.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    for seam, names in NAMES.items():
        registry.admit(seam, [f"my_objective:{name}" for name in names])
    yield
    sys.modules.pop("my_objective", None)


def settings(
    weighting: str = "truncated", advantage: str = "mean", options: dict[str, dict[str, Any]] | None = None
) -> Config:
    changed = {"weighting": weighting, "advantage": advantage, "options": Options(**(options or {}))}
    return msgspec.structs.replace(CONFIG, algorithm=msgspec.structs.replace(CONFIG.algorithm, **changed))


def taken(config: Config, folder: Path) -> tuple[StepOutcome, StepManifest, dict[int, Trajectory]]:
    """One step of a new policy on its own samples."""
    trainer = PolicyTrainer.prepare(config, folder, tokenizer_json=TOKENIZER, traces=tuple)
    made = batch(dict(trainer.versions), 0, [0, 0, 0, 0], config)
    manifest = records.manifest(config, "r", trainer, made[0].groups, None, ())
    return trainer.step(manifest, *made[1:]), manifest, made[1]


def test_a_step_with_plugins(tmp_path: Path) -> None:
    plugged = settings("my_objective:plain", "my_objective:scaled", {"advantage": {"factor": 2}})
    (usual, _, _), (outcome, manifest, sampled) = taken(CONFIG, tmp_path / "0"), taken(plugged, tmp_path / "1")
    assert outcome.grad_norm == pytest.approx(2.0 * usual.grad_norm, rel=1e-5)
    assert [(plugin.seam, plugin.name) for plugin in manifest.plugins] == [
        ("advantages", "my_objective:scaled"),
        ("losses", "my_objective:plain"),
    ]
    logps = [logp for made in sampled.values() for turn in made.turns for logp in turn.logprobs.tolist()]
    assert usual.metrics == {} and outcome.metrics["below"] == 0.0
    assert outcome.metrics["logp"] == pytest.approx(statistics.fmean(logps), abs=1e-5), "all groups have an advantage"


def test_another_source_is_refused(tmp_path: Path) -> None:
    config = settings("my_objective:plain")
    trainer = PolicyTrainer.prepare(config, tmp_path / "run", tokenizer_json=TOKENIZER, traces=tuple)
    made = batch(dict(trainer.versions), 0, [0, 0, 0, 0], config)
    manifest = records.manifest(config, "r", trainer, made[0].groups, None, ())
    changed = tuple(msgspec.structs.replace(plugin, source="0" * 64) for plugin in manifest.plugins)
    with pytest.raises(TrainerError, match="has source hash"):
        trainer.step(msgspec.structs.replace(manifest, plugins=changed), *made[1:])


def test_options_have_the_types_of_their_plugin(tmp_path: Path) -> None:
    outcome, _, _ = taken(settings("my_objective:plain", options={"loss": {"floor": 0.0}}), tmp_path / "run")
    assert outcome.metrics["below"] == outcome.clipped == 1.0
    alone = {"advantage": {"factor": 1.0, "passed_alone": True}}
    outcome, _, _ = taken(settings(advantage="my_objective:scaled", options=alone), tmp_path / "2")
    assert 0 < outcome.computed_tokens < outcome.tokens, "attempts that failed have no advantage"


@pytest.mark.parametrize(
    ("seam", "name", "options"),
    [
        ("advantage", "my_objective:scaled", {}),
        ("advantage", "my_objective:scaled", {"factor": "two"}),
        ("advantage", "my_objective:scaled", {"factor": 2.0, "fcator": 1.0}),
        ("advantage", "mean", {"factor": 2.0}),
        ("loss", "my_objective:plain", {"floor": [1.0]}),
        ("loss", "truncated", {"floor": 1.0}),
    ],
)
def test_options_that_a_part_does_not_take_are_refused_before_the_run(
    seam: str, name: str, options: dict[str, Any]
) -> None:
    key = "weighting" if seam == "loss" else "advantage"
    changed = {key: name, "options": Options(**{seam: options})}
    with pytest.raises(TrainerError, match=rf"^algorithm\.options\.{seam}"):
        plugins_of(msgspec.structs.replace(CONFIG.algorithm, **changed))


@pytest.mark.parametrize(
    "names",
    [{"advantage": "my_objective:short"}, {"weighting": "my_objective:flat"}, {"weighting": "my_objective:odd_name"}],
)
def test_what_is_not_one_number_for_each_is_an_error_of_the_plugin(tmp_path: Path, names: dict[str, str]) -> None:
    with pytest.raises(registry.PluginError):
        taken(settings(names.get("weighting", "truncated"), names.get("advantage", "mean")), tmp_path / "run")


def test_an_unknown_name_is_refused_before_the_run() -> None:
    with pytest.raises(TrainerError, match=r"expected one of truncated, masked.*or module:attribute, got 'nothing'"):
        plugins_of(msgspec.structs.replace(CONFIG.algorithm, weighting="nothing"))
