"""The predicted work of a step, against the weights of the real model and the batch that is trained."""

from dataclasses import replace

import msgspec
import pytest

from headrace.algorithms.registry import ADVANTAGES
from headrace.policy.config import PolicyConfig
from headrace.policy.layout.sizes import forward_flops
from headrace.policy.model import Model
from headrace.training.batches import batch
from headrace.training.figures.work import expert_load, work_of
from tests.support.world import CONFIG, NUMERICS, POLICY, model
from tests.support.world import batch as played


def weights_flops(policy: PolicyConfig) -> float:
    """Operations per input of the model's own matrices, the embedding and the head left out."""
    sized = Model(policy, NUMERICS, seed=None)
    total = 0.0
    for name, weight in sized.named_parameters():
        if weight.ndim == 3:
            total += 2.0 * weight.numel() * policy.top_k / policy.experts
        elif weight.ndim == 2 and name.startswith("layers."):
            total += 2.0 * weight.numel()
    return total


def test_operations_are_those_of_the_models_matrices() -> None:
    for policy in (
        POLICY,
        msgspec.structs.replace(POLICY, experts=0, top_k=0),
        msgspec.structs.replace(POLICY, tied=True),
    ):
        inputs, sampled = 2000, 700
        attention = 2.0 * policy.layers * policy.heads * 2 * policy.head_dim * inputs * (inputs + 1) / 2
        head = 2.0 * policy.vocab * policy.dim * sampled
        want = weights_flops(policy) * inputs + attention + head
        assert forward_flops(policy, inputs, sampled) == pytest.approx(want, rel=0.02), "norms are in the prediction"


def test_work_counts_every_forward_pass() -> None:
    models = {0: model()}
    records = played(models, 0, [0, 0, 0, 0])
    made = batch.build(records[0].groups, *records[1:], ADVANTAGES.get(CONFIG.algorithm.advantage))
    plain = work_of(CONFIG, POLICY, made, 0, exact=True)
    trained = [segment for segment in made.segments if segment.trained]
    assert plain.trained_tokens == sum(len(segment.targets) for segment in trained)
    assert plain.hardware_flops > plain.model_flops > 0.0, "some trajectories are scored again"
    alone = msgspec.structs.replace(CONFIG, trainer=msgspec.structs.replace(CONFIG.trainer, rescore=0))
    once = work_of(alone, POLICY, made, 0, exact=True)
    assert once.forwarded_tokens == sum(len(segment.ids) for segment in trained) < plain.forwarded_tokens
    assert once.hardware_flops == once.model_flops == plain.model_flops
    numerics = msgspec.structs.replace(CONFIG.numerics, recompute=True)
    again = work_of(msgspec.structs.replace(alone, numerics=numerics), POLICY, made, 0, exact=True)
    assert again.hardware_flops == pytest.approx(4 / 3 * again.model_flops)


def test_the_load_is_that_of_the_worst_layer() -> None:
    models = {0: model()}
    records = played(models, 0, [0, 0, 0, 0])
    made = batch.build(records[0].groups, *records[1:], ADVANTAGES.get(CONFIG.algorithm.advantage))
    load = expert_load(POLICY, made.segments)
    counts = [[0] * POLICY.experts for _ in range(POLICY.layers)]
    for segment in made.segments:
        assert segment.routed is not None
        for row in segment.routed.tolist():
            for layer, chosen in enumerate(row):
                for expert in chosen:
                    if expert >= 0:
                        counts[layer][expert] += 1
    assert load == pytest.approx(max(max(each) * len(each) / sum(each) for each in counts))
    wide = [replace(segment, routed=segment.routes) for segment in made.segments]
    assert expert_load(POLICY, wide) == load, "a segment whose positions were forwarded twice has its routes as int64"
