"""`headrace estimate`: say how long a run takes on this machine's CPUs, before it is started."""

import argparse
import itertools
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_set

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands
    from headrace.config import Config
    from headrace.training.figures.duration import Attempt

TRACES = 40
"""Generated traces whose length stands for that of attempts."""


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("estimate", help="say how long a run takes on this machine's CPUs; starts nothing")
    parser.add_argument("config", metavar="TOML", help="configuration, such as deploy/demo-pretrained.toml")
    add_set(parser)
    parser.set_defaults(handler=estimate)


def estimate(args: argparse.Namespace) -> int:
    """Measure products for a second, and print the time of each part of the run."""
    from headrace.launch.admission import own
    from headrace.launch.output import say
    from headrace.launch.runs import RunError
    from headrace.policy.config import CheckpointError
    from headrace.policy.layout import hugging_face
    from headrace.policy.numerics_probe import limit_instructions
    from headrace.rendering.base import RendererError
    from headrace.training.figures import duration

    config = own(args.config, args.set)
    if config.engine.kind != "embedded" or config.trainer.device == "cuda":
        raise RunError(
            'headrace estimate measures CPUs: it needs [engine] kind = "embedded" and a trainer on the CPU', 2
        )
    try:
        policy = hugging_face.of_run(config)
        attempt = _attempt(config)
    except (CheckpointError, RendererError) as error:
        raise RunError(str(error), 2) from None
    if config.engine.exact:
        limit_instructions(policy)
    rates, cores = duration.measure(policy), os.cpu_count() or 1
    parts = duration.predict(config, policy, rates, attempt, cores)
    say(
        f"products in {policy.dtype}: {rates.large / 1e9:.0f} G operations/s a thread, {rates.small / 1e9:.0f} with "
        f"few rows; attempts of {'at most' if attempt.bound else 'about'} {attempt.read + attempt.written:.0f} tokens, "
        f"of which {attempt.written:.0f} are sampled"
    )
    say(f"mid-training    {_time(parts.mid_training):>9}   {config.mid_training.tokens:,} tokens")
    say(f"training        {_time(parts.steps * parts.step):>9}   {parts.steps} steps of {_time(parts.step)}")
    say(f"evaluations     {_time(parts.evaluations):>9}   {parts.evaluated} attempts")
    say(f"together about  {_time(parts.total):>9}   on {cores} cores without other work; a third more or less is usual")
    return 0


def _attempt(config: "Config") -> "Attempt":
    """Tokens of an attempt: as in generated traces, or the limits where the tasks are others. RendererError."""
    from headrace.actors.trainer import initial_policy
    from headrace.training.figures.duration import Attempt

    limits = config.limits
    if not str(config.tasks.suite).startswith("generated/"):
        return Attempt(limits.context_tokens - limits.max_tokens, limits.max_tokens, bound=True)
    with tempfile.TemporaryDirectory(prefix="headrace-estimate-") as folder:
        made = initial_policy.bundle(config, Path(folder))
    traces = list(itertools.islice(initial_policy.generated(config, made), TRACES))
    written = sum(weight == 1.0 for trace in traces for weight in trace.weights) / TRACES
    return Attempt(sum(len(trace.ids) for trace in traces) / TRACES - written, written)


def _time(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 100 else f"{seconds:.0f} s"
