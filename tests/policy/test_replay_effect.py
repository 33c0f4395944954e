"""What replay is for: on ordinary bfloat16 arithmetic it takes most of the mismatch away (research target: 0.3)."""

from pathlib import Path

import pytest
import torch

from benchmarks.numerics import Side, drawn, policy, requests, scored
from headrace.algorithms.mismatch import mismatch, router_flips
from headrace.engines.embedded import EmbeddedEngine
from headrace.policy.config import PolicyConfig
from headrace.policy.model import Model
from headrace.weights import snapshot
from tests.policy import tiny


@pytest.mark.slow
@pytest.mark.anyio
async def test_replay_takes_most_of_k3_away(tmp_path: Path) -> None:
    config = policy("bfloat16")
    model = Model(config, tiny.numerics(config, False), seed=1)
    with torch.no_grad():
        model.head_weight.mul_(20)
    engine = EmbeddedEngine(config, model.numerics)
    await engine.load(0, str(tmp_path / "v"), snapshot.write(tmp_path / "v", model.state()))
    wanted = requests(config, 64, 64, 0)
    _, samples = await drawn(Side("ordinary", model, engine), wanted)
    await engine.stop()
    live, replayed = (scored(model, wanted, samples, replay) for replay in (False, True))
    assert router_flips(live.live, live.recorded) > 0.0
    assert torch.equal(replayed.live, replayed.recorded), "forced routes are the recorded ones"
    apart, near = mismatch(live.trainer, live.sampler), mismatch(replayed.trainer, replayed.sampler)
    assert apart.differ > 0.01 and near.k3 < 0.3 * apart.k3


@pytest.mark.parametrize(("experts", "dtype"), [(255, "|u1"), (256, "<u2"), (384, "<u2")])
def test_routes_are_as_small_as_they_can_be(experts: int, dtype: str) -> None:
    """The largest value of the dtype means none: 256 experts need the wider one."""
    config: PolicyConfig = tiny.config(experts=experts)
    assert config.routed_dtype == dtype
