"""The embedded engine samples with a model of transformers: a mixture's routes and a recurrent state over two turns."""

import asyncio
from pathlib import Path

import pytest
import torch

from headrace.engines.embedded.engine import EmbeddedEngine
from headrace.policy.layout import hugging_face
from headrace.policy.moe import from_array
from headrace.policy.numerics_probe import probe
from headrace.policy.provider import build
from headrace.policy.scoring import score
from headrace.weights import tensor_state
from tests.support import model_types
from tests.support.engines import request

pytestmark = pytest.mark.anyio


async def test_two_turns_are_scored_again(tmp_path: Path) -> None:
    folder = model_types.folder(tmp_path / "model", "qwen3_5_moe_text")
    shape = hugging_face.read(folder)
    numerics = probe(shape, exact=False)
    model = build(shape, numerics)
    model.load(folder)
    digest = tensor_state.write(tmp_path / "0.safetensors", model.state())
    engine = EmbeddedEngine(shape, numerics, cache_blocks=8)
    try:
        await engine.load(0, str(tmp_path / "0.safetensors"), digest)
        first, _ = await asyncio.gather(engine.sample(request(tokens=9)), engine.sample(request("other", tokens=5)))
        ids = (1, 2, 3, *first.ids, 7, 8)
        second = await engine.sample(request(ids=ids, tokens=6))
        forgotten = await engine.sample(request(ids=(1, 2, 3, 9), tokens=4))  # no prefix of it can be kept
    finally:
        await engine.stop()
    assert first.routed is not None and second.routed is not None
    routed = torch.cat([from_array(each.routed, 2, 2) for each in (first, second)])
    whole = torch.tensor([*ids, *second.ids])
    assert len(routed) == len(whole) - 1
    targets = [*range(3, 12), *range(14, 20)]
    for routes in (routed, None):
        again = score({0: model}, whole, [*first.spans, *second.spans], targets, 1.0, routes)
        assert torch.allclose(again, torch.tensor([*first.logprobs, *second.logprobs]), atol=1e-5)
    assert [(span.start, span.end) for span in forgotten.spans] == [(0, 7)]
