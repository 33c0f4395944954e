"""The command line: assembles the commands, runs one, and turns every failure into one sentence and an exit code.

A file of commands contains `add(commands)`, which declares their arguments and sets `handler`, and the handlers:
functions or coroutine functions of the arguments. `args.settings` is the operator's configuration where a command takes
one (`arguments.add_config`). A handler imports heavy packages (torch, numpy, nats) itself, so that `--help` answers at
once.

Exit codes: 0 success; 1 a check failed (audit, replay, verify); 2 wrong arguments or configuration; 3 this machine
lacks something (QEMU, memory, disk); 4 the broker does not answer or a port is taken; 5 another run is active in this
folder; 130 interrupted.
"""

import argparse
import errno
import io
import os
import sys
from collections.abc import Sequence
from functools import cache
from inspect import isawaitable
from types import ModuleType
from typing import NoReturn

import shtab

from headrace import __version__
from headrace.cli import (
    bus,
    dashboard,
    export,
    harness,
    images,
    measure,
    observe,
    policy,
    product,
    recipe,
    replay,
    status,
    trainer,
    vm,
    weights,
)
from headrace.cli import run as running
from headrace.cli.tasks import suites as tasks
from headrace.errors import MACHINE, WRONG_INPUT, HeadraceError
from headrace.terminal_text import plain

MODULES: tuple[ModuleType, ...] = (
    recipe,
    running,
    status,
    dashboard,
    observe,
    replay,
    measure,
    export,
    product,
    tasks,
    policy,
    trainer,
    harness,
    images,
    vm,
    weights,
    bus,
)
"""The files of commands in the order in which `--help` lists them."""
FIRST_DAY = """\
Reinforcement learning for coding agents, as actors on a NATS message bus.

Write a run for your model, tasks and GPUs; each value has its reason:
  headrace init run.toml --model DIR --tasks SUITE --gpus 8x80
Find what would prevent it; then sample, train and swap once:
  headrace check run.toml
  headrace try run.toml
Start it and follow it to its report:
  headrace up run.toml
See its live page, and what its actors say:
  headrace dashboard latest
  headrace logs latest
Run a recorded step again and compare its bits:
  headrace replay latest --step 0
Take the policy as a Hugging Face folder:
  headrace export latest policy

`headrace --help` lists all commands, `headrace COMMAND --help` explains one.
Without a model: `headrace up deploy/demo.toml` in a clone.
"""


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
        prog="headrace",
        description="RL for coding agents on a NATS bus. --completion SHELL completes commands.",
    )
    top.add_argument("--version", action="version", version=f"headrace {__version__}")
    top.add_argument(
        "--completion",
        action=shtab.completion_action(top),
        choices=("bash", "zsh", "fish"),
        help=argparse.SUPPRESS,  # its width would move all other lines
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in MODULES:
        module.add(commands)
    return top


def run(args: argparse.Namespace) -> int:
    """Call the handler of the parsed command."""
    from headrace.launch.output import complain, end_progress
    from headrace.launch.session import looped
    from headrace.registry import admit

    try:
        if given := getattr(args, "plugins", None):
            from headrace.launch.admission import plugin

            for seam, name in map(plugin, given):
                admit(seam, [name])
        if getattr(args, "own", False):
            from headrace.launch.admission import own

            args.settings = own(args.config, args.set)
        done = args.handler(args)
        code = looped(done) if isawaitable(done) else int(done)
        sys.stdout.flush()
        return code
    except HeadraceError as error:
        complain(str(error))
        return error.exit_status
    except OSError:
        end_progress()
        raise


def _drop_unwritten() -> None:
    """Drop what standard output does not take: the interpreter would write it again at its end, and fail with 120."""
    try:
        sys.stdout.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def _open_streams() -> None:
    """Open standard streams that are closed: a socket with number 0, 1 or 2 makes libuv abort the process."""
    while (spare := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(spare)


class _Closed(io.TextIOBase):
    """Standard output that is closed: only a command that prints something fails."""

    def write(self, text: str) -> int:
        """Raise an OSError."""
        raise OSError(errno.EBADF, "it is closed; expected a terminal, a file or a pipe", "standard output")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; a failure is one sentence on standard error and an exit code."""
    _open_streams()
    sys.stderr = sys.stderr or open(os.devnull, "w")
    sys.stdout = sys.stdout or _Closed()
    try:
        if not (sys.argv[1:] if argv is None else argv):
            sys.stdout.write(FIRST_DAY)
            return 0
        return run(parser().parse_args(argv))
    except UsageError as error:
        sys.stderr.write(f"headrace: {plain(str(error))}\n")
        return error.exit_status
    except OSError as error:
        _drop_unwritten()
        told = plain(f"{error.filename or 'this machine'}: {error.strerror or error}")
        sys.stderr.write(f"headrace: {told}\n")
        return MACHINE
    except KeyboardInterrupt:
        sys.stderr.write("headrace: interrupted\n")
        return 130
