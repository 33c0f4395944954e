"""Chooses how a version's weights come into a server, as tensors or from disk, and sends the tensors.

Idea: the staged file is always there, and a load from it is the fallback for everything. Tensors are sent only where
that is known to work: `auto` uses them for a server that this engine started on a CPU, as long as its checksums are
compared; `tensor` uses them for any server on this machine. On a GPU they were not measured, so `auto` uses the disk.

A failed update is reported with its reason and counted, the version is loaded from disk in the same pause, and this
engine uses the disk from then on: a second failure would lengthen another pause.
"""

import asyncio
import contextlib
import logging
from collections import deque
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from torch import Tensor

from headrace.engines.base import EngineError
from headrace.engines.server.backend import UPDATE_S, IncompatibleServer, Terms
from headrace.engines.server.http import ServerError, Wire
from headrace.engines.server.weights.lock import VersionFile
from headrace.engines.sglang import tensors
from headrace.engines.sglang.capabilities import Capabilities
from headrace.weights import tensor_state

Choice = Literal["auto", "tensor", "disk"]
HERE = ("127.0.0.1", "localhost", "::1")
_log = logging.getLogger("headrace.engines.sglang")


class Transport:
    """The tensors of one server's next version. Used by the swapper alone."""

    def __init__(self, wire: Wire, choice: Choice, folder: Path, *, started: bool) -> None:
        """folder: of the staged checkpoint. started: this engine starts the server, so it is on this machine."""
        self._wire, self._choice, self._started = wire, choice, started
        self._prefix = tensors.prefix(folder)
        self._rest: deque[dict[str, Tensor]] = deque()
        self._next: tensors.Segment | None = None
        self._off = choice == "disk"
        self.bytes = 0
        """Bytes of tensors that the last change gave to the server; 0 when it loaded from disk."""
        self.failures = 0
        """Number of versions that were to be sent as tensors and were loaded from disk."""
        self._session = False
        tensors.discard_abandoned(self._prefix)

    def check(self, able: Capabilities) -> None:
        """IncompatibleServer when tensors are required and this server cannot take them."""
        self._session = able.session
        if self._choice != "tensor":
            self._off = self._off or not able.tensors
            return
        if not able.tensors:
            raise IncompatibleServer(
                "engine.options.weights = 'tensor' needs /update_weights_from_tensor, which the server lacks; set auto"
            )
        if not self._started and urlsplit(self._wire.url).hostname not in HERE:
            raise IncompatibleServer(
                f"engine.options.weights = 'tensor' needs a server on this machine, not {self._wire.url}; set disk"
            )

    async def prepare(self, before: VersionFile | None, model: Path, terms: Terms, *, compared: bool) -> bool:
        """Write the first bucket of a staged version, if it is to be sent."""
        self.bytes = 0
        self.discard()
        if self._off or (self._choice == "auto" and not (self._started and compared and terms.device == "cpu")):
            return False
        try:
            self._rest = deque(tensors.buckets(tensor_state.read(model)))
            await self._write()
        except OSError as error:
            self._failed(f"shared memory cannot be written: {error}")
        return self._next is not None

    def stats(self) -> dict[str, float]:
        """Bytes of tensors that the last change gave to the server, and the versions that were to be and were not."""
        return {"tensor_bytes": self.bytes, "tensor_failures": self.failures}

    async def send(self, label: str, terms: Terms) -> bool:
        """Give the prepared version to a paused server. False when that failed: the server's weights are then unknown.
        ServerError when the server is gone."""
        try:
            if self._session:
                await self._begin()
            await self._send(label, terms)
        except (EngineError, OSError) as error:
            self.failed(str(error))
            if isinstance(error, ServerError) and error.kind == "gone":
                raise
            return False
        finally:
            self.discard()
        return True

    def failed(self, reason: str) -> None:
        """Report that the server did not take a version, and use the disk from now on."""
        self._off = True
        self._failed(f"{reason}; from now on versions are loaded from disk")

    def discard(self) -> None:
        """Free the segment that is prepared."""
        segment, self._next = self._next, None
        self._rest.clear()
        if segment is not None:
            segment.remove()

    def _failed(self, reason: str) -> None:
        self.failures += 1
        self.bytes = 0
        _log.warning("weights as tensors failed for the server at %s: %s", self._wire.url, reason)

    async def _begin(self) -> None:
        """Open an update session. A client that ended during an update has left its own open, which is closed first."""
        try:
            await self._wire.post("/begin_weight_update", {}, UPDATE_S)
        except ServerError as error:
            if error.kind != "refused":
                raise
            await self._wire.post("/end_weight_update", {}, UPDATE_S)
            await self._wire.post("/begin_weight_update", {}, UPDATE_S)

    async def _write(self) -> None:
        """Write the next bucket into shared memory, if there is one. OSError."""
        if self._rest:
            self._next = await asyncio.to_thread(tensors.Segment, self._rest.popleft(), self._prefix)

    async def _send(self, label: str, terms: Terms) -> None:
        """Send all buckets, and close the session. EngineError, OSError."""
        try:
            await self._buckets(label, terms.tp_size)
        except (EngineError, OSError):
            if self._session:
                with contextlib.suppress(ServerError):  # the first error is the reason
                    await self._wire.post("/end_weight_update", {}, UPDATE_S)
            raise
        if self._session:
            await self._wire.post("/end_weight_update", {}, UPDATE_S)

    async def _buckets(self, label: str, ranks: int) -> None:
        """Send all buckets; the next one is written while the server loads one. EngineError, OSError."""
        sent = 0
        while (segment := self._next) is not None:
            # Until the last bucket the server reports a version that nobody asks for, because it holds parts of two.
            name = f"{label}.part" if self._rest else label
            self._next = None
            writing = asyncio.create_task(self._write())
            try:
                asked = tensors.body(segment, ranks, name)
                answer = await self._wire.post("/update_weights_from_tensor", asked, UPDATE_S)
            finally:
                segment.remove()
                await asyncio.wait([writing])
                error = writing.exception()
            if answer.get("success") is not True:
                raise EngineError(f"the server refused tensors: {answer.get('message')}")
            if error is not None:
                raise error
            sent += segment.content
        self.bytes = sent
