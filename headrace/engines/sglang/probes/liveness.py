"""Finds a server that runs and does not answer: neither an exit nor a broken connection tells about it.

Idea: while requests are inside, /v1/loads is read for the admission of requests. When it is late, /ping is asked, which
the HTTP process answers alone. A server that answers neither hangs. One that answers /ping has a scheduler that hangs
or is busy, with a long prefill or a compilation: it gets `HUNG_S`. After a turn that could not be aborted at its
deadline a late /v1/loads is enough. A server that starts or whose weights change is not judged here, because the calls
of `lifecycle` and `weights.swap` have time limits of their own.
"""

import asyncio
from collections.abc import Awaitable, Callable

from headrace.engines.sglang.http import Reply, ServerError, Wire

LOADS_S = 10.0
"""Seconds in which /v1/loads must answer."""
PING_S = 5.0
"""Seconds in which /ping must answer after a late /v1/loads."""
HUNG_S = 300.0
"""Seconds without an answer of the scheduler after which a server hangs although its HTTP process answers."""


class Liveness:
    """Watches one server through the requests that the engine makes anyway."""

    def __init__(self, wire: Wire, paused: Callable[[], bool], hangs: Callable[[str], Awaitable[None]]) -> None:
        """paused: whether the server starts, or its weights change. hangs: ends a server that hangs; takes the
        reason."""
        self._wire, self._paused, self._hangs = wire, paused, hangs
        self._silent_since: float | None = None
        self._asking = asyncio.Lock()

    def heard(self) -> None:
        """The scheduler answered."""
        self._silent_since = None

    async def loads(self) -> Reply:
        """The reply of GET /v1/loads. ServerError when there is none; a server that hangs is reported before."""
        return await self._loads(HUNG_S)

    async def after_late_turn(self) -> None:
        """Report the server unless its scheduler answers."""
        try:
            await self._loads(0.0)
        except ServerError:
            return  # a server that is gone is found by the next request

    async def _loads(self, patience_s: float) -> Reply:
        """patience_s: seconds without an answer of the scheduler after which an answer to /ping does not help."""
        try:
            reply = await self._wire.get("/v1/loads?include=core", LOADS_S)
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
            await self._wire.get("/ping", PING_S)
            if now - since < patience_s:
                return
            why = f"its scheduler has not answered for {now - since:.0f} s"
        except ServerError as error:
            if error.kind == "gone":
                return
            why = f"it answered neither /v1/loads within {LOADS_S:g} s nor /ping within {PING_S:g} s"
        self.heard()
        await self._hangs(why)
