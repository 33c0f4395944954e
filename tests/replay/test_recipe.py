"""The settings of a step in its manifest: runs of tokens."""

from typing import Any

import msgspec

from headrace.config import Config
from headrace.messages.training import StepManifest
from headrace.replay.recipe import changed, in_layout, recipe, under
from tests.support import records
from tests.support.world import CONFIG


def ranks(**trainer: Any) -> Config:
    return msgspec.structs.replace(CONFIG, trainer=msgspec.structs.replace(CONFIG.trainer, **trainer))


def recorded(config: Config) -> StepManifest:
    return msgspec.structs.replace(records.manifest(0, []), objective=recipe(config))


def test_a_step_keeps_its_runs_of_tokens_with_other_ranks() -> None:
    shared = ranks(ranks=4, context_ranks=4)
    told = recorded(shared)
    assert told.objective["context_runs"] == 4
    for config in (in_layout(shared), ranks(ranks=2, context_ranks=2), shared):
        assert under(config, told).trainer.token_runs == 4
    assert recipe(ranks(ranks=2, context_ranks=2, context_runs=4))["context_runs"] == 4
    owned = recorded(ranks(ranks=4, context_ranks=2, expert_ranks=2))
    assert under(ranks(ranks=2, expert_ranks=2), owned).trainer.token_runs == 2
    assert recipe(ranks(ranks=2, expert_ranks=2, context_ranks=2, context_runs=4))["context_runs"] == 4


def test_a_step_without_runs_is_repeated_without_them() -> None:
    assert "context_runs" not in recipe(CONFIG)
    assert under(ranks(context_runs=4), recorded(CONFIG)).trainer.token_runs == 1
    assert changed(ranks(context_runs=4), {"learning_rate": 1e-3}).trainer.token_runs == 4, "a setting is not named"


def test_ranks_that_cannot_compute_the_runs_of_a_step_take_their_own() -> None:
    told = recorded(ranks(ranks=4, context_ranks=2, expert_ranks=2))
    assert under(ranks(ranks=3, context_ranks=3), told).trainer.token_runs == 3
    assert under(ranks(ranks=4, context_ranks=4, expert_ranks=2), told).trainer.token_runs == 4
