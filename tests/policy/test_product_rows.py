"""A row's bits do not depend on how many rows are multiplied with it: every product of every configuration here.

The operands cancel (`kernels.heights.cancelling`), so that another order of sums shows. The thin sweep is in the
default suite; the wide one goes through 1 to 4,096 rows.
"""

from collections.abc import Callable, Iterable

import pytest
import torch

from benchmarks.numerics import policy as study
from headrace.config import Policy
from headrace.kernels import batch_invariant, expert_mlp
from headrace.kernels.heights import cancelling
from headrace.messages.rollout import Span
from headrace.policy.config import Dtype, PolicyConfig
from headrace.policy.layout import hugging_face
from headrace.policy.probing.operands import products
from headrace.policy.scoring import score
from tests.policy.test_families import latent
from tests.support import tiny

MOST = 4096
CONFIGS: dict[str, Callable[[Dtype], PolicyConfig]] = {
    **tiny.SHAPES,
    "bundled": lambda dtype: hugging_face.from_section(Policy(dtype=dtype)),
    "study": study,
    "latent": latent,
}
CASES = [(name, dtype) for name in CONFIGS for dtype in ("float32", "bfloat16")]
THIN = [*range(1, 20), 31, 33, 63, 65, 127, 250, 511, 1025, 2047, 4095]


def wide(cells: int) -> Iterable[int]:
    """All counts for small products; for larger ones all up to 256, then every 29th and the edges of blocks of 256."""
    if cells <= 4096:
        return range(1, MOST)
    edges = (at + offset for at in range(256, MOST, 256) for offset in (-1, 1))
    return sorted({*range(1, 256), *range(256, MOST, 29), *edges})


def swept(config: PolicyConfig, counts: Callable[[int], Iterable[int]]) -> list[tuple[int, int, int]]:
    """(K, N, rows) of all products whose rows differ from the same rows among 4,096."""
    tiny.numerics(config)
    generator = torch.Generator().manual_seed(5)
    differing = []
    dtypes = {(k, n): config.torch_dtype for k, n in products(config)}
    if config.scores == "sigmoid":
        dtypes[config.dim, config.experts] = torch.float32
    for (k, n), dtype in dtypes.items():
        x, weight = cancelling(generator, dtype, MOST, (n, k))
        all_rows = batch_invariant.linear(x, weight, True)
        for rows in counts(k * n):
            at = (rows * 7919) % (MOST - rows + 1)  # anywhere in the larger batch
            part = batch_invariant.linear(x[at : at + rows].clone(), weight, True)
            if not torch.equal(part, all_rows[at : at + rows]):
                differing.append((k, n, rows))
    return differing


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_rows_of_every_product(name: str, dtype: Dtype) -> None:
    assert swept(CONFIGS[name](dtype), lambda cells: THIN) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_rows_of_every_product_from_1_to_4096(name: str, dtype: Dtype) -> None:
    assert swept(CONFIGS[name](dtype), wide) == []


@pytest.mark.parametrize("counts", [THIN, pytest.param(range(1, 601), marks=pytest.mark.slow)], ids=["thin", "wide"])
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_tokens_of_every_mixture(name: str, dtype: Dtype, counts: Iterable[int]) -> None:
    config = CONFIGS[name](dtype)
    tiny.numerics(config)
    generator = torch.Generator().manual_seed(6)
    shape = (config.experts, 2 * config.expert_dim, config.dim)
    x, gate_up = cancelling(generator, config.torch_dtype, 600, shape)
    down = torch.randn(config.experts, config.dim, config.expert_dim, generator=generator).to(config.torch_dtype)
    gates = torch.rand(600, config.top_k, generator=generator)
    experts = torch.rand(600, config.experts, generator=generator).argsort(-1)[:, : config.top_k]
    many = expert_mlp.expert_mlp(x, gates, experts, gate_up, down, True)
    for rows in counts:
        if rows <= len(x):
            few = expert_mlp.expert_mlp(x[:rows], gates[:rows], experts[:rows], gate_up, down, True)
            assert torch.equal(few, many[:rows]), rows


def test_single_steps_and_long_spans_score_alike() -> None:
    """The failure once seen in an engine: token by token the router took another path than in spans of 9 and more."""
    config = tiny.config("bfloat16")
    ids = [
        200, 152, 195, 39, 215, 86, 61, 250, 74, 297, 161, 248, 174, 154, 213, 164, 154, 232, 43, 269, 281, 220, 295,
        110, 270, 189, 120, 77, 202, 20, 132, 261, 129, 125, 147, 162, 152, 109, 275, 108, 64, 23, 177, 98, 42, 130,
        205, 44, 27, 146, 47, 216, 43, 189, 239, 147, 207, 155, 244, 62, 31,
    ]  # fmt: skip
    whole = [Span(0, 8, 0), Span(8, 19, 1), Span(19, 32, 2), Span(32, 45, 3), Span(45, 60, 0)]
    steps = [Span(at, at + 1, span.version) for span in whole for at in range(span.start, span.end)]
    models = {version: tiny.model(config, seed=version) for version in range(4)}
    targets = range(5, 61)
    assert torch.equal(score(models, ids, steps, targets, 0.6), score(models, ids, whole, targets, 0.6))
