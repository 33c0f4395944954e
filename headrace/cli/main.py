"""The command line: assembles the commands, runs one, and turns every failure into one sentence and an exit code.

A command is a module that contains a handler and `add(commands)`; `add` declares the arguments and sets `handler`.
A module imports heavy packages (torch, numpy, nats) inside its handler, so that `--help` answers at once.

Exit codes: 0 success; 1 a check failed (audit, replay, verify); 2 wrong arguments or configuration; 3 this machine
lacks something (QEMU, memory, disk); 4 the broker does not answer or a port is taken; 5 another run is active in this
folder; 130 interrupted.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import NoReturn

from headrace import __version__
from headrace.cli import acp, deploy
from headrace.cli.bus import backup, declare, permissions, restore
from headrace.cli.config import explain
from headrace.cli.feedback import gate, promote, purge, rollback
from headrace.cli.images import build as images_build
from headrace.cli.images import gc as images_gc
from headrace.cli.images import listing as images_list
from headrace.cli.images import pull as images_pull
from headrace.cli.images import take as images_take
from headrace.cli.keys import add as keys_add
from headrace.cli.keys import listing as keys_list
from headrace.cli.keys import revoke as keys_revoke
from headrace.cli.lines import report as lines_report
from headrace.cli.lines import watch as lines_watch
from headrace.cli.mcp import serve as mcp_serve
from headrace.cli.measure import bench, estimate, judge_card
from headrace.cli.observe import dashboard, export_metrics, logs, top
from headrace.cli.policy import collect as policy_collect
from headrace.cli.policy import from_gguf
from headrace.cli.policy import train as policy_train
from headrace.cli.replay import dlq, rejudge, replay, retrain
from headrace.cli.run import actor, audit, chaos, check, down, evaluate, launch, staleness, status, subjects, up, wire
from headrace.cli.run import export as run_export
from headrace.cli.tasks import atif, certify, export_suite, from_sdist, history, import_suite, make, patches, show
from headrace.cli.trainer import join as trainer_join
from headrace.cli.trainer import plan
from headrace.cli.vm import build, doctor, facts, fork, gc, import_image, pool, shell
from headrace.cli.vm import run as vm_run
from headrace.cli.weights import collect, diff, export, log, regions, verify
from headrace.cli.weights import show as weights_show
from headrace.errors import MACHINE, WRONG_INPUT, HeadraceError
from headrace.terminal_text import plain

COMMANDS: tuple[ModuleType, ...] = (
    up,
    check,
    estimate,
    launch,
    down,
    dashboard,
    top,
    logs,
    chaos,
    actor,
    status,
    audit,
    staleness,
    gate,
    promote,
    purge,
    rollback,
    replay,
    rejudge,
    retrain,
    dlq,
    evaluate,
    bench,
    run_export,
    export_metrics,
    deploy,
    acp,
    subjects,
    wire,
)
"""Commands in the order in which `--help` lists them."""

GROUPS: tuple[tuple[str, str, tuple[ModuleType, ...]], ...] = (
    (
        "bus",
        "prepare a broker that headrace did not start; back streams up and restore them",
        (declare, backup, restore, permissions),
    ),
    ("config", "show where the value of a configuration key comes from", (explain,)),
    ("policy", "checkpoints of a policy, and their training on data", (from_gguf, policy_train, policy_collect)),
    (
        "tasks",
        "make, import and export task suites",
        (from_sdist, make, history, import_suite, certify, export_suite, atif, patches, show),
    ),
    ("mcp", "serve headrace's tools to external agents", (mcp_serve,)),
    ("judge", "models that judge rubrics", (judge_card,)),
    ("trainer", "plan the memory of a trainer; start the ranks of another machine", (plan, trainer_join)),
    ("images", "the store of container images", (images_pull, images_take, images_build, images_list, images_gc)),
    (
        "vm",
        "guest images and sandboxes of this host",
        (build, import_image, pool, shell, vm_run, fork, facts, gc, doctor),
    ),
    ("lines", "report which lines of agents a git repository still has", (lines_watch, lines_report)),
    ("keys", "API keys of the gateway", (keys_add, keys_list, keys_revoke)),
    (
        "weights",
        "the chain of published weight versions",
        (log, weights_show, verify, export, diff, collect, regions),
    ),
)
"""Commands with subcommands: name, help text, and the module of each subcommand."""


class UsageError(HeadraceError, exit_status=WRONG_INPUT):
    """The arguments are wrong; the text is one sentence."""


class Parser(argparse.ArgumentParser):
    """A parser that raises UsageError instead of printing the usage and ending the process."""

    def error(self, message: str) -> NoReturn:
        """Raise the sentence, with the command that prints the arguments."""
        raise UsageError(f"{message}; see `{self.prog} --help`")


@cache
def parser() -> argparse.ArgumentParser:
    """All commands and their arguments. A process that runs several commands makes the parser once."""
    top = Parser(
        prog="headrace", description="Reinforcement learning for coding agents, as actors on a NATS message bus."
    )
    top.add_argument("--version", action="version", version=f"headrace {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in COMMANDS:
        module.add(commands)
    for name, text, modules in GROUPS:
        group = commands.add_parser(name, help=text)
        subcommands = group.add_subparsers(dest="subcommand", required=True, metavar="COMMAND")
        for module in modules:
            module.add(subcommands)
    return top


def run(args: argparse.Namespace) -> int:
    """Call the handler of the parsed command."""
    from headrace.launch.output import complain
    from headrace.registry import admit

    try:
        if given := getattr(args, "plugins", None):
            from headrace.launch.admission import plugin

            for seam, name in map(plugin, given):
                admit(seam, [name])
        code: int = args.handler(args)
        return code
    except HeadraceError as error:
        text, code = str(error), error.exit_status
    except OSError as error:
        text, code = f"{error.filename or 'this machine'}: {error.strerror or error}", MACHINE
    complain(text)
    return code


def _open_streams() -> None:
    """Open standard streams that are closed: a socket with number 0, 1 or 2 makes libuv abort the process."""
    while (spare := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(spare)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; a failure is one sentence on standard error and an exit code."""
    _open_streams()
    try:
        return run(parser().parse_args(argv))
    except UsageError as error:
        sys.stderr.write(f"headrace: {plain(str(error))}\n")
        return error.exit_status
    except KeyboardInterrupt:
        sys.stderr.write("headrace: interrupted\n")
        return 130
