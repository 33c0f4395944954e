"""`headrace bench`: the internal benchmark of one policy, or of two on the same tasks."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_config, integer, number

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("bench", help="measure a policy, several trials per task; compare it with another")
    parser.add_argument(
        "--policy",
        required=True,
        help="scripted:NAME, a checkpoint folder, RUN[:VERSION], or an earlier report (.json)",
    )
    parser.add_argument("--against", default="", help="policy to compare with, named in the same way")
    parser.add_argument("--suite", default="", help="name of the suite; empty: [tasks] heldout")
    parser.add_argument("--tasks", type=integer(0), default=60, help="number of tasks, from the first; 0 means all")
    parser.add_argument("--trials", type=integer(1), default=5, help="trials per task")
    parser.add_argument("--temperature", type=number(0), default=1.0, help="sampling temperature; 0 is greedy")
    parser.add_argument(
        "--again",
        default="",
        metavar="ID",
        help="measure nothing: recompute this benchmark of the run from its streams",
    )
    add_config(parser)
    parser.set_defaults(handler=bench)


def bench(args: argparse.Namespace) -> int:
    """Run the benchmark; 1 if trials have no verdict, or if the report differs from the streams."""
    from headrace.cli.replay.rejudge import verdicts
    from headrace.launch.admission import own, suite
    from headrace.launch.measuring.benchmark import Wanted, benchmark, recomputed
    from headrace.launch.session import looped

    config = own(args.config, args.set)
    if args.again:
        return looped(recomputed(args.policy, Path(config.run.dir), args.again, lambda of: verdicts(of, None)))
    wanted = Wanted(
        policies=(args.against, args.policy) if args.against else (args.policy,),
        suite=suite(args.suite) or config.tasks.heldout,
        tasks=args.tasks,
        trials=args.trials,
        temperature=args.temperature,
    )
    return looped(benchmark(config, wanted, lambda of: verdicts(of, None)))
