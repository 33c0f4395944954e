"""Say where a test waits when its time is up, then end the process.

pytest-timeout writes its stacks to the terminal of the process, and a worker of pytest-xdist has none: a test that
hangs in a whole run leaves one line, "node down". This plugin writes the test's id, the stack of every thread, every
unfinished asyncio task and the captured output to the standard error that the process was started with, which workers
share with the run.

The process ends because an exception raised by a signal is lost inside uvloop. The Makefile starts xdist with
``--max-worker-restart 0``: xdist 3.8 waits for ever for a replaced worker when the other workers are done (pytest-xdist
issue 1378), so a run that loses a worker ends with that failure.
"""

import asyncio
import faulthandler
import gc
import os
import threading
from typing import Any

import pytest


class Watchdog:
    """The timer of pytest-timeout, with a report that a worker's terminal does not lose."""

    def __init__(self) -> None:
        # Configuration runs before tests are captured, so this is the descriptor of the whole run.
        self.error = open(os.dup(2), "w", buffering=1, errors="replace")

    @pytest.hookimpl(tryfirst=True)
    def pytest_timeout_set_timer(self, item: Any, settings: Any) -> bool:
        """Start the timer of one test; pytest-timeout cancels it through ``item.cancel_timeout``."""
        timer = threading.Timer(settings.timeout, self.expire, (item, settings.timeout))
        timer.daemon = True
        timer.start()

        def cancel() -> None:
            timer.cancel()
            timer.join()

        item.cancel_timeout = cancel
        return True

    def expire(self, item: Any, seconds: float) -> None:
        """Write the report of a test that took longer than ``seconds`` and end this process with 1."""
        try:
            print(f"\n{item.nodeid} did not end within {seconds:g} s", file=self.error)
            self.report()
            capture = item.config.pluginmanager.getplugin("capturemanager")
            capture.suspend_global_capture()
            for text in capture.read_global_capture():
                print(text, file=self.error)
        finally:
            print(f"end of the report on {item.nodeid}", file=self.error)
            os._exit(1)

    def report(self) -> None:
        """The stack of each thread, and each unfinished task of any event loop."""
        faulthandler.dump_traceback(self.error, all_threads=True)
        # `isinstance` would ask proxies for the class of what they stand for, and a dead one raises.
        for task in [one for one in gc.get_objects() if issubclass(type(one), asyncio.Task)]:
            if not task.done():
                task.print_stack(file=self.error)


def register(config: pytest.Config) -> None:
    """Add the watchdog to a run of pytest."""
    config.pluginmanager.register(Watchdog(), "watchdog")
