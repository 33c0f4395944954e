"""One sandbox: a slot of a machine, with a record of its answers for repeated calls."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from headrace.messages.plugins import Plugin
from headrace.messages.sandbox import (
    Acquire,
    ApplyChanges,
    CheckIntegrity,
    Exec,
    FilesRefused,
    ListFiles,
    Op,
    OpResult,
    PullChanges,
    PullTar,
    PullTree,
    PushTar,
    RunTests,
    SandboxKey,
    SandboxLost,
    Search,
    WriteFiles,
)
from headrace.vmhost import protocol
from headrace.vmhost.backend import Described, Machine, OnEvent
from headrace.vmhost.channel import Channel
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.guest.frames import Garbage
from headrace.vmhost.images.packages import FLAVOURS
from headrace.vmhost.network import NetworkGate

SLOW = ApplyChanges, ListFiles, PullTar, PullTree, PushTar, Search, WriteFiles
"""Operations that the agent itself works on, for seconds where the tree is large."""
QUEUE_S = 20.0
"""How long such an operation waits for the earlier ones."""
RECORD = 256
"""Answers that a sandbox remembers for repeated call ids."""


class VmSandbox:
    """One slot of one machine."""

    def __init__(self, id: str, key: SandboxKey, backend: str, slot: int = 0, workdir: str = "") -> None:
        self.id = id
        self.key = key
        self.slot = slot
        self.backend = backend
        self.plugins: tuple[Plugin, ...] = ()
        """The backend, where it comes from outside of headrace."""
        self._channel: Channel | None = None
        self._gate: NetworkGate | None = None
        self._answers: OrderedDict[str, asyncio.Task[OpResult]] = OrderedDict()
        self._machine: Machine | None = None
        self._workdir = workdir
        """The workspace, where it is not its image's."""
        self._ended = ""
        """Why it ended; empty while it lives."""
        self._released = False
        self._alone = True
        """Whether it was its machine's only sandbox when the machine ended."""
        self._judging = asyncio.Lock()
        self._slow = asyncio.Lock()
        self.digest = ""
        """Of the workspace of a rollout's sandbox as it was pushed, until the first call; empty in an image."""
        self.own_end = ""
        """How its own programs ended it, in the sentence that every call is answered with."""
        self.neighbours: Callable[[], int] = lambda: 0
        """Number of other sandboxes in its machine."""
        self.events: OnEvent = lambda kind, text, data: None
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def alive(self) -> bool:
        """Whether calls can still be answered."""
        return bool(self.own_end) or (not self._ended and (self._channel is None or not self._channel.lost.done()))

    async def begin(self, request: Acquire, events: OnEvent, private: Sequence[str]) -> None:
        """Push the repository into a slot that was just adopted, and open its network access. private: as for
        `network.Gate`. SandboxLost."""
        digest = request.role == "rollout" and request.template in FLAVOURS
        header, bodies = protocol.open_frame(
            request.files, request.seed, request.workdir, digest and not request.entries
        )
        result = await self._send(header, bodies, protocol.SLACK_S)
        if not result.ok:
            if request.workdir:  # the request's fault: another node would refuse it too
                raise VmhostError(
                    f"the workspace {request.workdir} of {request.template} can't be used: {result.error}"
                )
            raise FilesRefused(f"{self.id}: the repository could not be pushed: {result.error}")
        if request.entries:
            if lacking := next(
                (e.path for e in request.entries if e.kind == "file" and e.path not in request.files), ""
            ):
                raise FilesRefused(f"{self.id}: the repository has a mode of {lacking!a} and no such file")
            header, bodies = protocol.entries_frame(request.entries, request.files)
            result = await self._send(header, bodies, protocol.SLACK_S)
            if not result.ok:
                raise FilesRefused(f"{self.id}: the repository's links and modes could not be made: {result.error}")
            if digest:
                result = await self._send(*protocol.to_frame(PullTree(patterns=())), protocol.SLACK_S)
        self.digest = result.digest
        if request.network:
            assert self._channel is not None
            self._gate = NetworkGate(self._channel, self.id, request.network, private, events)
            await self._gate.start()

    def adopt(self, channel: Channel, machine: Machine) -> None:
        """Use a slot of a machine."""
        self._channel, self._machine = channel, machine

    def knows(self, call_id: str) -> bool:
        """Whether a call with this id was made before: a repeat gets its answer, also while it runs."""
        return call_id in self._answers

    @property
    def machine(self) -> str:
        """Content address of what its machine was made of; empty where the backend cannot tell."""
        return self._machine.made_of if isinstance(self._machine, Described) else ""

    @property
    def has_network(self) -> bool:
        """Whether it has network access, with connections that a copy could not continue."""
        return self._gate is not None

    @property
    def busy(self) -> bool:
        """Whether a call waits for its answer."""
        return self._channel is not None and self._channel.busy

    async def call(self, op: Op, call_id: str = "") -> OpResult:
        """Run one operation. A repeated `call_id` gets the first answer. SandboxLost when the host lost the sandbox;
        one that its own programs ended answers every call with `OpResult.ended`."""
        try:
            if self._ended:
                raise SandboxLost(f"{self.id}: {self._ended}")
            if not self.own_end:
                return await self._run(op, call_id)
        except SandboxLost as lost:
            async with self._judging:
                if not self.own_end:
                    await self._find_cause(lost)
        earlier = self._answers.get(call_id)
        if earlier is not None and earlier.done() and not earlier.cancelled() and not earlier.exception():
            return earlier.result()
        return OpResult(ok=False, error=self.own_end, code=1, ended=True)

    async def _find_cause(self, lost: SandboxLost) -> None:
        """Set `own_end`, or raise `lost` where the host is or may be the cause."""
        if self._released or self._machine is None or self._channel is None:
            raise lost
        alone = self._alone if self._ended else self.neighbours() == 0
        self.own_end = await self._machine.blame(self._channel, alone)
        if not self.own_end or self._released:
            raise lost
        self._channel.close(self.own_end)
        self.events("sandbox_ended", f"by its own programs: {lost}", {"sandbox": self.id, "group": self.key.group})

    async def _run(self, op: Op, call_id: str) -> OpResult:
        self.digest = ""
        if isinstance(op, CheckIntegrity):
            return await self._check_integrity(op.thorough)
        if isinstance(op, PullChanges):
            return await self._pull_changes(op)
        task = self._answers.get(call_id) if call_id else None
        if task is None:
            header, bodies = protocol.to_frame(op)
            if call_id and isinstance(op, Exec | RunTests):
                header["call"] = call_id
            send = self._send_slow if isinstance(op, SLOW) else self._send
            task = asyncio.get_running_loop().create_task(send(header, bodies, protocol.deadline_s(op)))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            if call_id:
                self._answers[call_id] = task
                if len(self._answers) > RECORD:
                    self._answers.popitem(last=False)
        # A cancelled caller must not cancel the answer for a caller that repeats the call.
        return await asyncio.shield(task)

    async def _check_integrity(self, thorough: bool) -> OpResult:
        assert self._machine is not None
        started = time.perf_counter()
        try:
            tampered = await self._machine.check_integrity(thorough)
        except VmhostError as error:
            return OpResult(ok=False, error=str(error))
        return OpResult(tampered=tampered, wall_ms=(time.perf_counter() - started) * 1000)

    async def _pull_changes(self, op: PullChanges) -> OpResult:
        assert self._machine is not None
        started = time.perf_counter()
        try:
            answer, bodies, workdir = await self._machine.changes(op.limit, op.originals)
            wall_ms = (time.perf_counter() - started) * 1000
            return protocol.to_changes(answer, bodies, self._workdir or workdir, wall_ms)
        except VmhostError as error:
            return OpResult(ok=False, error=str(error))
        except Garbage as garbage:
            raise SandboxLost(f"{self.id}: it broke the protocol: {garbage}") from None

    async def _send_slow(self, header: dict[str, Any], bodies: list[bytes], timeout: float) -> OpResult:
        """`_send`, one at a time: the agent works on one such operation, and the next one's time begins after it."""
        try:
            async with asyncio.timeout(QUEUE_S):
                await self._slow.acquire()
        except TimeoutError:
            return OpResult(ok=False, error="the sandbox is busy with earlier calls: wait for their answers", code=1)
        try:
            return await self._send(header, bodies, timeout)
        finally:
            self._slow.release()

    async def _send(self, header: dict[str, Any], bodies: list[bytes], timeout: float) -> OpResult:
        assert self._channel is not None and self._machine is not None
        if sum(map(len, bodies)) > self._machine.limit_bytes:
            return OpResult(ok=False, error=f"No space left: a workspace holds {self._machine.limit_bytes >> 20} MiB")
        started = time.perf_counter()
        answer, parts = await self._channel.call(header, bodies, timeout)
        try:
            return protocol.to_result(answer, parts, (time.perf_counter() - started) * 1000)
        except Garbage as garbage:
            self._channel.close(f"it broke the protocol: {garbage}")
            raise SandboxLost(f"{self.id}: {self._channel.lost.result()}") from None

    def machine_ended(self, reason: str, alone: bool) -> None:
        """Its machine has ended. alone: whether it was the machine's only sandbox."""
        if not self._ended:
            self._ended, self._alone = reason, alone
            if self._channel is not None:
                self._channel.close(reason)

    def end(self, reason: str, machine: Machine | None = None) -> None:
        """Refuse calls from now on. With `machine`, which goes on, the slot's channel is left to it if it is idle."""
        self._ended = self._ended or reason
        self._released = True
        if self._channel is None:
            return
        if machine is None or self._channel.busy:
            self._channel.close(reason)
        else:
            machine.leave(self._channel)
