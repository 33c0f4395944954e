"""Measuring a policy on tasks it was never trained on."""

from headrace.messages.base import Message, message
from headrace.messages.rollout import Limits, PolicyRef, Sampling
from headrace.messages.sandbox import Isolation


@message("eval_request")
class EvalRequest(Message, frozen=True, kw_only=True):
    """Run every task of a suite once under a policy."""

    id: str
    run: str
    suite: str
    tasks: int
    """How many of the suite's tasks, from its first; 0 means all."""
    policy: PolicyRef
    sampling: Sampling = Sampling()
    limits: Limits = Limits()
    isolation: Isolation = "group"
    reason: str = ""
    seed: int = 0


@message("eval_result")
class EvalResult(Message, frozen=True, kw_only=True):
    """The outcome; infrastructure failures are counted apart and never as failures of the policy."""

    id: str
    run: str
    suite: str
    policy: PolicyRef
    version: int
    tasks: int
    passed: int
    rate: float
    infra_failures: int
    families: dict[str, tuple[int, int]] = {}
    """Family to (passed, tasks)."""
    reason: str = ""
    seconds: float = 0.0
