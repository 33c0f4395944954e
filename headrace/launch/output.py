"""Lines that a command shows to its user."""

import json
import os
import sys

import msgspec

from headrace.terminal_text import plain


def say(text: str) -> None:
    """Print a line on standard output, see `terminal_text`. A closed pipe (`| head`) does not end a run."""
    try:
        sys.stdout.write(plain(text) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say_report(report: msgspec.Struct) -> None:
    """Print a report as one line of JSON."""
    say(json.dumps(msgspec.to_builtins(report)))


def complain(text: str) -> None:
    """Print a sentence on standard error."""
    sys.stderr.write(f"headrace: {plain(text)}\n")
    sys.stderr.flush()
