"""The processes that a slot has started: a group that is counted and killed as a whole.

In a machine they are a control group (boot/confine.py), in the process backend the agent's descendants (local.py).
"""

import os
import signal
from contextlib import suppress
from typing import Protocol


class Tools(Protocol):
    """The processes that a slot has started."""

    def full(self) -> bool:
        """Whether there are as many as there may be."""

    def exhausted(self) -> bool:
        """Whether one was refused or killed for lack of processes or memory since the last `kill`."""

    def kill(self) -> None:
        """Kill all of them."""

    def enter(self) -> None:
        """Count this process as one of them."""


class Namespace:
    """Every process of this PID namespace but the first one, where no control group holds them."""

    def full(self) -> bool:
        """Unknown: the fork itself fails."""
        return False

    def exhausted(self) -> bool:
        """Unknown as well."""
        return False

    def kill(self) -> None:
        """Kill all of them."""
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)

    def enter(self) -> None:
        """A fork is in the namespace already."""
