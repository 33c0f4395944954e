"""`headrace up`: start a whole run on this machine and follow it to its report."""

import argparse
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_set

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands
    from headrace.config import Config


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("up", help="start a whole run on this machine and follow it to its end")
    parser.add_argument("config", metavar="TOML", help="configuration, such as deploy/demo.toml")
    add_set(parser)
    parser.set_defaults(handler=up)


def up(args: argparse.Namespace) -> int:
    """Start the run; returns when it has ended and every process is gone."""
    from headrace.launch.admission import own
    from headrace.launch.session import looped
    from headrace.launch.up import up as start

    config = own(args.config, args.set)
    refuse_data(config)
    return looped(start(config))


def refuse_data(config: "Config") -> None:
    """Refuse data of mid-training that is not right. RunError with exit code 2."""
    if not config.mid_training.data or not config.mid_training.tokens:
        return
    from headrace.actors.trainer import initial_policy
    from headrace.launch.runs import RunError
    from headrace.rendering.base import RendererError
    from headrace.training.data.base import DataError

    try:
        initial_policy.check_data(config)
    except (DataError, RendererError) as error:
        raise RunError(str(error), 2) from None
