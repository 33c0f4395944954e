"""Finds a server that runs and does not answer: neither an exit nor a broken connection tells about it.

Idea: while requests are inside, the scheduler's figures are read for the admission of requests. When they are late, a
ping is sent, which the HTTP process answers alone. A server that answers neither hangs. One that answers the ping has a
scheduler that hangs or is busy, with a long prefill or a compilation: it gets `HUNG_S`. After a turn that could not be
aborted at its deadline late figures are enough. A server that starts or whose weights change is not judged here,
because the calls of `lifecycle` and `weights.swap` have time limits of their own.
"""

import asyncio
from collections.abc import Awaitable, Callable

from headrace.engines.server.backend import Backend, Load
from headrace.engines.server.http import ServerError

LOADS_S = 10.0
"""Seconds in which the scheduler must answer."""
PING_S = 5.0
"""Seconds in which a ping must be answered after late figures."""
HUNG_S = 300.0
"""Seconds without an answer of the scheduler after which a server hangs although its HTTP process answers."""


class Liveness:
    """Watches one server through the requests that the engine makes anyway."""

    def __init__(self, backend: Backend, paused: Callable[[], bool], hangs: Callable[[str], Awaitable[None]]) -> None:
        """paused: whether the server starts, or its weights change. hangs: ends a server that hangs; takes the
        reason."""
        self._backend, self._paused, self._hangs = backend, paused, hangs
        self._silent_since: float | None = None
        self._asking = asyncio.Lock()

    def heard(self) -> None:
        """The scheduler answered."""
        self._silent_since = None

    async def loads(self) -> Load:
        """The scheduler's figures. ServerError when there are none; a server that hangs is reported before."""
        return await self._loads(HUNG_S)

    async def after_late_turn(self) -> None:
        """Report the server unless its scheduler answers."""
        try:
            await self._loads(0.0)
        except ServerError:
            return  # a server that is gone is found by the next request

    async def _loads(self, patience_s: float) -> Load:
        """patience_s: seconds without an answer of the scheduler after which an answer to a ping does not help."""
        try:
            reply = await self._backend.load(LOADS_S)
        except ServerError as error:
            if error.kind == "late":
                async with self._asking:
                    await self._suspect(patience_s)
            raise
        self.heard()
        return reply

    async def _suspect(self, patience_s: float) -> None:
        now = asyncio.get_running_loop().time()
        if self._paused():
            self.heard()
            return
        since = self._silent_since = now - LOADS_S if self._silent_since is None else self._silent_since
        try:
            await self._backend.ping(PING_S)
            if now - since < patience_s:
                return
            why = f"its scheduler has not answered for {now - since:.0f} s"
        except ServerError as error:
            if error.kind == "gone":
                return
            why = f"neither its scheduler answered within {LOADS_S:g} s nor its HTTP process within {PING_S:g} s"
        self.heard()
        await self._hangs(why)
