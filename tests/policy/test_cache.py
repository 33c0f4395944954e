"""The paged KV cache: mapped blocks use no memory before they are written."""

import mmap
from pathlib import Path

import pytest
import torch

from headrace.policy.cache import KVCache
from headrace.policy.config import Dtype, PolicyConfig

SHAPE = PolicyConfig(
    dim=64, layers=2, heads=2, kv_heads=2, head_dim=64, experts=0, top_k=0, expert_dim=0, dense_dim=64, vocab=64
)


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_blocks_use_no_memory_before_they_are_written() -> None:
    before = resident()
    cache = KVCache(SHAPE, 4096)
    whole = 4096 * cache.block_bytes
    assert whole == sum(tensor.nbytes for tensor in (*cache.keys, *cache.values)) == 512 << 20
    assert resident() - before < whole // 20
    cache.keys[1][4000].fill_(2.0)
    assert resident() - before < whole // 20
    assert cache.keys[1][4000].sum() == 2.0 * 2 * 64 * 64
    assert not cache.keys[1][3999].any()
    assert not cache.values[1][4000].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cache_that_grows_keeps_its_content(dtype: Dtype) -> None:
    config = PolicyConfig(
        dim=64, layers=1, heads=1, kv_heads=1, head_dim=8, experts=0, top_k=0, expert_dim=0, dense_dim=8, vocab=8,
        dtype=dtype,
    )  # fmt: skip
    cache = KVCache(config, 1)
    cache.keys[0][0].fill_(3.0)
    cache.reserve(3)
    assert cache.blocks == len(cache.keys[0]) == 3
    assert cache.keys[0].dtype == config.torch_dtype
    assert torch.equal(cache.keys[0][0], torch.full_like(cache.keys[0][0], 3.0))
    assert not cache.keys[0][1:].any()
