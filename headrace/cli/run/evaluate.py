"""`headrace eval`: measure a policy on a suite of tasks."""

import argparse
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_config, integer, number

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("eval", help="measure a policy on a suite; prints one JSON line")
    parser.add_argument(
        "--policy", required=True, help="scripted:oracle|idle|edit-tests, a checkpoint folder, or RUN[:VERSION]"
    )
    parser.add_argument("--suite", required=True, help="name of the suite, such as generated/heldout")
    parser.add_argument("--tasks", type=integer(0), default=0, help="number of tasks, from the first; 0 means all")
    parser.add_argument("--temperature", type=number(0), default=1.0, help="sampling temperature; 0 is greedy")
    add_config(parser)
    parser.set_defaults(handler=evaluate)


def evaluate(args: argparse.Namespace) -> int:
    """Run the evaluation; 1 when infrastructure failures left tasks without a verdict."""
    from headrace.launch.admission import own, suite
    from headrace.launch.measuring.evaluation import Measurement
    from headrace.launch.measuring.evaluation import evaluate as measure
    from headrace.launch.session import looped

    wanted = Measurement(policy=args.policy, suite=suite(args.suite), tasks=args.tasks, temperature=args.temperature)
    return looped(measure(own(args.config, args.set), wanted))
