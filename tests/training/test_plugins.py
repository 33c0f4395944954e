"""A loss and an advantage from outside of headrace: a step uses them and refuses another source."""

from pathlib import Path

import msgspec
import pytest

from headrace import registry
from headrace.actors.trainer import records
from headrace.training.device import TrainerError
from headrace.training.trainer import PolicyTrainer, plugins_of
from tests.support.world import CONFIG, TOKENIZER, batch

SOURCE = """
from headrace.algorithms.corrections import Corrected

def plain(tokens, settings):
    return Corrected(tokens.advantage * tokens.logp, tokens.logp < -1e9)

def doubled(rewards):
    mean = sum(rewards) / len(rewards)
    return [2.0 * (reward - mean) for reward in rewards]
"""


def test_a_step_with_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_objective.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    registry.admit("losses", ["my_objective:plain"])
    registry.admit("advantages", ["my_objective:doubled"])
    names = {"weighting": "my_objective:plain", "advantage": "my_objective:doubled"}
    config = msgspec.structs.replace(CONFIG, algorithm=msgspec.structs.replace(CONFIG.algorithm, **names))
    outcomes = []
    for number, setting in enumerate((CONFIG, config)):
        folder = tmp_path / str(number)
        trainer = PolicyTrainer.prepare(setting, folder, tokenizer_json=TOKENIZER, traces=tuple)
        made = batch(dict(trainer.versions), 0, [0, 0, 0, 0], setting)
        manifest = records.manifest(setting, "r", trainer, made[0].groups, None, ())
        outcomes.append(trainer.step(manifest, *made[1:]))
    assert outcomes[1].grad_norm == pytest.approx(2.0 * outcomes[0].grad_norm, rel=1e-5)
    assert [(plugin.seam, plugin.name) for plugin in manifest.plugins] == [
        ("advantages", "my_objective:doubled"),
        ("losses", "my_objective:plain"),
    ]
    changed = tuple(msgspec.structs.replace(plugin, source="0" * 64) for plugin in manifest.plugins)
    other = msgspec.structs.replace(manifest, version=1, plugins=changed)
    with pytest.raises(TrainerError, match="has source hash"):
        trainer.step(other, *made[1:])


def test_an_unknown_name_is_refused_before_the_run() -> None:
    with pytest.raises(TrainerError, match=r"expected one of truncated, masked.*or module:attribute, got 'nothing'"):
        plugins_of(msgspec.structs.replace(CONFIG.algorithm, weighting="nothing"))
