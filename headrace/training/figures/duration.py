"""Predicts how long a run with the embedded engine takes on CPUs: matrix products measured here, times the run's work.

Idea: a policy on a CPU spends most of its time in matrix products, and how fast those are differs between CPUs by a
factor of ten (vector width, instructions for bfloat16). So a second of products in the policy's own shapes is measured,
and the operations of `sizes.forward_flops` are divided by that. Products with few rows are slower, because each reads
all weights: decoding has its own rate.

Trade-off: everything beside the products is one factor, `PRODUCTS`, measured with one model.
"""

import time
from typing import NamedTuple

import msgspec
import torch

from headrace.config import Config
from headrace.kernels.batch_invariant import linear
from headrace.policy.config import Dtype, PolicyConfig
from headrace.policy.layout.sizes import forward_flops

LARGE, SMALL = 512, 16
"""Rows of a product in training and while prompts are read, and in decoding with the usual number of open attempts."""
PRODUCTS = 0.6
"""Share of the time that is spent in products, fitted: mid-training of SmolLM2-135M in float32 took 11 minutes
on two AVX2 cores, and 10 are predicted."""
SANDBOX_S = 0.5
"""Processor time of an attempt's two sandboxes: microVMs emulated on AVX2 cores, over 1,280 attempts."""
FLAT = 0.6
"""Share of groups without an advantage, which are not computed: 97 of the 160 of one run of the pretrained recipe."""
_MEASURED_S = 0.4


class Rates(NamedTuple):
    """Operations per second of one thread."""

    large: float
    small: float


class AttemptTokens(NamedTuple):
    """Mean tokens of an attempt."""

    read: float
    written: float
    bound: bool = False
    """Whether these are the most tokens that the limits allow."""


class Duration(NamedTuple):
    """Seconds of a run's parts on a machine with nothing else to do."""

    mid_training: float
    step: float
    """Of one of `steps`."""
    steps: int
    evaluations: float
    evaluated: int
    """Attempts of all evaluations."""

    @property
    def total(self) -> float:
        """All parts together."""
        return self.mid_training + self.steps * self.step + self.evaluations


def measure(policy: PolicyConfig, exact: bool) -> Rates:
    """Rates of this CPU for products by weights of the policy's layers, in its dtype and in exact or ordinary mode.
    Takes about a second."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return Rates(_rate(policy, LARGE, exact), _rate(policy, SMALL, exact))
    finally:
        torch.set_num_threads(threads)


def faster(policy: PolicyConfig) -> tuple[Dtype, dict[Dtype, Rates]]:
    """The dtype in which exact mode multiplies faster here, with the rates of both: the time of the same number of
    operations in large and in small products counts."""
    names: tuple[Dtype, Dtype] = ("bfloat16", "float32")
    rates = {name: measure(msgspec.structs.replace(policy, dtype=name), True) for name in names}
    return min(names, key=lambda name: 1 / rates[name].large + 1 / rates[name].small), rates


@torch.no_grad()
def _rate(policy: PolicyConfig, rows: int, exact: bool) -> float:
    inner, dtype = policy.dense_dim or policy.expert_dim, getattr(torch, policy.dtype)
    weights = [torch.randn(inner, policy.dim).to(dtype) for _ in range(16)]  # more than a cache holds
    inputs = torch.randn(rows, policy.dim).to(dtype)
    linear(inputs, weights[0], exact)
    done, began = 0, time.thread_time()
    while (spent := time.thread_time() - began) < _MEASURED_S:
        for weight in weights:
            linear(inputs, weight, exact)
        done += len(weights)
    return 2.0 * rows * inner * policy.dim * done / spent


def predict(config: Config, policy: PolicyConfig, rates: Rates, attempt: AttemptTokens, cores: int) -> Duration:
    """The parts of a run. attempt: its tokens; cores: of this machine."""
    inputs, written = round(attempt.read + attempt.written), round(attempt.written)
    per_token = forward_flops(policy, inputs, written) / max(1, inputs)
    train_s = 3.0 * per_token / (rates.large * PRODUCTS)
    reading = forward_flops(policy, round(attempt.read), 0) / rates.large
    decoding = attempt.written * forward_flops(policy, 1, 1) / rates.small
    sample_s = (reading + decoding) / PRODUCTS
    curriculum = config.curriculum
    attempts = curriculum.groups_per_step * curriculum.group_size
    trainer = attempts * inputs * train_s * (1.0 - FLAT)
    sampler = attempts * sample_s
    busy = trainer + sampler + attempts * SANDBOX_S
    evaluated = _evaluated(config)
    return Duration(
        mid_training=config.mid_training.tokens * train_s / min(cores, _learners(config)),
        step=max(trainer / min(cores, config.trainer.ranks), sampler, busy / cores),
        steps=curriculum.steps,
        evaluations=evaluated * max(sample_s, (sample_s + SANDBOX_S) / cores),
        evaluated=evaluated,
    )


def _learners(config: Config) -> int:
    """Processes that compute a batch of mid-training: with several ranks at most one for each micro-batch."""
    recipe, section = config.mid_training, config.trainer
    if section.ranks == 1:
        return recipe.processes
    return min(section.ranks, max(recipe.processes, -(-recipe.batch_tokens // section.micro_tokens)))


def _evaluated(config: Config) -> int:
    """Attempts of the evaluations of a run."""
    section = config.evaluation
    whole = section.heldout_tasks + section.unseen_tasks
    during = config.curriculum.steps // section.every if section.every else 0
    return whole * (section.before + section.before_greedy + 2 * section.after) + during * section.every_tasks * max(
        1, len(section.every_suites)
    )
