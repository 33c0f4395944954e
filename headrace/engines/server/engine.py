"""`engines.base.Engine` over one server, by HTTP.

Idea: the server keeps the KV cache and computes; this class keeps the guarantees of `engines.base.Engine`. A
`backend.Backend` translates for one kind of server. A turn is one or more attempts (`generation`). An attempt is one
request: it is admitted (`load`), takes the weight lock (`weights.lock`), and its reply is checked (`reply`). The salt
of its prefix-cache key names the version that serves. Weights change while requests run (`weights.swap`).

An id outside the vocabulary is refused here: it would end the server, and a redelivery would end the next one.

The loss of a server costs only time. An interrupted attempt is sent again once a server serves the same version again;
a turn during which the server ended twice is an EngineError. A server that runs and does not answer
(`liveness`) is killed, and is then lost like any other.

Trade-off: the server draws the tokens. A repetition gives other ids, unless it runs with deterministic inference.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from headrace.engines.base import EngineError, Sample, SampleRequest, Swap, check_request
from headrace.engines.server.backend import Ask, Attempt, Backend, Requests
from headrace.engines.server.generation import InFlight, Session, Turn
from headrace.engines.server.http import ServerError
from headrace.engines.server.lifecycle import Life
from headrace.engines.server.liveness import Liveness
from headrace.engines.server.load import Admission
from headrace.engines.server.process import Server
from headrace.engines.server.weights.checksums import Expectations
from headrace.engines.server.weights.lock import VersionFile
from headrace.engines.server.weights.staging import Stage, Verified
from headrace.engines.server.weights.swap import Swapper
from headrace.policy.config import PolicyConfig

TURN_S = 600.0
"""Time limit of one turn on a server."""
DEATHS = 2
"""A turn is given up when the server has ended this many times during it."""
IDLE_LEGS = 8
"""Number of consecutive attempts without a token after which a turn is given up."""
GRACE_S = 5.0
"""Seconds in which an aborted request must return its tokens."""
_log = logging.getLogger("headrace.engines.server")


class ServerLost(EngineError):
    """The server of a turn is lost, and the caller has another one that can sample the turn."""


class OneServer:
    """The engine of one server, which it starts, or which runs already."""

    def __init__(
        self,
        config: PolicyConfig,
        folder: str | Path,
        backend: Backend,
        *,
        server: Server | None = None,
        tokenizer: Path | None = None,
        max_batch: int = 64,
        swap: Literal["in_place", "abort"] = "in_place",
        deadline_s: float = TURN_S,
        start_s: float = 600.0,
    ) -> None:
        """folder: of the checkpoint that the server loads, on the file system of the versions. server: the one to
        start, at the address of `backend`; None for one that runs.

        swap: change weights while requests run, or abort the requests first and send them again. deadline_s: seconds
        after which a turn is aborted and returns its tokens so far. start_s: seconds in which a server must answer.
        """
        self._config, self._server, self._mode = config, server, swap
        self._deadline_s = deadline_s
        self._backend, self._wire = backend, backend.wire
        self._stage = Stage(folder, config, tokenizer)
        self._swapper = Swapper(backend, self._stage, config)
        self._life = Life(backend, self._swapper, server, start_s, self._take_back)
        self._liveness = Liveness(backend, lambda: self._swapper.paused or not self._life.serves, self._hangs)
        self._admission = Admission(max_batch, self._liveness.loads)
        self._watch: asyncio.Task[None] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._aborting: set[asyncio.Task[Any]] = set()
        self._sessions: dict[str, Session] = {}
        self._in_flight: dict[str, InFlight] = {}
        self._fingerprint = ""
        self._stopped = False
        self._elsewhere: Callable[[], bool] = lambda: False
        self.counts = {
            "sampled": 0,
            "attempts": 0,
            "taken_back": 0,
            "redrawn": 0,
            "lost": 0,
            "hung": 0,
            "cached": 0,
            "retracted": 0,
        }

    @property
    def fingerprint(self) -> str:
        """A hash of the server's reported arithmetic settings; never equal to the trainer's fingerprint."""
        return self._life.terms.fingerprint if self._life.terms is not None else self._fingerprint

    @property
    def version(self) -> int:
        """The version that `latest` means now; -1 before the first load."""
        return self._life.version

    @property
    def serves(self) -> bool:
        """Whether the server runs, as far as known, and serves weights of this engine."""
        return self._life.serves

    def join(
        self, elsewhere: Callable[[], bool], lost: Callable[[], None], expectations: Expectations, verified: Verified
    ) -> None:
        """Make this engine one of several. elsewhere: whether another server can sample its turns, which then get
        ServerLost and do not wait for a restart. lost: called at each loss of the server. All share `expectations` and
        `verified`."""
        self._elsewhere, self._life.on_loss = elsewhere, lost
        self._swapper.expectations, self._swapper.verified = expectations, verified

    def has(self, version: int, state_hash: str) -> bool:
        """Whether the server serves, with this version as `latest`."""
        return self.serves and self._life.has(version, state_hash)

    def stats(self) -> dict[str, float]:
        """Counters since the start, the server's last load figures, and figures of the last change of weights."""
        load, swapper = self._admission.load, self._swapper
        return self.counts | {
            "running": load.running,
            "waiting": load.waiting + self._admission.waiting,
            "allowed": self._admission.allowed,
            "kv_usage": load.usage,
            "tokens_per_s": load.tokens_per_s,
            "cache_hit_rate": load.hit_rate,
            "sessions": len(self._sessions),
            "pause_ms": swapper.pause_ms,
            "stage_ms": swapper.stage_ms,
            "reloads": swapper.reloads,
            "checked": swapper.checked,
            "unchecked": swapper.unchecked,
            "losses": self._life.losses,
            "returns": self._life.returns,
            "starts": self._server.starts if self._server is not None else 0,
            **{name: value for way in self._backend.ways for name, value in way.stats().items()},
        }

    async def outside(self) -> Requests | None:
        """The server's requests of clients other than headrace; None when the server cannot tell them apart.
        ServerError when it does not answer."""
        return None if self._life.terms is None else await self._backend.outside()

    async def attach(self) -> None:
        """Check a running server before its first use; nothing for a server to start. IncompatibleServer,
        EngineError."""
        if self._server is not None:
            return
        try:
            await self._life.attach()
        except BaseException:
            await self._wire.close()
            raise

    async def load(self, version: int, path: str, state_hash: str) -> Swap:
        """Serve a version as `latest`; requests in flight continue. EngineError when it is refused; the old one
        stays."""
        self._alive()
        await self._life.load(self._life.name(version, path, state_hash))
        self._fingerprint = self.fingerprint
        self._keep()
        return Swap(version=version, state_hash=state_hash, pause_ms=self._swapper.pause_ms)

    async def pin(self, version: int, path: str, state_hash: str) -> None:
        """Hold a version for requests that name it; the server loads it when such a request arrives."""
        self._alive()
        self._life.pin(self._life.name(version, path, state_hash))

    async def unpin(self, version: int) -> None:
        """Release a pinned version."""
        self._life.unpin(version)

    async def sample(self, request: SampleRequest) -> Sample:
        """Sample one generation. When the task is cancelled, the request is aborted on the server too.

        After the deadline it ends with stop `abort` and the tokens so far. EngineError when the request is refused or
        no server can answer it.
        """
        self._alive()
        self._check(request)
        if self._watch is None:
            self._watch = asyncio.create_task(self._admission.watch())
        turn = Turn(request, self._sessions.get(request.session), self._config)
        finish = await self._draw(turn, asyncio.get_running_loop().time() + self._deadline_s)
        session = turn.session()
        if session is not None:
            self._sessions[request.session] = session
        self.counts["sampled"] += len(turn.logprobs)
        return turn.sample(finish)

    async def close(self, session: str) -> None:
        """Forget which positions of a session were reported; the server evicts its cache by itself."""
        self._sessions.pop(session, None)

    async def stop(self) -> None:
        """End the engine, and the server if this engine started it."""
        self._stopped = True
        for task in (self._watch, self._keeper):
            if task is not None:
                task.cancel()
        await asyncio.gather(*(self._abort(rid) for rid in self._in_flight), return_exceptions=True)
        await asyncio.gather(*self._aborting, return_exceptions=True)
        self._give_up()
        await self._wire.close()
        if self._server is not None:
            await self._server.stop()
        await asyncio.to_thread(self._stage.remove)

    def _alive(self) -> None:
        if self._stopped:
            raise EngineError("the engine was stopped")

    def _keep(self) -> None:
        """Watch a server that this engine started. Does nothing while it is watched already."""
        if self._server is not None and (self._keeper is None or self._keeper.done()):
            self._keeper = asyncio.create_task(self._bring_back(self._server))

    async def _bring_back(self, server: Server) -> None:
        """Start the server again as soon as it ends, before the next turn needs it. When that fails, the next turn
        raises the reason."""
        with contextlib.suppress(EngineError):
            while (process := server.process) is not None:
                await process.wait()
                if server.process is process:  # a turn has not restarted it yet
                    self._life.lost()
                    await self._life.restore()

    async def _hangs(self, why: str) -> None:
        """End a server that does not answer; it is started again. One of another program only loses its turns."""
        self.counts["hung"] += 1
        _log.warning("the server at %s hangs: %s", self._wire.url, why)
        self._life.lost()
        if self._server is not None:
            self._server.kill()
        self._give_up()

    def _give_up(self) -> None:
        """End the requests inside as if their connections broke. Closing a connection does not end its reader."""
        for flight in self._in_flight.values():
            if flight.work is not None:
                flight.work.cancel()

    def _check(self, request: SampleRequest) -> None:
        """EngineError for requests that a server would refuse, or that would end it."""
        longest = self._config.max_positions
        if self._life.terms is not None and self._life.terms.context:
            longest = min(longest, self._life.terms.context)
        check_request(request, self._config.vocab, longest, grammar=True)

    async def _draw(self, turn: Turn, deadline: float) -> str:
        """Make attempts until the turn has ended or is cut. Returns the finish reason."""
        deaths = idle = 0
        while turn.left > 0:
            self._alive()
            if turn.cut:
                return "abort"
            if turn.request.answer and not turn.request.free:
                turn.begin()  # a server reads its grammar from the first token of a request on
            before = len(turn.logprobs)
            try:
                finish, late = await self._leg(turn, deadline)
            except ServerError as error:
                if error.kind == "late":
                    await self._liveness.after_late_turn()
                if error.kind != "gone":
                    raise
                deaths += 1
                self.counts["lost"] += 1
                if deaths >= DEATHS:
                    raise EngineError(f"the server ended {deaths} times during one turn: {error}") from error
                continue
            if late or finish in ("stop", "length"):
                return finish
            idle = 0 if len(turn.logprobs) > before else idle + 1
            if idle >= IDLE_LEGS:
                raise EngineError(f"the server aborted a turn {idle} times without a token")
        return "length"

    async def _leg(self, turn: Turn, deadline: float) -> tuple[str, bool]:
        """Make one attempt. Returns its finish reason, and whether the deadline ended it."""
        request = turn.request
        place = self._admission.place(first=request.lane == "production")
        gate, leave = self._life.gate, self._leave_lost_server
        async with place, gate.enter(lambda: self._life.wanted(request), leave) as weights:
            self._keep()
            start, flight = turn.start(weights.label), InFlight(weights.label, request.progress, len(turn.logprobs))
            routes = turn.routes(start)
            self._in_flight[flight.rid] = flight
            if request.progress is not None:
                request.progress.on_cut = lambda: self._abort(flight.rid)
            self.counts["attempts"] += 1
            try:
                sampling = request.sampling
                asked = Ask(
                    flight.rid, tuple(turn.ids), turn.left, sampling.temperature, request.stop_ids, request.seed,
                    routes,
                    self._life.salt(weights), request.lane,
                    followed=request.progress is not None and request.progress.followed,
                    answer="" if request.free else request.answer,
                )  # fmt: skip
                attempt, late = await self._send(asked, flight, deadline)
                self._liveness.heard()
            except ServerError as error:
                if error.kind == "gone":
                    self._life.lost()
                raise
            finally:
                del self._in_flight[flight.rid]
            return self._take(turn, attempt, start, weights), late

    def _leave_lost_server(self) -> None:
        if not self.serves and self._elsewhere():
            raise ServerLost(f"the server at {self._wire.url} is lost")

    def _take(self, turn: Turn, attempt: Attempt, start: int, weights: VersionFile) -> str:
        """Add an attempt to its turn, if it counts. Returns its finish reason."""
        self.counts["cached"] += attempt.cached
        self.counts["retracted"] += attempt.retractions
        strange = [stretch.label for stretch in attempt.stretches if stretch.label not in self._life.versions]
        if strange:
            self._life.lost(strange=True)
            raise EngineError(
                f"the server serves {strange[0]!r}, which this engine did not load; it loads its own version again"
            )
        if not turn.accepts(attempt, weights, self._life.replaced):
            self.counts["redrawn"] += 1
            return "abort"
        turn.add(attempt, start, weights, self._life.versions)
        return attempt.finish

    async def _send(self, asked: Ask, flight: InFlight, deadline: float) -> tuple[Attempt, bool]:
        """The attempt, and whether it was aborted at the deadline. ServerError."""
        flight.work = work = asyncio.create_task(self._backend.generate(asked, flight.heard))
        try:
            left = deadline - asyncio.get_running_loop().time()
            await asyncio.wait({work}, timeout=max(0.0, left))
            if work.done():
                return flight.attempt(), False
            self._abort(flight.rid)
            await asyncio.wait({work}, timeout=GRACE_S)
            if not work.done():
                raise ServerError(
                    "late",
                    f"a turn took more than {self._deadline_s:.0f} s and could not be aborted",
                )
            return flight.attempt(), True
        finally:
            if not work.done():
                self._abort(flight.rid)  # the server notices a closed connection only seconds later
                work.cancel()
                with contextlib.suppress(asyncio.CancelledError, EngineError):
                    await work

    def _abort(self, rid: str) -> "asyncio.Task[Any]":
        """Tell the server to abort a request."""
        task = asyncio.create_task(self._backend.abort(rid, GRACE_S))
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def _take_back(self) -> None:
        """Before a pause, abort the requests without a token that counts, or all of them. Their turns send them again
        afterwards."""
        flights, replaced = self._in_flight.values(), self._life.replaced
        rids = [f.rid for f in flights if self._mode == "abort" or not f.started or f.label in replaced]
        self.counts["taken_back"] += len(rids)
        await asyncio.gather(*(self._abort(rid) for rid in rids), return_exceptions=True)
        if self._mode == "abort":
            await self._life.gate.empty()
