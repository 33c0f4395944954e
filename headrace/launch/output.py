"""Lines that a command shows to its user, and the progress line below them."""

import json
import os
import shutil
import sys
import time

import msgspec

from headrace.terminal_text import plain

PIPED_S = 60.0
"""Seconds between two progress lines where standard output is a file or a pipe."""
CLEAR = "\r\x1b[K"


class _Progress:
    """The last line of a terminal, which changes in place."""

    line = ""
    printed = -PIPED_S


def say(text: str) -> None:
    """Print a line on standard output, see `terminal_text`. A closed pipe (`| head`) does not end a run."""
    _write(f"{CLEAR if _Progress.line else ''}{plain(text)}\n{_Progress.line}")


def show(line: str) -> None:
    """Replace the progress line of a terminal; in a file or a pipe, print one a minute."""
    if sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        _Progress.line = plain(line)[: shutil.get_terminal_size().columns - 1]
        _write(CLEAR + _Progress.line)
    elif time.monotonic() - _Progress.printed >= PIPED_S:
        _Progress.printed = time.monotonic()
        say(line)


def end_progress() -> None:
    """Keep the progress line as it is; the next output begins below it."""
    if _Progress.line:
        _Progress.line = ""
        _write("\n")


def say_report(report: msgspec.Struct) -> None:
    """Print a report as one line of JSON."""
    say(json.dumps(msgspec.to_builtins(report)))


def complain(text: str) -> None:
    """Print a sentence on standard error."""
    end_progress()
    sys.stderr.write(f"headrace: {plain(text)}\n")
    sys.stderr.flush()


def _write(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
