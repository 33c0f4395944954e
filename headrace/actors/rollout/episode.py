"""One attempt from its request to its Trajectory: look back, get a sandbox, run the loop, extract the diff, publish.

Nothing here is lost with this process: turns are on record before their calls run, the sandbox can be acquired again,
and the Trajectory is published before the sandbox is given back.
"""

import asyncio
import time
from collections.abc import Sequence

import msgspec

from headrace.actors.rollout_episode_diff import diff
from headrace.actors.rollout_episode_log import Past, TurnLog
from headrace.actors.rollout_episode_log_kept import COPIES, Keeping, bring_back, catch_up
from headrace.actors.sandbox_client import RemoteSandbox, Sandboxes, Superseded
from headrace.bus.connection import Bus
from headrace.bus.errors import BusError
from headrace.engines.base import Engine
from headrace.harness.loop import run_episode
from headrace.harness.prompt import toolbox_for
from headrace.messages.rollout import RolloutRequest, ToolResult, Trajectory, Turn
from headrace.messages.sandbox import Acquire, PullTree, SandboxLost
from headrace.messages.subjects import TRAJ
from headrace.messages.tasks import Task
from headrace.policy.renderer import Renderer
from headrace.vmhost.guest.globs import matches

PULL_WHOLE = 512 << 10
"""A repository of at most this many bytes is compared whole; of a larger one only what may matter is pulled."""
ROOM_S = 15.0
"""How long an attempt waits for room before its request goes back to the queue's end."""
SUSPECT = ("**/test_*.py", "**/*_test.py", "**/conftest.py", "**/*.pth", "**/sitecustomize.py", "**/usercustomize.py")
"""Paths whose change is worth reporting although the judge replaces or ignores them."""


class Episode:
    """The work on one request."""

    def __init__(
        self,
        request: RolloutRequest,
        task: Task,
        *,
        bus: Bus,
        sandboxes: Sandboxes,
        rollout: str,
        lease_s: float,
        keeping: Keeping | None = None,
    ) -> None:
        files = request.files or task.files
        self._request = request
        self._task = msgspec.structs.replace(task, prompt=request.prompt or task.prompt, files=files)
        self._bus, self._sandboxes, self._rollout, self._lease_s = bus, sandboxes, rollout, lease_s
        self._log = TurnLog(bus, request.run, request.group, request.trajectory)
        self._sandbox: RemoteSandbox | None = None
        self._fingerprint = ""
        self._digest: asyncio.Task[str] | None = None
        self._keeping = keeping
        self._turn: Turn | None = None
        self._copy: asyncio.Task[None] | None = None
        """The sandbox being kept, behind the sampling of the next turn."""
        self._copies = 0

    async def look_back(self) -> Past:
        """What an earlier holder left behind. Read once, before `run`."""
        return await self._log.read()

    async def run(self, past: Past, engine: Engine, renderer: Renderer) -> Trajectory:
        """Finish the attempt and publish it. SandboxLost, EngineError, WrongSequence, NoRoom otherwise.

        Cancelled, superseded or without a broker it leaves the sandbox to a successor, or to its lease; after any other
        end the sandbox is given back.
        """
        started = time.monotonic()
        try:
            trajectory = await self._through(past, engine, renderer, started)
        except (asyncio.CancelledError, Superseded, BusError):
            if self._sandbox is not None:
                self._sandboxes.let_go(self._sandbox)
            await self._stop_keeping()
            await self._log.settle()
            raise
        except BaseException:
            if self._sandbox is not None:
                self._sandboxes.give_back(self._sandbox)
            raise
        finally:
            await self._stop_keeping()
            if self._digest is not None and not self._digest.cancel() and not self._digest.cancelled():
                self._digest.exception()  # heard, should nobody have waited for it
        assert self._sandbox is not None
        self._sandboxes.give_back(self._sandbox)
        return trajectory

    async def _through(self, past: Past, engine: Engine, renderer: Renderer, started: float) -> Trajectory:
        """`_run`, and again in a copy of its sandbox when that one is lost and was kept."""
        while True:
            try:
                return await self._run(past, engine, renderer, started)
            except Superseded:
                raise
            except SandboxLost:
                await self._stop_keeping()
                await self._log.settle()
                past = await self._log.read()
                if past.kept is None or self._copies == COPIES:
                    raise
                if self._sandbox is not None:
                    await self._sandboxes.release(self._sandbox)
                    self._sandbox = None

    async def _stop_keeping(self) -> None:
        copying, self._copy = self._copy, None
        if copying is not None:
            copying.cancel()
            await asyncio.gather(copying, return_exceptions=True)

    async def _run(self, past: Past, engine: Engine, renderer: Renderer, started: float) -> Trajectory:
        request, task = self._request, self._task
        self._fingerprint = engine.fingerprint
        sandbox = self._sandbox = await self._acquire(past, renderer)
        if not past.turns and self._digest is None:
            # Beside the first sampling; nothing has been called yet.
            self._digest = asyncio.create_task(self._digest_of(sandbox))
        episode = await run_episode(
            engine=engine,
            sandbox=sandbox,
            renderer=renderer,
            request=request,
            task=task,
            on_sampled=self._on_sampled,
            on_done=self._on_done,
            resume=past.turns,
        )
        if self._copy is not None:
            await self._copy
        await self._log.settle()
        patterns = self._patterns()
        tree = await sandbox.call(PullTree(patterns=patterns), f"{request.trajectory}-tree")
        before = {path: data for path, data in task.files.items() if any(matches(p, path, True) for p in patterns)}
        changes = diff(before, tree.files, task.allowed)
        over = tree.truncated or not tree.ok
        trajectory = Trajectory(
            run=request.run,
            lane=request.lane,
            group=request.group,
            slot=request.slot,
            attempt=request.attempt,
            id=request.trajectory,
            task=request.task,
            family=task.family,
            seed=request.seed,
            policy=request.policy,
            sampling=request.sampling,
            outcome="sandbox_limit" if over else episode.outcome,
            turns=tuple(episode.turns),
            diff={} if over else changes.changed,
            deleted=() if over else changes.deleted,
            touched=() if over else changes.touched,
            digest_before=await self._digest if self._digest is not None else "",
            digest_after=tree.digest,
            fingerprint=self._fingerprint,
            backend=sandbox.backend,
            isolation=request.isolation,
            wall_s=round(time.monotonic() - started, 4),
            malformed_calls=sum(bool(call.error) for turn in episode.turns for call in turn.calls),
            rollout=self._rollout,
        )
        await self._bus.publish(
            TRAJ.at(run=request.run, group=request.group), trajectory, msg_id=f"{request.run}.{request.trajectory}"
        )
        return trajectory

    async def _acquire(self, past: Past, renderer: Renderer) -> RemoteSandbox:
        """The attempt's sandbox; if there was work, the very one that holds it, or a copy that was kept."""
        request, task = self._request, self._task
        acquire = Acquire(
            run=request.run,
            lane=request.lane,
            role="rollout",
            group=request.group,
            slot=request.slot,
            attempt=request.attempt,
            isolation="episode" if request.lane == "production" else request.isolation,
            template=task.template,
            seed=request.seed,
            lease_s=self._lease_s,
            handovers=request.handovers,
            network=task.network,
            files=task.files,
        )
        try:
            sandbox = await self._sandboxes.acquire(acquire, node=past.node, patience_s=ROOM_S)
            if sandbox.id == past.sandbox or not any(turn.results for turn in past.turns):
                return sandbox
            await self._sandboxes.release(sandbox)
            raise SandboxLost(f"{past.sandbox} on {past.node} held the work so far and is gone")
        except Superseded:
            raise
        except SandboxLost:
            if past.kept is None or self._copies == COPIES:
                raise
        self._copies += 1
        sandbox = await bring_back(self._sandboxes, acquire, past, ROOM_S)
        box = toolbox_for(task, renderer, request.limits.context_tokens)
        try:
            await catch_up(past, lambda call: box.run(call, sandbox, task, f"{request.trajectory}/"))
        except BaseException:
            self._sandboxes.give_back(sandbox)
            raise
        return sandbox

    async def _digest_of(self, sandbox: RemoteSandbox) -> str:
        return (await sandbox.call(PullTree(patterns=()), f"{self._request.trajectory}-digest")).digest

    def _patterns(self) -> tuple[str, ...]:
        if sum(map(len, self._task.files.values())) <= PULL_WHOLE:
            return ("**",)
        return (*self._task.allowed, *SUSPECT)

    async def _on_sampled(self, turn: Turn) -> None:
        assert self._sandbox is not None
        if self._digest is not None:
            await self._digest
        if self._copy is not None:
            copying, self._copy = self._copy, None
            await copying
        self._turn = turn
        await self._log.sampled(turn, self._sandbox.node, self._sandbox.id, self._fingerprint)

    async def _on_done(self, index: int, results: Sequence[ToolResult]) -> None:
        await self._log.done(index, results)
        keeping, turn, sandbox = self._keeping, self._turn, self._sandbox
        if keeping is None or turn is None or sandbox is None or not keeping.due(turn, self._request):
            return
        self._copy = asyncio.create_task(keeping.keep(sandbox, self._log, index, self._request.trajectory))
