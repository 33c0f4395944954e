"""The recipe of a step in its manifest, and the layout of ranks of its replay."""

from typing import Any

import msgspec

from headrace.config import Config, Mesh
from headrace.messages.training import RankLayout
from headrace.replay.recipe import in_layout, recipe
from tests.support.world import CONFIG


def ranks(**trainer: Any) -> Config:
    return msgspec.structs.replace(CONFIG, trainer=msgspec.structs.replace(CONFIG.trainer, **trainer))


def test_a_recorded_layout_is_started_on_one_machine() -> None:
    """The configuration may be of another life of the run, with nodes that are other machines."""
    run = ranks(mesh=Mesh(shard=4, context=2), node_ranks=2, rendezvous="node0:29500")
    told = RankLayout(ranks=6, nodes=2, expert_ranks=3, context_ranks=1, backend="gloo", torch="2.13.0")
    made = in_layout(run, told).trainer
    assert (made.mesh, made.nodes) == (Mesh(replicate=2, shard=3, expert=3), 1)
    assert made.machine_ranks == 6 and run.trainer.machine_ranks == 2
    alone = in_layout(run).trainer
    assert (alone.mesh, alone.nodes) == (Mesh(), 1)


def test_the_recipe_does_not_depend_on_the_layout() -> None:
    assert recipe(ranks(mesh=Mesh(shard=4, expert=2, context=2))) == recipe(CONFIG)
