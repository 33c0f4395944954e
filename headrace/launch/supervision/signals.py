"""Ctrl-C, SIGTERM and SIGHUP: the first signal ends a command in order, the second at once; both close its parts."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from headrace.launch.output import complain

INTERRUPTED = 130


class Stopping:
    """`asked` after the first signal, `now` after the second."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.now = asyncio.Event()
        self.effect = "nothing had begun"
        """The effect of an interruption, for the sentence that the first signal prints."""

    def tell(self) -> None:
        """Handle a signal."""
        (self.now if self.asked.is_set() else self.asked).set()


Body = Callable[[Stopping, AsyncExitStack], Awaitable[int]]


async def interruptible(body: Body) -> int:
    """The body's exit code, or 130 when a signal ended it. Everything that it pushed on the stack is closed.

    The stack is closed here and not in the body, because a signal cancels the body wherever it is, also in its cleanup.
    """
    stopping = Stopping()
    loop = asyncio.get_running_loop()
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        numbers.append(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, stopping.tell)
    async with AsyncExitStack() as stack:
        main = asyncio.ensure_future(body(stopping, stack))
        asked = asyncio.ensure_future(stopping.asked.wait())
        await asyncio.wait({main, asked}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if main.done():
            return main.result()
        complain(f"interrupted: {stopping.effect}")
        main.cancel()
        await asyncio.wait({main})
        if not main.cancelled() and main.exception() is None:
            return main.result()
        return INTERRUPTED
