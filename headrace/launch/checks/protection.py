"""Whether training would ruin a checkpoint, and whether the model has the positions that the limits need.

AdamW moves a weight by about the learning rate per update, and the weights of a matrix deviate by about dim^-0.5. A
rate of `STEP` / dim therefore moves them by less than a part in `dim^0.5 / STEP` per update: published recipes stay a
factor of two to twenty below it.
"""

from collections.abc import Iterator

from headrace.config import Config
from headrace.launch.checks.finding import Finding, bad
from headrace.policy.config import PolicyConfig

STEP = 0.05
"""The highest learning rate of RL, times the policy's width."""
COLD_START = 10.0
"""Mid-training may have a rate as many times higher: its gradients come from given text."""
ADAPTERS = 20.0
"""So may low-rank adapters, which begin at zero."""
NEVERTHELESS = ", or set policy.unprotected = true"


def check(config: Config, policy: PolicyConfig) -> Iterator[Finding]:
    """Findings about a run that begins with a checkpoint of this shape."""
    if config.policy.unprotected:
        return
    highest = float(f"{STEP / policy.dim * (ADAPTERS if policy.adapter is not None else 1.0):.1g}")
    rates = [("algorithm", config.algorithm.learning_rate, highest)]
    if config.mid_training.tokens:
        rates.append(("mid_training", config.mid_training.learning_rate, COLD_START * highest))
    if config.production.enabled and config.feedback.enabled:
        rates.append(("feedback", config.feedback.learning_rate, highest))
    for section, rate, most in rates:
        if rate > most:
            yield bad(
                f"{section}.learning_rate",
                f"{rate:g} would overwrite a checkpoint of width {policy.dim}: set {section}.learning_rate to at most "
                f"{most:g}{NEVERTHELESS}",
            )
    needed = [("limits.context_tokens", config.limits.context_tokens)]
    if config.production.enabled:
        needed.append(("production.limits.context_tokens", config.production.limits.context_tokens))
    if config.mid_training.tokens and config.mid_training.data:
        needed.append(("mid_training.sequence", config.mid_training.sequence))
        needed += [("mid_training.phases", phase.sequence) for phase in config.mid_training.phases]
    for key, tokens in needed:
        if tokens > policy.max_positions:
            yield bad(
                key,
                f"a sequence may have {tokens:,} tokens and the model has {policy.max_positions:,} positions: "
                f"lower {key}{NEVERTHELESS}",
            )
