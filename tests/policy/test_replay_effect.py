"""The purpose of replay: on ordinary bfloat16 arithmetic it takes most of the mismatch away (research target: 0.3)."""

from pathlib import Path

import pytest
import torch

from benchmarks.numerics import drawn, policy, requests, scored, sides
from headrace.algorithms.mismatch import mismatch, router_flips
from headrace.policy.config import Dtype, PolicyConfig
from tests.support import tiny


@pytest.mark.slow
@pytest.mark.anyio
async def test_replay_takes_most_of_k3_away(tmp_path: Path) -> None:
    config = policy("bfloat16")
    exact, ordinary = await sides(config, tmp_path)
    await exact.engine.stop()
    wanted = requests(config, 64, 64, 0)
    _, samples = await drawn(ordinary, wanted)
    await ordinary.engine.stop()
    live, replayed = (scored(ordinary.model, wanted, samples, replay) for replay in (False, True))
    assert router_flips(live.live, live.recorded) > 0.0
    assert torch.equal(replayed.live, replayed.recorded), "forced routes are the recorded ones"
    apart, near = mismatch(live.trainer, live.sampler), mismatch(replayed.trainer, replayed.sampler)
    assert apart.differ > 0.01 and near.k3 < 0.3 * apart.k3


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("batch", [1, 4, 16, 64])
async def test_eight_layers_at_any_batch_and_the_ordinary_way_beside_them(
    tmp_path: Path, dtype: Dtype, batch: int
) -> None:
    """Exact: every bit, without replay. Ordinary: not, so the test can fail; a few sequences may be equal by luck."""
    config = policy(dtype)
    exact, ordinary = await sides(config, tmp_path)
    wanted = requests(config, batch, 64, 0)
    for side in (exact, ordinary):
        _, samples = await drawn(side, wanted)
        await side.engine.stop()
        logprobs = scored(side.model, wanted, samples, False)
        equal = torch.equal(logprobs.trainer, logprobs.sampler)
        assert equal if side is exact else batch < 16 or not equal
        assert side is ordinary or torch.equal(logprobs.live, logprobs.recorded)


@pytest.mark.parametrize(("experts", "dtype"), [(255, "|u1"), (256, "<u2"), (384, "<u2")])
def test_routes_are_as_small_as_they_can_be(experts: int, dtype: str) -> None:
    """The largest value of the dtype means none: 256 experts need the wider one."""
    config: PolicyConfig = tiny.config(experts=experts)
    assert config.routed_dtype == dtype
