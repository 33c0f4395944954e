"""Builds the command that reproduces a failure; the command is recorded with the failure.

The command line finds a run by its id in `runs/`; a run in another place is named by its folder.
"""

import shlex
from pathlib import Path

from headrace.bus.runtime import dead_letters
from headrace.config import Config
from headrace.messages.operations import DeadLetter


def name_of(config: Config, run: str) -> str:
    """The run's argument on the command line, quoted for a shell."""
    folder = Path(config.run.dir)
    return shlex.quote(run if folder == Path("runs") else str(folder / run))


def step(config: Config, run: str, number: int) -> str:
    """The command that takes a step again."""
    return f"headrace replay {name_of(config, run)} --step {number}"


def letter(config: Config, run: str, dead: DeadLetter) -> str:
    """The command that publishes a dead letter's message again. run: used if the message names no run."""
    return f"headrace dlq {name_of(config, dead_letters.run_of(dead) or run)} --retry {dead_letters.key_of(dead)}"
