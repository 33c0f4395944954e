"""The life of a server as its engine sees it: up and fit, serving a known version, lost, back again.

Idea: there is one question, "does the server serve what this request wants", and one way to make it so (`_change`):
have a server that answers, started if it is ours and down; see whether it holds the version already; else stage it and
change it. First load, next version, pinned version, a server that was killed: all of them take this way, with the gate
closed. A request that finds the server gone only reports it; the next request brings it back, or `restore` does.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

from headrace.engines.base import EngineError, SampleRequest
from headrace.engines.sglang.compatibility import IncompatibleServer, Terms, terms
from headrace.engines.sglang.http import Reply, ServerError, Wire
from headrace.engines.sglang.server import Server
from headrace.engines.sglang.weights.lock import Gate, NotServed, VersionFile
from headrace.engines.sglang.weights.sparse import FOLDER, LOADER
from headrace.engines.sglang.weights.swap import Swapper
from headrace.policy.config import PolicyConfig

POLL_S = 0.25


class Life:
    """The known weights, the wanted ones, and the server that serves them."""

    def __init__(
        self,
        config: PolicyConfig,
        wire: Wire,
        swapper: Swapper,
        server: Server | None,
        start_s: float,
        take_back: Callable[[], Awaitable[None]],
    ) -> None:
        """start_s: for a server to come up. take_back: what happens to requests in flight right before a pause."""
        self._config, self._wire, self._swapper, self._server = config, wire, swapper, server
        self._start_s, self._take_back = start_s, take_back
        self._loading = asyncio.Lock()
        self.gate = Gate(self._change)
        self.terms: Terms | None = None
        self.version = -1
        """What `latest` means now."""
        self.versions: dict[str, int] = {}
        """Version by label, of all weights ever named here."""
        self._latest: VersionFile | None = None
        self._held: VersionFile | None = None
        """The weights that the server is known to hold, to return to."""
        self._pinned: dict[int, VersionFile] = {}
        self._strange = False
        self._mixed: Counter[str] = Counter()
        """By label, how often requests of these weights went on under others."""

    def salt(self, weights: VersionFile) -> str:
        """Of prefix-cache keys: what went on under other weights left its keys and values under the old salt, so
        the weights come back, as a pinned version, with a salt that nobody had."""
        count = self._mixed[weights.label]
        return f"{weights.label}.{count}" if count else weights.label

    def name(self, version: int, path: str, state_hash: str) -> VersionFile:
        """Remember a version's label."""
        weights = VersionFile(version, path, state_hash)
        self.versions[weights.label] = version
        return weights

    async def load(self, weights: VersionFile) -> None:
        """Make it `latest`. EngineError when it was refused: the old one is."""
        async with self._loading:
            before, current = self._latest, self.gate.serving == self._latest
            self._latest = weights
            try:
                if current:
                    await self.gate.replace(weights)
                else:
                    await self.gate.turn_to(lambda: weights)
            except BaseException:
                self._latest = before
                raise
            self.version = weights.version

    def pin(self, weights: VersionFile) -> None:
        """Keep a version for requests that name it."""
        self._pinned[weights.version] = weights

    def unpin(self, version: int) -> None:
        """Forget it."""
        self._pinned.pop(version, None)

    def wanted(self, request: SampleRequest) -> VersionFile:
        """The weights that a request asks for. EngineError when this engine does not have them."""
        if request.policy.kind == "pinned":
            pinned = self._pinned.get(request.policy.version)
            if pinned is None:
                raise EngineError(f"version {request.policy.version} is not pinned in this engine")
            return pinned
        if request.policy.kind != "latest":
            raise EngineError(f"an SGLang server has no {request.policy.kind} policy")
        if self._latest is None:
            raise EngineError("no weights were loaded yet")
        return self._latest

    def lost(self, *, strange: bool = False) -> None:
        """The server is gone, or serves what nobody here loaded (strange): the next to enter sees to it.

        What a strange one says of itself at /model_info is not believed: after a failed update it differs from what its
        scheduler computes with.
        """
        self.gate.serving = self._held = self.terms = None
        self._strange = strange

    async def restore(self) -> None:
        """Have the server serve `latest` again. EngineError when it can't."""
        latest = self._latest
        if latest is not None:
            await self.gate.turn_to(lambda: self._latest or latest)

    async def attach(self) -> None:
        """Check a server that runs already. IncompatibleServer, EngineError."""
        self.terms = terms(await self._answer(), self._config)
        if self._swapper.sparse and not self.terms.loader:
            raise IncompatibleServer(
                f"sparse = true needs --custom-weight-loader {LOADER}, and {FOLDER} on the server's PYTHONPATH"
            )

    async def _change(self, weights: VersionFile) -> None:
        """Have the server serve `weights`, whatever state it is in."""
        try:
            found = await self._up(weights)
            if self._held is None:
                await self._swapper.ready(weights)
            if self._held is None and not self._strange and await self._swapper.holds(weights, found):
                self._swapper.pause_ms = 0.0
            else:
                if self._held is not None and self.gate.inside:
                    self._mixed[self._held.label] += 1
                await self._swapper.change(weights, self._held, found, self._take_back)
            self._held, self._strange = weights, False
        except ServerError as error:
            self._held = None
            raise NotServed(f"no server could be made to serve version {weights.version}: {error}") from error
        except BaseException as error:
            if isinstance(error, NotServed) or not isinstance(error, EngineError):
                self._held = None  # for example cancelled: the next request checks the server's state
            raise

    async def _up(self, weights: VersionFile) -> Terms:
        """Have a server that answers and is fit, started on the staged `weights` if it is ours and down."""
        while True:
            fresh = self._server is not None and not self._server.alive
            if self._server is not None and fresh:
                self.lost()
                await self._swapper.ready(weights)
                self._swapper.paused = False
                await self._server.start(self._swapper.folder, weights.label)
            if self.terms is None:
                try:
                    self.terms = terms(await self._answer(), self._config)
                except NotServed:
                    if fresh:
                        raise
                    continue  # it was ending during the check
            return self.terms

    async def _answer(self) -> Reply:
        """/server_info as soon as there is one. NotServed: our process ended. ServerError: none came in time."""
        end = asyncio.get_running_loop().time() + self._start_s
        while True:
            try:
                return await self._wire.get("/server_info", 10.0)
            except ServerError as error:
                if self._server is not None and not self._server.alive:
                    why = f"{self._server.reason()} (log: {self._server.log})"
                    raise NotServed(f"the SGLang server ended: {why}") from None
                if asyncio.get_running_loop().time() > end:
                    raise ServerError("gone", f"no server came up in {self._start_s:.0f} s: {error}") from None
            await asyncio.sleep(POLL_S)
