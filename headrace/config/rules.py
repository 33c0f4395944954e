"""Rules between keys: values that are allowed alone but not together.

Each rule names the key to change and says in one clause why. They are checked when a configuration is read, in this
order, and the first one that fails is the error.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise

from headrace.config.tree import Config

Problem = tuple[str, str]
"""Dotted key, and what is wrong with its value."""


def problems(config: Config) -> Iterator[Problem]:
    """Each rule that the configuration breaks."""
    for rule in RULES:
        yield from rule(config)


def _limits(config: Config) -> Iterator[Problem]:
    own = config.limits
    if own.max_turn_tokens > own.max_tokens:
        yield (
            "limits.max_turn_tokens",
            f"expected at most limits.max_tokens ({own.max_tokens}), got {own.max_turn_tokens}",
        )
    if own.max_turn_tokens >= own.context_tokens:
        yield (
            "limits.max_turn_tokens",
            f"expected less than limits.context_tokens ({own.context_tokens}), got {own.max_turn_tokens}",
        )
    if own.reserve_tokens >= own.context_tokens:
        yield (
            "limits.reserve_tokens",
            f"expected less than limits.context_tokens ({own.context_tokens}), got {own.reserve_tokens}",
        )
    if 0 < own.reserve_tokens <= 2 * own.max_turn_tokens:
        yield (
            "limits.reserve_tokens",
            f"expected 0, or more than {2 * own.max_turn_tokens}: a turn that begins below the limit and the "
            f"summary may each have limits.max_turn_tokens ({own.max_turn_tokens}); got {own.reserve_tokens}",
        )


def _curriculum(config: Config) -> Iterator[Problem]:
    own = config.curriculum
    if own.speculate >= own.group_size:
        yield "curriculum.speculate", f"expected less than group_size ({own.group_size}), got {own.speculate}"
    if own.replace_flat and config.algorithm.baseline != "group":
        yield "curriculum.replace_flat", "expected 0 with algorithm.baseline = class: equal rewards still teach there"
    slots = own.group_size * own.groups_per_step
    if config.algorithm.minibatches > slots:
        yield (
            "algorithm.minibatches",
            f"expected at most the {slots} trajectories of a batch, got {config.algorithm.minibatches}",
        )


def _tools(config: Config) -> Iterator[Problem]:
    if config.policy.checkpoint and config.policy.renderer != "terse":
        return  # a checkpoint whose own format is terse is refused when the run's renderer is made
    why = "the terse format shows no tools and has one token per tool name; set policy.checkpoint to a chat model"
    if config.tools.vary:
        yield "tools.vary", f"expected false: {why}"
    if config.tools.evaluation != "plain":
        yield "tools.evaluation", f"expected plain: {why}"


def _mcp(config: Config) -> Iterator[Problem]:
    for name, server in config.tasks.mcp.items():
        if bool(server.command) == bool(server.url):
            yield f"tasks.mcp.{name}", "expected either command or url"
        elif server.key and not server.url:
            yield f"tasks.mcp.{name}.key", "expected none with command; env names the variables that a command gets"
        elif server.env and not server.command:
            yield f"tasks.mcp.{name}.env", "expected none with url; key names the variable that holds the token"


def _judge(config: Config) -> Iterator[Problem]:
    own = config.judge
    if own.rubric and not own.model_url:
        yield "judge.model_url", "expected the address of the endpoint that judges judge.rubric, got none"
    if own.model_url and not own.model:
        yield "judge.model", "expected the name of a model at judge.model_url, got none"
    if own.model_folder and not own.model_url:
        yield "judge.model_folder", "expected none without judge.model_url: it pins the model of that endpoint"
    if own.rubric_weight and config.algorithm.reward != "shaped":
        reward = config.algorithm.reward
        yield "judge.rubric_weight", f"expected 0: the reward {reward!r} decides itself what a rubric is worth"


def _algorithm(config: Config) -> Iterator[Problem]:
    own = config.algorithm
    if not own.ratio_low <= 1.0 <= own.ratio_high:
        yield "algorithm.ratio_low", f"expected ratio_low <= 1 <= ratio_high, got {own.ratio_low} and {own.ratio_high}"
    if own.mask_low > own.tis_clip:
        yield "algorithm.mask_low", f"expected at most tis_clip ({own.tis_clip}), got {own.mask_low}"
    if own.overlong_penalty and not 1 <= own.overlong_tokens <= config.limits.max_tokens:
        most = config.limits.max_tokens
        yield "algorithm.overlong_tokens", f"expected 1 to limits.max_tokens ({most}), got {own.overlong_tokens}"
    if own.overlong_penalty and own.reward != "shaped":
        yield "algorithm.overlong_penalty", f"expected 0: the reward {own.reward!r} decides itself what length costs"


def _feedback(config: Config) -> Iterator[Problem]:
    if config.feedback.enabled and not config.production.enabled:
        yield "feedback.enabled", "expected false without the product lane ([production] enabled), got true"
    shares = config.gate.canary
    if list(shares) != sorted(set(shares)) or 0.0 in shares or 1.0 in shares:
        yield "gate.canary", f"expected shares that rise between 0 and 1, both excluded, got {list(shares)}"


def _policy(config: Config) -> Iterator[Problem]:
    own = config.policy
    if own.checkpoint:
        return  # the checkpoint's own shape counts
    if own.heads % own.kv_heads:
        yield "policy.kv_heads", f"expected a divisor of heads ({own.heads}), got {own.kv_heads}"
    if own.top_k > own.experts:
        yield "policy.top_k", f"expected at most experts ({own.experts}), got {own.top_k}"
    if own.head_dim % 2:
        yield "policy.head_dim", f"expected an even number (rotary embedding), got {own.head_dim}"


def _trainer(config: Config) -> Iterator[Problem]:
    own = config.trainer
    if own.ranks % own.expert_ranks:
        yield "trainer.expert_ranks", f"expected a divisor of trainer.ranks ({own.ranks}), got {own.expert_ranks}"
    if own.ranks > 1 and ":" in own.device:
        yield "trainer.device", f"expected auto, cpu or cuda with trainer.ranks = {own.ranks}, got {own.device!r}"


def _machines(config: Config) -> Iterator[Problem]:
    own = config.environment
    if own.judge_share + own.production_share >= own.max_vms:
        kept = own.judge_share + own.production_share
        yield (
            "environment.max_vms",
            f"expected more than judge_share + production_share ({kept}), or training gets no machine, "
            f"got {own.max_vms}",
        )
    if own.warm > own.max_vms:
        yield "environment.warm", f"expected at most max_vms ({own.max_vms}), got {own.warm}"


def _weights(config: Config) -> Iterator[Problem]:
    own = config.weights
    if own.collect_chains == 1:
        yield (
            "weights.collect_chains",
            "expected 0 or at least 2, because joiners may still read the last chain but one; got 1",
        )


def _production(config: Config) -> Iterator[Problem]:
    own = config.production
    if own.tls_certificate and not own.tls_key:
        yield "production.tls_key", "expected the key of production.tls_certificate, got none"
    if own.tls_key and not own.tls_certificate:
        yield "production.tls_certificate", "expected the certificate of production.tls_key, got none"


def _processes(config: Config) -> Iterator[Problem]:
    if any(not group for group in config.processes.groups):
        yield "processes.groups", "expected at least one actor in every group, got an empty group"
    named = sorted(name for group in config.processes.groups for name in group if ":" in name)
    for one, other in pairwise(named):
        if one == other:
            yield "processes.groups", f"expected every name:id once, got {one} twice"
            return


RULES: tuple[Callable[[Config], Iterator[Problem]], ...] = (
    _limits,
    _curriculum,
    _tools,
    _mcp,
    _judge,
    _algorithm,
    _feedback,
    _policy,
    _trainer,
    _machines,
    _weights,
    _production,
    _processes,
)
