"""Predicts the seconds of a step on GPUs, by part, from the plan's operations and two stated speeds.

Trade-off: the MFU of the trainer and the speed of the server are stated, not measured; `headrace try` and the first
steps show those of the machine. Sandboxes are not counted: with enough of them the policy waits for none.
"""

from typing import NamedTuple

from headrace.config import Config
from headrace.policy.config import PolicyConfig
from headrace.policy.layout.sizes import file_bytes, forward_flops, parameters
from headrace.training.figures.duration import AttemptTokens

MFU = 0.2
"""Measured on an H200 in the shape of Qwen3-0.6B: 0.29 while the trainer computes, 0.17 with its pauses."""
SPEED = 1e13
"""Sampled tokens a second of one GPU times active parameters: 3,000 with 3.3 billion, as SGLang on an H100."""
GB_S = 61 / 135
"""Gigabytes a second of a version from update to served, through files: computed, not measured."""


class Stated(NamedTuple):
    """The speeds that no plan knows."""

    peak: float
    """Operations a second of one GPU, dense bfloat16."""
    mfu: float = MFU
    tokens: float = 0.0
    """Sampled tokens a second of one GPU; 0: by `SPEED`."""


class GpuStep(NamedTuple):
    """Seconds of a step, and its GPUs."""

    sampling: float
    training: float
    rescoring: float
    weights: float
    apart: bool
    """Sampler and trainer work at the same time: on GPUs of their own, and with a staleness of at least 1."""
    gpus: int

    @property
    def parts(self) -> dict[str, float]:
        """By name: those that follow one another together."""
        if not self.apart:
            return {"all parts in turn": self.sampling + self.training + self.rescoring + self.weights}
        return {"sampling": self.sampling, "training": self.training + self.rescoring, "weights": self.weights}

    @property
    def seconds(self) -> float:
        """Of a step."""
        return max(self.parts.values())

    @property
    def bound(self) -> str:
        """The part that the others wait for."""
        parts = {
            "sampling": self.sampling,
            "training": self.training,
            "re-scoring": self.rescoring,
            "weights": self.weights,
        }
        return max(parts, key=parts.__getitem__)


def predict(config: Config, policy: PolicyConfig, attempt: AttemptTokens, stated: Stated) -> GpuStep:
    """A step whose attempts all have an advantage. attempt: its tokens."""
    attempts = config.curriculum.groups_per_step * config.curriculum.group_size
    inputs, written = round(attempt.read + attempt.written), round(attempt.written)
    forward = forward_flops(policy, inputs, written)
    speed = stated.peak * stated.mfu
    passes = (2.0 if policy.adapter else 3.0) + config.numerics.recompute + (config.algorithm.kl_weight > 0.0)
    again = min(config.trainer.rescore, attempts) * (2 if policy.experts and not config.engine.exact else 1)
    devices = config.engine.options.get("server_devices", [])
    servers = sum(len(str(seen).split(",")) for seen in devices) if isinstance(devices, list) else 0
    samplers = servers or 1
    count = parameters(policy)
    active = count.total - count.experts * (1.0 - policy.top_k / policy.experts if policy.experts else 0.0)
    tokens = stated.tokens or SPEED / active
    reading = attempts * forward_flops(policy, round(attempt.read), 0) / (speed * samplers)
    return GpuStep(
        sampling=reading + attempts * written / (tokens * samplers),
        training=attempts * passes * forward / (speed * config.trainer.ranks),
        rescoring=again * forward / speed,  # every rank repeats it
        weights=file_bytes(policy, config.weights.precision) / 1e9 / GB_S,
        apart=bool(servers) and config.curriculum.staleness > 0,
        gpus=config.trainer.ranks + servers,
    )
