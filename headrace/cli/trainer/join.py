"""`headrace trainer join`: starts this machine's ranks of a trainer on several nodes, and starts them again.

The actor's machine is node 0. A node's number and the address of node 0 may come from the variables of torchrun and of
Slurm: NODE_RANK, GROUP_RANK or SLURM_NODEID, and MASTER_ADDR with MASTER_PORT. Under torchrun these two are the address
of its agent's store, so they are not read there.
"""

import argparse
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_set, integer, number
from headrace.launch.admission import own
from headrace.launch.output import say
from headrace.launch.runs import RunError

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands

NUMBERS = ("NODE_RANK", "GROUP_RANK", "SLURM_NODEID")
"""Variables with this node's number; the first that is set counts."""


def add(commands: "Commands") -> None:
    """Declare the command."""
    parser = commands.add_parser("join", help="start this machine's ranks of a trainer on several nodes")
    parser.add_argument("config", metavar="CONFIG", help="TOML file of the run, the same as on the trainer's machine")
    parser.add_argument("--node", type=integer(1), metavar="N", help=f"this machine's number (default: {NUMBERS[0]})")
    parser.add_argument(
        "--master",
        default="",
        metavar="HOST:PORT",
        help="the trainer's machine (default: MASTER_ADDR and MASTER_PORT, else trainer.rendezvous)",
    )
    parser.add_argument(
        "--wait", type=number(0, above=True), metavar="S", help="end after so long without a trainer (default: never)"
    )
    parser.add_argument("--once", action="store_true", help="end when the trainer stops, instead of waiting again")
    add_set(parser)
    parser.set_defaults(handler=join)


def join(args: argparse.Namespace) -> int:
    """Run this machine's ranks until SIGTERM; 1 when the trainer refuses this node."""
    config = own(args.config, args.set)
    node = node_of(os.environ) if args.node is None else args.node
    address = args.master or master_of(os.environ) or config.trainer.rendezvous
    if config.trainer.nodes == 1:
        raise RunError("trainer.nodes: expected 2 or more in the configuration of a run that nodes join, got 1")
    if node is None:
        raise RunError(f"expected this machine's number: --node N, or one of {', '.join(NUMBERS)}")

    if os.environ.get("LOCAL_RANK", "0") != "0":
        raise RunError("expected one process of a machine, which starts its ranks itself: torchrun --nproc-per-node 1")

    from headrace.training.device import TrainerError
    from headrace.training.parallel.nodes import join as joining

    try:
        joining.join(config, node, address, say, wait_s=args.wait or 0.0, once=args.once)
    except TrainerError as error:
        raise RunError(str(error), 1) from None
    return 0


def node_of(environment: Mapping[str, str]) -> int | None:
    """This machine's number; None when no variable has one. RunError for another text than a number."""
    for name in NUMBERS:
        if text := environment.get(name, ""):
            if not text.isdecimal():
                raise RunError(f"{name}: expected a number, got {text!r}")
            return int(text)
    return None


def master_of(environment: Mapping[str, str]) -> str:
    """HOST:PORT of the trainer's machine; empty when no variables have it, and under torchrun."""
    if "TORCHELASTIC_RUN_ID" in environment:
        return ""
    host, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    return f"{host}:{port}" if host and port else ""
