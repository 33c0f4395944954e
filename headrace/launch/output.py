"""What a command tells whoever watches."""

import os
import sys


def say(text: str) -> None:
    """One line on standard output. A reader that left (`| head`) does not end a run."""
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def complain(text: str) -> None:
    """The one sentence on standard error."""
    sys.stderr.write(f"headrace: {text}\n")
    sys.stderr.flush()
