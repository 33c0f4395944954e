"""Segments of self-summarising episodes: every sampled token is trained once, and the mask hits summaries alone."""

from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.compaction import ARMS, SEGMENTS, SLOTS, World, played, shape
from headrace.engines.embedded.engine import EmbeddedEngine
from headrace.policy.model import Model
from headrace.policy.numerics_probe import probe
from headrace.weights import tensor_state


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize("arm", ARMS)
async def test_every_sampled_token_is_trained_once_and_only_summaries_are_masked(tmp_path: Path, arm: str) -> None:
    world = World()
    config = shape(world, Namespace(dim=16))
    model = Model(config, probe(config), seed=1)
    engine = EmbeddedEngine(config, model.numerics)
    await engine.load(0, str(tmp_path / "0"), tensor_state.write(tmp_path / "0", model.state()))
    batch, _ = await played(world, engine, 1, 0, 1, arm)
    await engine.stop()
    assert len(batch.segments) == SEGMENTS * SLOTS
    per_segment = [len(segment.targets) for segment in batch.segments[:SEGMENTS]]
    # An act in every segment, and a summary at the end of all but the last.
    assert per_segment == ([2, 2, 1] if arm == "trained" else [1, 1, 1])
    first, second, last = batch.segments[:SEGMENTS]
    assert first.advantage == second.advantage == last.advantage, "the final reward reaches every segment"
    opened, read = world.renderer.prompt("keep"), world.renderer.tokenizer.encode("d")[0]
    assert (second.ids.tolist()[: len(opened)] == opened) == (arm == "truncated")
    assert (read in first.ids.tolist()) == (arm != "truncated"), "what was read stands before the summary alone"
    assert read not in second.ids.tolist() + last.ids.tolist()
