"""The states of a server: started and checked, serving a known version, lost, restored.

Idea: one method (`_change`) makes the server serve the weights of a request: it waits for a server that answers, starts
it if this engine owns it and it has ended, checks whether it holds the version already, and otherwise stages and loads
the version. First load, next version, pinned version and a killed server all use this method, with the gate closed. A
request whose server is gone only reports that; the next request or `restore` brings the server back.
"""

import asyncio
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable

from headrace.engines.base import EngineError, SampleRequest
from headrace.engines.server.backend import Ask, Backend, IncompatibleServer, Terms
from headrace.engines.server.http import ServerError
from headrace.engines.server.process import Server
from headrace.engines.server.weights.lock import Gate, NotServed, VersionFile
from headrace.engines.server.weights.swap import Swapper

POLL_S = 0.25


class Life:
    """The state of one server, and the versions that it serves or should serve."""

    def __init__(
        self,
        backend: Backend,
        swapper: Swapper,
        server: Server | None,
        start_s: float,
        take_back: Callable[[], Awaitable[None]],
    ) -> None:
        """start_s: seconds in which a server must answer. take_back: called right before a pause, aborts requests."""
        self._backend, self._swapper, self._server = backend, swapper, server
        self._start_s, self._take_back = start_s, take_back
        self._loading = asyncio.Lock()
        self.gate = Gate(self._change)
        self.terms: Terms | None = None
        self.version = -1
        """The version of `latest`; -1 before the first load."""
        self.versions: dict[str, int] = {}
        """Label to version, for all weights that were ever named here."""
        self.replaced: set[str] = set()
        """Labels of weights whose version number others have now."""
        self._latest: VersionFile | None = None
        self._held: VersionFile | None = None
        """The weights that the server is known to hold; None when that is not known."""
        self._pinned: dict[int, VersionFile] = {}
        self._strange = False
        self._proven: set[str] = set()
        """Fingerprints of servers whose probe turn was read."""
        self.losses = self.returns = 0
        """Numbers of times that a server that served was lost, and that one served again after that."""
        self.on_loss: Callable[[], None] = lambda: None
        """Called at each loss."""
        self._mixed: Counter[str] = Counter()
        """Label to the number of times that requests of these weights continued with other weights."""

    @property
    def serves(self) -> bool:
        """Whether the server is known to serve weights of this engine, and its process runs if this engine owns it."""
        return self.gate.serving is not None and (self._server is None or self._server.alive)

    def has(self, version: int, state_hash: str) -> bool:
        """Whether `latest` is this version, with these bits."""
        latest = self._latest
        return latest is not None and (latest.version, latest.state_hash) == (version, state_hash)

    def salt(self, weights: VersionFile) -> str:
        """The salt of prefix-cache keys for these weights. Requests that continued with other weights left keys and
        values under the old salt, so the same weights get a new salt when they are loaded again."""
        count = self._mixed[weights.label]
        return f"{weights.label}.{count}" if count else weights.label

    def name(self, version: int, path: str, state_hash: str) -> VersionFile:
        """The weights of a version; records their label."""
        weights = VersionFile(version, path, state_hash)
        self.versions[weights.label] = version
        return weights

    async def load(self, weights: VersionFile) -> None:
        """Make weights `latest`; those that serve already are not loaded again. EngineError when they are refused; the
        old ones then stay `latest`."""
        async with self._loading:
            before, current = self._latest, self.gate.serving == self._latest
            self._latest = weights
            self._renumber()  # before the change, because requests may end before this call returns
            try:
                if current and before is not None and before.label == weights.label and self.serves:
                    self.gate.serving, self._swapper.pause_ms = weights, 0.0
                elif current:
                    await self.gate.replace(weights)
                else:
                    await self.gate.turn_to(lambda: weights)
            except BaseException:
                self._latest = before
                self._renumber()
                raise
            self.version = weights.version

    def pin(self, weights: VersionFile) -> None:
        """Hold a version for requests that name it."""
        self._pinned[weights.version] = weights
        self._renumber()

    def unpin(self, version: int) -> None:
        """Release a pinned version."""
        self._pinned.pop(version, None)

    def _renumber(self) -> None:
        """Note which weights had the version numbers that other weights have now."""
        named = [weights for weights in (self._latest, *self._pinned.values()) if weights is not None]
        numbers = {weights.version for weights in named}
        self.replaced |= {label for label, version in self.versions.items() if version in numbers}
        self.replaced -= {weights.label for weights in named}

    def wanted(self, request: SampleRequest) -> VersionFile:
        """The weights that a request names. EngineError when this engine does not have them."""
        if request.policy.kind == "pinned":
            pinned = self._pinned.get(request.policy.version)
            if pinned is None:
                raise EngineError(f"version {request.policy.version} is not pinned in this engine")
            return pinned
        if request.policy.kind != "latest":
            raise EngineError(f"a server has no {request.policy.kind} policy")
        if self._latest is None:
            raise EngineError("the engine has no weights yet; load a version first")
        return self._latest

    def lost(self, *, strange: bool = False) -> None:
        """Record that the server is gone, or serves weights that this engine did not load (strange). The next request
        that enters restores it.

        The version that a strange server reports is not used: after a failed update it may differ from the weights that
        its scheduler computes with.
        """
        served = self.gate.serving is not None
        self.gate.serving = self._held = self.terms = None
        self._strange = strange
        if served and not strange:
            self.losses += 1
            self.on_loss()

    async def restore(self) -> None:
        """Make the server serve `latest` again. EngineError when it cannot."""
        latest = self._latest
        if latest is not None:
            await self.gate.turn_to(lambda: self._latest or latest)

    async def _change(self, weights: VersionFile) -> None:
        """Make the server serve `weights`, in whatever state it is. NotServed, EngineError."""
        try:
            terms = await self._up(weights)
            if self._held is None:
                await self._swapper.ready(weights)
            if self._held is None and not self._strange and await self._swapper.holds(weights, terms):
                self._swapper.pause_ms = 0.0
            else:
                if self._held is not None and self.gate.inside:
                    self._mixed[self._held.label] += 1
                await self._swapper.change(weights, self._held, terms, self._take_back)
            self._held, self._strange = weights, False
            await self._prove(weights, terms)
            self.returns = self.losses
        except ServerError as error:
            self._held = None
            self._end_hung(error)
            raise NotServed(f"no server could be made to serve version {weights.version}: {error}") from error
        except BaseException as error:
            if isinstance(error, NotServed):
                self._end_hung(error)
            if isinstance(error, NotServed) or not isinstance(error, EngineError):
                self._held = None  # for example after a cancellation: the next request checks the server's state
            raise

    def _end_hung(self, error: BaseException) -> None:
        """Kill a server of this engine when a call of its change was late: it hangs, or is stuck between two versions,
        and is started again on the next try."""
        if self._server is not None and self._server.alive and _is_late(error):
            self.lost()
            self._server.kill()

    async def _up(self, weights: VersionFile) -> Terms:
        """Wait for a server that answers and passes the checks. A server of this engine that has ended is started with
        the staged `weights`. NotServed, ServerError, IncompatibleServer."""
        while True:
            fresh = self._server is not None and not self._server.alive
            if self._server is not None and fresh:
                self.lost()
                await self._swapper.ready(weights)
                self._swapper.paused = False
                port = self._server.port
                await self._server.start(self._backend.command(self._swapper.folder, weights.label, port))
            if self.terms is None:
                try:
                    return await self.attach()
                except NotServed:
                    if fresh:
                        raise
                    continue  # it ended during the check: start it again
            return self.terms

    async def _prove(self, weights: VersionFile, terms: Terms) -> None:
        """Ask for a turn of two tokens, which shows what a description does not contain: log-probabilities, the version
        of each token, and routed experts. IncompatibleServer when the reply lacks one of them."""
        if terms.fingerprint in self._proven:
            return
        asked = Ask(
            f"probe{uuid.uuid4().hex}"[:32], (0, 1), 2, 1.0, (), 0, 0, weights.label, "train", followed=False
        )  # fmt: skip
        try:
            async with asyncio.timeout(self._start_s):
                attempt = await self._backend.generate(asked, lambda ids: None)
        except TimeoutError:
            raise ServerError(
                "late", f"the server at {self._backend.wire.url} did not sample two tokens within {self._start_s:.0f} s"
            ) from None
        except ServerError as error:
            if error.kind in ("refused", "garbled"):
                raise IncompatibleServer(f"the server's first turn cannot be used: {error}") from error
            raise
        if attempt.finish == "length":
            self._proven.add(terms.fingerprint)

    async def attach(self) -> Terms:
        """The server's description of itself, as soon as it answers. NotServed when this engine's server ended;
        ServerError after `start_s` seconds; IncompatibleServer."""
        end = asyncio.get_running_loop().time() + self._start_s
        while True:
            try:
                self.terms = await self._backend.describe()
                return self.terms
            except ServerError as error:
                if self._server is not None and not self._server.alive:
                    why = f"{self._server.reason()} (log: {self._server.log})"
                    raise NotServed(f"the {self._backend.name} server ended: {why}") from None
                if asyncio.get_running_loop().time() > end:
                    # A server that accepts connections and does not answer hangs; one that still starts does not.
                    raise ServerError(
                        "late" if error.kind == "late" else "gone",
                        f"no server answered within {self._start_s:.0f} s (start_s): {error}",
                    ) from None
            await asyncio.sleep(POLL_S)


def _is_late(error: BaseException | None) -> bool:
    """Whether an error is, or came from, a call that was not answered in time."""
    if error is None:
        return False
    if isinstance(error, ServerError) and error.kind == "late":
        return True
    return _is_late(error.__cause__) or _is_late(error.__context__)
