"""Changes a server's weights with a short pause; a server with neither the old nor the new version stays paused.

    stage the version (while serving) -> compute the expected checksums (while serving)
    -> pause in place -> load -> compare all checksums -> continue

During a pause in place requests keep their KV cache and continue with the new weights afterwards; their spans name the
version of each token. Nothing is flushed: prefix-cache keys contain the version, and old entries are evicted in time.
In the other mode the caller first aborts every request, keeps its tokens, and sends the rest again, so that no token is
decoded with another version's KV cache; this costs a second prefill.

Trap: an update may answer with an error although it happened. So after any error of an update the server's weights are
unknown, and it stays paused until the old version is loaded in full and has
its checksums. If that fails too, it stays paused and no request is admitted.

On a GPU the MoE runner may hold the experts in another layout than `checksums` computes, and the server does not report
which. So the first load decides: if its checksums differ, a warning names the first such tensor, and this server is not
compared; if they match, every later difference is an error.

A backend may have faster ways (`backend.Way`). They are verified by the same checksums, and where one is not available,
or fails, the version is loaded from the folder.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from headrace.engines.base import EngineError
from headrace.engines.server.backend import Backend, Terms, Way
from headrace.engines.server.http import ServerError
from headrace.engines.server.weights import checksums
from headrace.engines.server.weights.lock import NotServed, VersionFile
from headrace.engines.server.weights.staging import Stage, Verified
from headrace.policy.config import PolicyConfig

_log = logging.getLogger("headrace.engines.server")


class Wanted(NamedTuple):
    """The checksums that a server must report."""

    checksums: dict[str, str]
    ranks: int
    """Tensor-parallel ranks, each with checksums of its own."""
    undecided: str = ""
    """The fingerprint of a server on a GPU whose first load decides whether it is compared; empty for any other."""


class Swapper:
    """The only caller of a server's administrative endpoints."""

    def __init__(self, backend: Backend, stage: Stage, config: PolicyConfig) -> None:
        self._backend, self._stage, self._config = backend, stage, config
        self.folder = stage.folder
        """The folder of the staged checkpoint."""
        self._way: Way | None = None
        """The way that is prepared for the next change."""
        self.paused = False
        """Whether this class has paused the server, which then does not answer health checks."""
        self.pause_ms = 0.0
        """Milliseconds of the last pause."""
        self.stage_ms = 0.0
        """Milliseconds that staging and hashing took before the last change, while the server served."""
        self.reloads = 0
        """Number of failed updates after which the old version was loaded again."""
        self.checked = False
        """Whether the last change compared checksums."""
        self.expectations = checksums.Expectations()
        """The checksums that servers must report; the servers of one node share them."""
        self.verified = Verified()
        """The files that were hashed; the servers of one node share it."""
        self._unknown: set[str] = set()
        """The fingerprints of servers whose checksums cannot be computed here."""
        self._comparable: dict[str, bool] = {}
        """By the fingerprint of a server on a GPU: whether its first load had the expected checksums."""

    @property
    def unchecked(self) -> int:
        """Number of kinds of servers that are not compared: their first load had other checksums, or none are computed
        for the model."""
        return sum(not comparable for comparable in self._comparable.values()) + len(self._unknown)

    async def ready(self, weights: VersionFile) -> None:
        """Stage a version in the folder. EngineError when its file is not that version."""
        await asyncio.to_thread(self._stage.put, *weights, self.verified)

    async def holds(self, weights: VersionFile, terms: Terms) -> bool:
        """Whether the server serves exactly this version already, for example after a start from the staged folder."""
        if await self._backend.served() != weights.label:
            return False
        wanted = await self._wanted(weights, terms)
        self.checked = wanted is not None
        if wanted is None:
            return True
        wrong = await self._difference(wanted)
        if wanted.undecided and not wrong:
            self._comparable[wanted.undecided] = True
        return not wrong  # a first difference is decided after a load by this class

    async def change(
        self, weights: VersionFile, before: VersionFile | None, terms: Terms, take_back: Callable[[], Awaitable[None]]
    ) -> None:
        """Serve `weights` instead of `before` (None at first). take_back: called right before the pause, aborts
        requests.

        EngineError when `weights` are refused and `before` serves; NotServed when neither serves. A cancellation takes
        effect after the change.
        """
        work = asyncio.create_task(self._change(weights, before, terms, take_back))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait([work])
            if not work.cancelled():
                work.exception()
            raise

    async def _change(
        self, weights: VersionFile, before: VersionFile | None, terms: Terms, take_back: Callable[[], Awaitable[None]]
    ) -> None:
        began = time.perf_counter()
        try:
            await self.ready(weights)
            wanted = await self._wanted(weights, terms)
            verified = wanted is not None and not wanted.undecided
            self._way = None
            for way in self._backend.ways if wanted is None or verified else ():
                if await way.prepare(before, self._stage.model, terms, compared=verified):
                    self._way = way
                    break
        except EngineError:
            if before is not None:
                await self.ready(before)  # a later restart of the server must find the weights that it served
            raise
        self.stage_ms = (time.perf_counter() - began) * 1e3
        began = time.perf_counter()
        try:
            await take_back()
            await self._pause()
            try:
                if not await self._fast(weights, wanted, terms):
                    await self._load(weights, wanted)
            except EngineError as error:
                await self._go_back(before, terms, error)
                await self._continue()
                raise EngineError(
                    f"version {weights.version} was refused, the one before serves on: {error}"
                ) from error
            await self._continue()
        except ServerError as error:
            raise NotServed(f"the server was lost during the change to version {weights.version}: {error}") from error
        finally:
            for way in self._backend.ways:
                way.discard()
            self.pause_ms = (time.perf_counter() - began) * 1e3

    async def _fast(self, weights: VersionFile, wanted: Wanted | None, terms: Terms) -> bool:
        """Use the way that is prepared, if there is one. True when the server then serves exactly that version."""
        if self._way is None or not await self._way.send(weights.label, terms):
            return False
        try:
            await self._check(weights, wanted)
        except EngineError as error:
            if isinstance(error, ServerError) and error.kind == "gone":
                raise
            self._way.failed(str(error))
            return False
        return True

    async def _go_back(self, before: VersionFile | None, terms: Terms, error: EngineError) -> None:
        """Load the old version in full. NotServed when that fails; the server then stays paused."""
        if before is None or (isinstance(error, ServerError) and error.kind == "gone"):
            raise NotServed(
                f"the first version could not be loaded: {error}" if before is None else str(error)
            ) from error
        try:
            await self.ready(before)
            await self._load(before, await self._wanted(before, terms))
        except EngineError as worse:
            raise NotServed(f"neither version {before.version} nor its successor can be loaded: {worse}") from error
        self.reloads += 1

    async def _pause(self) -> None:
        self.paused = True
        await self._backend.pause()

    async def _continue(self) -> None:
        await self._backend.resume()
        self.paused = False

    async def _load(self, weights: VersionFile, wanted: Wanted | None) -> None:
        await self._backend.load_folder(self._stage.folder, weights.label)
        await self._check(weights, wanted)

    async def _check(self, weights: VersionFile, wanted: Wanted | None) -> None:
        """EngineError unless the server reports the version and, where they are known, its checksums. An undecided
        server is decided."""
        served = await self._backend.served()
        if served != weights.label:
            raise EngineError(f"the server reports weight version {served}, expected {weights.label}")
        self.checked = wanted is not None
        if wanted is None:
            return
        wrong = await self._difference(wanted)
        if wrong and not wanted.undecided:
            raise EngineError(f"version {weights.version}: {wrong}")
        if wanted.undecided:
            self._comparable[wanted.undecided] = self.checked = not wrong
        if wrong:
            _log.warning(
                "the first load (version %d) of the server at %s does not have the expected checksums: %s. Either the "
                "server holds weights in another layout (docs/engines.md), or they are wrong; they are not checked "
                "from now on",
                weights.version,
                self._backend.wire.url,
                wrong,
            )

    async def _difference(self, wanted: Wanted) -> str:
        """A text about the first difference between the server's checksums and these; empty when there is none."""
        try:
            served = await self._backend.checksums(wanted.ranks)
        except EngineError as error:
            lost = isinstance(error, ServerError) and error.kind in ("gone", "late")
            if lost or not wanted.undecided:
                raise
            return str(error)
        return checksums.difference(wanted.checksums, served)

    def _say_unknown(self, reason: str, terms: Terms) -> None:
        """Say once per kind of server that its weights are not compared."""
        if terms.fingerprint not in self._unknown:
            self._unknown.add(terms.fingerprint)
            _log.warning(
                "the weights of the server at %s are not compared with the published ones: checksums are not computed "
                "for %s. The staged file is verified, and what the server makes of it is not (docs/engines.md)",
                self._backend.wire.url,
                reason,
            )

    async def _wanted(self, weights: VersionFile, terms: Terms) -> Wanted | None:
        """The checksums of the staged version; None where they are not known here, or the first load had others."""
        model, config, dtype, device = self._stage.model, self._config, terms.dtype, terms.device
        ranks = checksums.Ranks(terms.tp_size, terms.ep_size)
        gpu = device != "cpu"
        if gpu and not self._comparable.get(terms.fingerprint, True):
            return None
        digest = self._backend.digest(device, checksums.largest(config, ranks, dtype))
        reason = checksums.unknown(config, ranks) or ("" if digest else f"tensors of this size on {device}")
        if reason or digest is None:
            self._say_unknown(reason, terms)
            return None
        sums = await self.expectations.of(model, weights.state_hash, config, dtype, digest, ranks, device)
        undecided = gpu and terms.fingerprint not in self._comparable
        return Wanted(sums, ranks.tensor, terms.fingerprint if undecided else "")
