"""Two processes' parts of a micro-batch against one process. Here the processes are threads, connected by gloo."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import msgspec
import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore, ProcessGroup, ProcessGroupGloo  # type: ignore[attr-defined]

from headrace.policy.config import Latent, PolicyConfig
from headrace.policy.model import Model
from headrace.policy.numerics_probe import probe
from headrace.training.batches.micro_batch import MicroBatch, forward
from headrace.training.batches.segment import Segment
from headrace.training.figures.clock import Clock
from headrace.training.parallel.context import ContextParallel

DENSE = PolicyConfig(dim=32, layers=2, heads=4, kv_heads=2, head_dim=16, experts=0, top_k=0, expert_dim=32, vocab=320)
MIXTURE = msgspec.structs.replace(DENSE, experts=4, top_k=2)
LATENT = msgspec.structs.replace(
    MIXTURE, kv_heads=4, head_dim=24, scores="sigmoid", shared_experts=1, dense_layers=1,
    latent=Latent(q_rank=16, kv_rank=16, nope_dim=16, rope_dim=8, value_dim=16),
)  # fmt: skip
SHAPES = {
    "dense": DENSE,
    "dense, bfloat16": msgspec.structs.replace(DENSE, dtype="bfloat16"),
    "mixture": MIXTURE,
    "mixture, bfloat16": msgspec.structs.replace(MIXTURE, dtype="bfloat16"),
    "mixture, MXFP8": msgspec.structs.replace(MIXTURE, dtype="bfloat16", expert_format="mxfp8"),
    "latent": LATENT,
}
PACKED = (70, 131, 5, 1)


def segment(policy: PolicyConfig, draw: torch.Generator, length: int) -> Segment:
    """A sequence whose last third is sampled, with routes that the policy would not choose."""
    sampled = -(-length // 3)
    routed = torch.rand(length, policy.sparse_layers, policy.experts, generator=draw).argsort(-1)[..., : policy.top_k]
    return Segment(
        trajectory="t",
        ids=torch.randint(0, policy.vocab, (length,), generator=draw),
        positions=torch.arange(length - sampled, length),
        targets=torch.randint(0, policy.vocab, (sampled,), generator=draw),
        behaviour=torch.zeros(sampled),
        versions=torch.zeros(sampled, dtype=torch.int64),
        routed=routed if policy.experts else None,
        spans=(),
        advantage=1.0,
        temperature=0.9,
    )


def computed(model: Model, micro: MicroBatch) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies; their gradient goes to the model's parameters."""
    logp, entropy = forward(model, micro)
    torch.autograd.backward((logp * torch.linspace(-1.0, 1.0, len(logp))).sum() / 100)
    return logp.detach(), entropy


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("mixture", PACKED),
        ("mixture", (1,)),  # fewer tokens than processes
        ("latent", PACKED),
        *(pytest.param(name, PACKED, marks=pytest.mark.slow) for name in SHAPES if name not in ("mixture", "latent")),
    ],
)
def test_two_processes_give_the_bits_of_one_in_the_forward_pass_and_its_gradient_in_their_sum(
    name: str, lengths: tuple[int, ...]
) -> None:
    policy, draw = SHAPES[name], torch.Generator().manual_seed(3)
    numerics = probe(policy)
    assert numerics.exact
    micro = MicroBatch.of([segment(policy, draw, length) for length in lengths], torch.device("cpu"))
    whole = Model(policy, numerics, seed=1)
    want = computed(whole, micro)
    parts = [Model(policy, numerics, seed=1) for _ in range(2)]
    store, clock = HashStore(), Clock()

    def process(rank: int) -> tuple[Tensor, Tensor]:
        parts[rank].recompute = True
        gloo = ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))  # a failure of one ends the other
        group = ProcessGroup(store, rank, 2)
        group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
        parts[rank].shared = ContextParallel(group, clock)
        return computed(parts[rank], micro)

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(process, range(2)))
    for logp, entropy in results:
        assert torch.equal(logp, want[0]) and torch.equal(entropy, want[1])
    assert_sums(policy, whole, parts)


def assert_sums(policy: PolicyConfig, whole: Model, parts: Sequence[Model]) -> None:
    """The gradients of the parts add up to that of the whole, but for rounding; of owned experts each part has its
    rows."""
    for (key, one), *others in zip(*(model.named_parameters() for model in (whole, *parts)), strict=True):
        shares = [other.grad.double() for _, other in others if other.grad is not None]
        if one.grad is None:
            assert not any(share.any() for share in shares), key
            continue
        total = sum(shares[1:], shares[0]) if others[0][1].shape == one.shape else torch.cat(shares)
        error = (total - one.grad.double()).norm() / one.grad.double().norm().clamp(min=1e-12)
        assert error < (1e-6 if policy.dtype == "float32" else 2e-2), f"{key}: {error:.1e}"
