"""Versions of the provider transformers behind the real SGLang server: what it samples has the provider's
log-probabilities."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from headrace.weights import tensor_state
from tests.policy.hugging.test_types import opened
from tests.support import model_types
from tests.support.engines import request
from tests.support.sglang.server_fixture import prepared, python

pytestmark = [pytest.mark.anyio, pytest.mark.sglang]


@pytest.mark.parametrize("kind", ["llama", "olmo2", "granite"])
async def test_a_server_samples_as_the_provider_scores(kind: str, tmp_path: Path) -> None:
    python()
    model = opened(model_types.folder(tmp_path / kind, kind, wide=True, max_position_embeddings=2048))
    file = tmp_path / "0.safetensors"
    state_hash = tensor_state.write(file, model.state())
    engine = prepared(cast(Any, SimpleNamespace(config=model.config)), tmp_path)
    prompt = tuple(range(3, 23))
    try:
        await engine.load(0, str(file), state_hash)
        sample = await engine.sample(request(ids=prompt, tokens=24))
    finally:
        await engine.stop()
    ids = torch.tensor([*prompt, *sample.ids])
    with torch.no_grad():
        hidden = model(ids, [len(ids)])[len(prompt) - 1 : -1]
        scored = model.selected_logprobs(hidden, torch.tensor(sample.ids))[0]
    assert len(sample.ids) == 24
    torch.testing.assert_close(torch.tensor(sample.logprobs), scored, rtol=0, atol=1e-4)
