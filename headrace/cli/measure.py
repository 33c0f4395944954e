"""Commands that measure: how long a run takes here, a policy on tasks, a judge against labels."""

import argparse
import itertools
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_config, add_config_file, integer, number

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands
    from headrace.config import Config
    from headrace.judging.rubrics.card import Card
    from headrace.training.figures.duration import AttemptTokens


def add(commands: "Commands") -> None:
    """Declare the commands."""
    _add_estimate(commands)
    _add_eval(commands)


TRIALS = 5
GPU = "NVIDIA H100 80GB HBM3"
TRACES = 40

"""Generated traces whose length stands for that of attempts."""


def _add_estimate(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("estimate", help="say how long a run takes here, or on GPUs")
    add_config_file(parser, "configuration, such as deploy/demo-pretrained.toml")
    parser.add_argument("--gpu", default=GPU, metavar="NAME", help=f"with a trainer on CUDA: board; default: {GPU}")
    parser.add_argument("--gpu-hour", type=number(0), default=0.0, metavar="PRICE", help="price of a GPU-hour")
    parser.add_argument("--mfu", type=number(0, above=True), metavar="SHARE", help="of the trainer, as it was measured")
    parser.add_argument(
        "--engine-tokens", type=number(0, above=True), default=0.0, metavar="N", help="sampled tokens a second of a GPU"
    )
    parser.set_defaults(handler=estimate)


def estimate(args: argparse.Namespace) -> int:
    """Measure products for a second, and print the time of each part of the run."""
    from headrace.launch.output import say
    from headrace.launch.runs import RunError
    from headrace.policy.layout import hugging_face
    from headrace.training.figures import duration

    config = args.settings
    if config.trainer.device.startswith("cuda"):
        return _on_gpus(args)
    if config.engine.kind != "embedded":
        raise RunError(
            "headrace estimate measures CPUs with the embedded engine, or computes GPUs: set engine.kind = 'embedded', "
            "or trainer.device = 'cuda'",
            2,
        )
    policy = hugging_face.of_run(config)
    attempt = _attempt(config)
    rates, cores = duration.measure(policy, config.engine.exact), os.cpu_count() or 1
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


def _on_gpus(args: argparse.Namespace) -> int:
    """Print the seconds of a step by part, the GPU-hours of the run and their price, from stated speeds."""
    from headrace.launch.output import say
    from headrace.launch.runs import RunError
    from headrace.policy.layout import hugging_face
    from headrace.training.figures import gpu_duration
    from headrace.training.figures.peaks import board_peak

    config = args.settings
    peak = config.trainer.peak_tflops * 1e12 or board_peak(args.gpu)
    if not peak:
        raise RunError(f"--gpu: the peak of {args.gpu!r} is not known; set [trainer] peak_tflops", 2)
    attempt = _attempt(config)
    stated = gpu_duration.Stated(peak, args.mfu or gpu_duration.MFU, args.engine_tokens)
    step = gpu_duration.predict(config, hugging_face.of_run(config), attempt, stated)
    attempts = config.curriculum.groups_per_step * config.curriculum.group_size
    say(
        f"{attempts} attempts of {'at most' if attempt.bound else 'about'} {attempt.read + attempt.written:.0f} tokens "
        f"a step, of which {attempt.written:.0f} are sampled; MFU {stated.mfu:.2f} of {peak / 1e12:.0f} TFLOPS, stated"
    )
    for name in ("sampling", "training", "rescoring", "weights"):
        say(f"{name:<15} {_time(getattr(step, name)):>9}")
    say(f"step            {_time(step.seconds):>9}   bound by {step.bound}{'' if step.apart else '; parts in turn'}")
    hours = config.curriculum.steps * step.seconds / 3600
    price = f", {hours * step.gpus * args.gpu_hour:,.0f} at {args.gpu_hour:g} an hour" if args.gpu_hour else ""
    whole = f"{hours * step.gpus:,.1f} GPU-hours"
    say(f"{config.curriculum.steps} steps in {hours:.1f} h on {step.gpus} GPUs: {whole}{price}")
    return 0


def _attempt(config: "Config") -> "AttemptTokens":
    """Tokens of an attempt: as in generated traces, or the limits where the tasks are others. RendererError."""
    from headrace.actors.trainer import initial_policy
    from headrace.training.figures.duration import AttemptTokens

    limits = config.limits
    if not str(config.tasks.suite).startswith("generated/"):
        return AttemptTokens(limits.context_tokens - limits.max_tokens, limits.max_tokens, bound=True)
    with tempfile.TemporaryDirectory(prefix="headrace-estimate-") as folder:
        made = initial_policy.bundle(config, Path(folder))
    traces = list(itertools.islice(initial_policy.generated(config, made), TRACES))
    written = sum(weight == 1.0 for trace in traces for weight in trace.weights) / TRACES
    return AttemptTokens(sum(len(trace.ids) for trace in traces) / TRACES - written, written)


def _time(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 100 else f"{seconds:.0f} s"


def _add_eval(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("eval", help="measure a policy on a suite, or a judge against labels")
    measured = parser.add_mutually_exclusive_group(required=True)
    measured.add_argument(
        "--policy",
        help="scripted:oracle|idle|edit-tests, a checkpoint folder, RUN[:VERSION], or a benchmark's report (.json)",
    )
    measured.add_argument(
        "--judge",
        metavar="LABELS.jsonl",
        help="the judge of [judge] rubric; each line of the file is a pair: criterion, task, met, not_met",
    )
    parser.add_argument("--out", default="card.json", help="--judge: file of its card, which [judge] rubric_card names")
    parser.add_argument("--suite", default="", help="name of the suite; default: [tasks] heldout")
    parser.add_argument("--tasks", type=integer(0), default=0, help="number of tasks, from the first; 0 means all")
    parser.add_argument("--temperature", type=number(0), default=1.0, help="sampling temperature; 0 is greedy")
    parser.add_argument("--trials", type=integer(1), help="benchmark with this many trials per task (default 5)")
    parser.add_argument("--against", default="", metavar="POLICY", help="benchmark both policies on the same tasks")
    parser.add_argument(
        "--again",
        default="",
        metavar="ID",
        help="measure nothing: recompute this benchmark of the run from its streams",
    )
    add_config(parser)
    parser.set_defaults(handler=evaluate)


async def evaluate(args: argparse.Namespace) -> int:
    """Run the evaluation, the benchmark (--trials, --against) or the judge's measurement.

    1 when infrastructure failures left tasks without a verdict, or a recomputed benchmark differs from the streams.
    """
    from headrace.cli.replay import verdicts
    from headrace.launch.admission import suite
    from headrace.launch.measuring.benchmark import WantedBenchmark, benchmark, recomputed
    from headrace.launch.measuring.evaluation import Measurement
    from headrace.launch.measuring.evaluation import evaluate as measured

    if args.judge:
        return await judge_card(args)
    config, name = args.settings, suite(args.suite) or args.settings.tasks.heldout
    if args.again:
        return await recomputed(args.policy, Path(config.run.dir), args.again, lambda of: verdicts(of, None))
    if args.trials is None and not args.against:
        wanted = Measurement(policy=args.policy, suite=name, tasks=args.tasks, temperature=args.temperature)
        return await measured(config, wanted)
    compared = WantedBenchmark(
        policies=(args.against, args.policy) if args.against else (args.policy,),
        suite=name,
        tasks=args.tasks,
        trials=args.trials or TRIALS,
        temperature=args.temperature,
    )
    return await benchmark(config, compared, lambda of: verdicts(of, None))


async def judge_card(args: argparse.Namespace) -> int:
    """Write the card and print a line per criterion; 1 if the card gives a criterion no weight."""
    import msgspec

    from headrace.judging.rubrics.client import EndpointFailed
    from headrace.launch.output import say
    from headrace.launch.runs import RunError

    try:
        card = await card_of(args.settings, args.judge)
    except EndpointFailed as error:
        raise RunError(str(error), 4) from None
    Path(args.out).write_bytes(msgspec.json.format(msgspec.json.encode(card)))
    for item in card.criteria:
        counts = "counts" if item.counts else f"weight 0: {item.reason}"
        say(
            f"{item.id}: kappa {item.kappa:.2f} [{item.kappa_low:.2f}, {item.kappa_high:.2f}], flips {item.flips:.1%}, "
            f"retest {item.retest:.1%}, length bias {item.length_bias:+.2f}, {item.pairs} pairs; {counts}"
        )
    say(f"{card.calls} calls, {card.prompt_tokens} + {card.completion_tokens} tokens, cost {card.cost:.4f}: {args.out}")
    return 0 if all(item.counts for item in card.criteria) else 1


async def card_of(config: "Config", path: str) -> "Card":
    """The card of a configuration's judge. RubricError, EndpointFailed, EndpointRefused."""
    import msgspec

    from headrace.judging.rubrics.card import labels
    from headrace.judging.rubrics.judge import RubricJudge
    from headrace.judging.rubrics.measuring import measure as measure_judge
    from headrace.judging.rubrics.rubric import RubricError

    # An existing card would give weak criteria no weight; a new card measures every criterion.
    config = msgspec.structs.replace(config, judge=msgspec.structs.replace(config.judge, rubric_card=""))
    judge = RubricJudge.of(config) if config.judge.rubric else None
    if judge is None:
        raise RubricError("a card needs a rubric and a model: set [judge] rubric, model_url and model")
    try:
        return await measure_judge(judge, config.judge, labels(path))
    finally:
        await judge.close()
