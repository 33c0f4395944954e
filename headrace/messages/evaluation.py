"""Evaluation of a policy on tasks that it is not trained on."""

from msgspec import UNSET, UnsetType

from headrace.messages.base import Count, Finite, Message, Seed, Share, Version, message
from headrace.messages.rollout import Limits, PolicyRef, Sampling
from headrace.messages.sandbox import Isolation


@message("eval_request")
class EvalRequest(Message, frozen=True, kw_only=True):
    """A request to run every task of a suite once under a policy."""

    id: str
    run: str
    suite: str
    tasks: Count
    """Number of tasks, from the suite's first; 0 means all."""
    ids: tuple[str, ...] = ()
    """The tasks by their ids, instead of the suite's first ones."""
    policy: PolicyRef
    sampling: Sampling = Sampling()
    limits: Limits = Limits()
    isolation: Isolation = "group"
    harnesses: tuple[tuple[str, Count], ...] | UnsetType = UNSET
    """Names and weights, of which each of its groups has one. Unset: headrace's own agent."""
    reason: str = ""
    seed: Seed = 0


@message("eval_result")
class EvalResult(Message, frozen=True, kw_only=True):
    """The outcome of an evaluation. Infrastructure failures are counted apart, never as failures of the policy."""

    id: str
    run: str
    suite: str
    policy: PolicyRef
    version: Version
    tasks: Count
    passed: Count
    rate: Share
    infra_failures: Count
    passes: dict[str, bool] = {}
    """Whether each measured task passed: two evaluations of the same tasks are compared task by task."""
    families: dict[str, tuple[Count, Count]] = {}
    """Family to (passed, tasks)."""
    reason: str = ""
    seconds: Finite = 0.0
