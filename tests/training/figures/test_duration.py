"""The predicted time of a run: each part follows from the work and from the rates, and the cores share what can be."""

import math

import pytest

from headrace.config import Config, Curriculum, Evaluation, Mesh, MidTraining, Trainer
from headrace.policy.config import Dtype, PolicyConfig
from headrace.policy.layout.sizes import forward_flops
from headrace.training.figures import duration
from headrace.training.figures.duration import AttemptTokens, Duration, Rates

POLICY = PolicyConfig(dim=64, layers=2, heads=4, kv_heads=2, head_dim=16, experts=0, top_k=0, expert_dim=128, vocab=300)
ATTEMPT = AttemptTokens(read=90.0, written=10.0)
RATES = Rates(large=1e9, small=1e8)


def predict(config: Config, rates: Rates = RATES, cores: int = 2) -> Duration:
    return duration.predict(config, POLICY, rates, ATTEMPT, cores)


def test_mid_training_is_three_passes_over_its_tokens_on_its_processes() -> None:
    config = Config(mid_training=MidTraining(tokens=10_000, processes=2))
    per_token = 3 * forward_flops(POLICY, 100, 10) / 100 / (RATES.large * duration.PRODUCTS)
    assert predict(config).mid_training == pytest.approx(10_000 * per_token / 2)
    assert predict(config, cores=1).mid_training == pytest.approx(10_000 * per_token)
    for micro_tokens, ranks in ((1024, 2), (300, 4), (100, 8)):  # shares, then micro-batches of at most 1,024 tokens
        section = Trainer(mesh=Mesh(shard=8), micro_tokens=micro_tokens)
        over = Config(mid_training=MidTraining(tokens=10_000, processes=2), trainer=section)
        assert predict(over, cores=16).mid_training == pytest.approx(10_000 * per_token / ranks)


def test_a_step_takes_as_long_as_the_busiest_part_or_as_all_cores_together() -> None:
    config = Config(
        curriculum=Curriculum(groups_per_step=2, group_size=4, steps=7), trainer=Trainer(mesh=Mesh(shard=1))
    )
    one, many = predict(config, cores=1), predict(config, cores=64)
    assert one.steps == 7 and one.step > many.step > 0.0
    slow = predict(config, Rates(large=1e6, small=1e15), cores=64)
    training = 8 * 3.0 * forward_flops(POLICY, 100, 10) / (1e6 * duration.PRODUCTS) * (1 - duration.FLAT)
    assert slow.step == pytest.approx(training, rel=1e-3), "the trainer alone"
    decoding = 8 * 10 * forward_flops(POLICY, 1, 1) / (1e4 * duration.PRODUCTS)
    assert predict(config, Rates(large=1e15, small=1e4), cores=64).step == pytest.approx(decoding, rel=1e-3)


def test_every_evaluation_counts() -> None:
    few = Evaluation(heldout_tasks=10, unseen_tasks=5, before=True, before_greedy=True, after=True)
    config = Config(evaluation=few, curriculum=Curriculum(steps=20))
    assert predict(config).evaluated == 60
    more = Evaluation(heldout_tasks=10, unseen_tasks=0, before=False, after=False, every=6, every_tasks=4)
    assert predict(Config(evaluation=more, curriculum=Curriculum(steps=20))).evaluated == 12
    whole = predict(config)
    assert whole.total == pytest.approx(whole.mid_training + 20 * whole.step + whole.evaluations)


def test_products_with_many_rows_are_faster() -> None:
    rates = duration.measure(POLICY, True)
    assert math.isfinite(rates.large) and rates.large > rates.small > 0.0


@pytest.mark.parametrize("fast", ["bfloat16", "float32"])
def test_the_dtype_that_multiplies_faster_is_chosen(fast: Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large and small products count alike: a dtype that is faster in one alone does not win by that."""

    def measured(policy: PolicyConfig, exact: bool) -> Rates:
        assert exact
        return Rates(4e11, 1e11) if policy.dtype == fast else Rates(9e11, 0.5e11)

    monkeypatch.setattr(duration, "measure", measured)
    dtype, rates = duration.faster(POLICY)
    assert dtype == fast and set(rates) == {"bfloat16", "float32"}
