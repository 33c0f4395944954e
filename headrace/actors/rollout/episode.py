"""One attempt from its request to its Trajectory: resume, acquire a sandbox, run the loop, extract the diff, publish.

The end of this process loses no work: a turn is stored before its calls run, another actor can acquire the sandbox, and
the Trajectory is published before the sandbox is released.
"""

import asyncio
import time
from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from headrace.actors.rollout.policies import ClientServed
from headrace.actors.rollout.publication import publish, trajectory_of
from headrace.actors.rollout.spans import TracedEngine, TracedToolbox
from headrace.actors.rollout.turn_log import ResumeState, TurnLog
from headrace.bus.connection import Bus
from headrace.bus.errors import BusError
from headrace.config import Rollout as RolloutSection
from headrace.engines.base import Engine
from headrace.harness.loop import Episode as Turns
from headrace.harness.loop import run_episode
from headrace.harness.prompt import toolbox_for
from headrace.harness.tools.search.session import SearchSession, template_of
from headrace.harness.tools.toolbox import Toolbox
from headrace.messages.plugins import Plugin
from headrace.messages.rollout import HarnessEnd, RolloutRequest, ToolResult, Trajectory, Turn, Workspace
from headrace.messages.sandbox import Acquire, SandboxLost, Snapshot
from headrace.messages.search import Searcher
from headrace.messages.tasks import Task
from headrace.rendering.base import Renderer
from headrace.sandboxes.client import NodeSilent, RemoteSandbox, Sandboxes, Superseded
from headrace.search.chunks import PATTERNS
from headrace.tasks.diff import pull
from headrace.tasks.sandboxes import begin_step, for_task

CAPACITY_WAIT_S = 15.0
"""Seconds that an attempt waits for a sandbox before its request goes back to the end of the queue. Each hand-over
doubles it, at most `DOUBLED` times: with few machines all requests wait, and requeueing gets none of them a sandbox."""
DOUBLED = 3
SHORTEST_WAIT_S = 0.1
"""Shortest wait in seconds, so that an attempt requests a sandbox at least once after its waits are used up."""


class Episode:
    """The work on one RolloutRequest."""

    def __init__(
        self,
        request: RolloutRequest,
        task: Task,
        *,
        bus: Bus,
        sandboxes: Sandboxes,
        rollout: str,
        lease_s: float,
        waits: RolloutSection,
        searcher: Searcher | None = None,
        plugins: Sequence[Plugin] = (),
    ) -> None:
        self._request = request
        self._task = msgspec.structs.replace(task, prompt=request.prompt or task.prompt)
        if request.files:
            self._task = msgspec.structs.replace(self._task, files=request.files, entries=UNSET)
        self._bus, self._sandboxes, self._rollout, self._lease_s = bus, sandboxes, rollout, lease_s
        self._waits = waits
        self._log = TurnLog(bus, request.run, request.group, request.trajectory)
        self._sandbox: RemoteSandbox | None = None
        self._fingerprint = ""
        self._started = time.monotonic()
        self._searcher = searcher
        self._plugins = plugins
        self._over = False
        """Whether a step that ended changed more than is pulled: its tests run without its changes."""
        self._steps: list[Snapshot] = []
        """The changes at the end of every step that ended."""
        self._step: Snapshot | UnsetType = UNSET
        """Those of the step that the present turn ends."""
        self._harness_end: HarnessEnd | UnsetType = UNSET

    async def resume_state(self) -> ResumeState:
        """The state at which an earlier rollout actor stopped. Read it once, before `run`."""
        return await self._log.read()

    async def run(self, resume: ResumeState, engine: Engine, renderer: Renderer | ClientServed) -> Trajectory:
        """Finish the attempt and publish it. SandboxLost, EngineError, TreeTooLarge, WrongSequence, NoCapacity.

        When cancelled, superseded or cut off from the broker, it leaves the sandbox to a successor or to the end of its
        lease; after any other end it releases the sandbox.
        """
        self._started = time.monotonic()
        try:
            trajectory = await self._work(resume, engine, renderer)
        except (asyncio.CancelledError, Superseded, BusError):
            if self._sandbox is not None and not self._hold(self._sandbox):
                self._sandboxes.stop_renewing(self._sandbox)
            await self._log.flush()
            raise
        except BaseException:
            if self._sandbox is not None:
                self._sandboxes.give_back(self._sandbox)
            raise
        assert self._sandbox is not None
        if not self._hold(self._sandbox):
            self._sandboxes.give_back(self._sandbox)
        return trajectory

    async def cancelled(self, renderer: Renderer | ClientServed) -> Trajectory | None:
        """Publish the turns of an attempt that its user cancelled; None before the first one. The workspace is not
        read, because a call may still run in it."""
        turns = (await self._log.read()).turns
        if not turns:
            return None
        trajectory = trajectory_of(
            self._request,
            self._task,
            Turns(turns=turns, outcome="cancelled"),
            bundle=renderer.bundle,
            fingerprint=self._fingerprint,
            rollout=self._rollout,
            since=self._started,
            plugins=(*self._plugins, *(self._sandbox.plugins if self._sandbox is not None else ())),
        )
        backend = self._sandbox.backend if self._sandbox is not None else ""
        return await publish(self._bus, msgspec.structs.replace(trajectory, backend=backend), self._log.first)

    def _hold(self, sandbox: RemoteSandbox) -> bool:
        """Keep the sandbox of a workspace for the next request in it."""
        workspace = self._request.workspace
        if workspace is not None and workspace.hold_s > 0:
            self._sandboxes.hold(sandbox, workspace.name, workspace.hold_s)
            return True
        return False

    async def _work(self, resume: ResumeState, engine: Engine, renderer: Renderer | ClientServed) -> Trajectory:
        request, task = self._request, self._task
        self._fingerprint = engine.fingerprint
        self._steps, self._step = list(resume.steps), UNSET
        sandbox = self._sandbox = await self._acquire(resume)
        episode = await self._act(sandbox, resume, engine, renderer)
        await self._log.flush()
        changes, over, digest = await pull(sandbox, task, request.trajectory)
        trajectory = trajectory_of(
            request,
            task,
            episode,
            bundle=renderer.bundle,
            fingerprint=self._fingerprint,
            rollout=self._rollout,
            since=self._started,
            plugins=(*self._plugins, *sandbox.plugins),
        )
        trajectory = msgspec.structs.replace(
            trajectory,
            digest_before=sandbox.digest,
            digest_after=digest,
            backend=sandbox.backend,
            machine=sandbox.machine or UNSET,
            earlier=tuple(self._steps) if task.later else UNSET,
            harness=self._harness_end,
            **msgspec.structs.asdict(changes),
        )
        if over or self._over:
            trajectory = msgspec.structs.replace(trajectory, outcome="sandbox_limit")
        return await publish(self._bus, trajectory, self._log.first)

    async def _act(
        self, sandbox: RemoteSandbox, resume: ResumeState, engine: Engine, renderer: Renderer | ClientServed
    ) -> Turns:
        """Let headrace's own agent act."""
        assert not isinstance(renderer, ClientServed)
        request = self._request
        return await run_episode(
            engine=TracedEngine(engine, request.trajectory),
            sandbox=sandbox,
            renderer=renderer,
            request=request,
            task=self._task,
            on_sampled=self._on_sampled,
            on_done=self._on_done,
            on_step=self._on_step,
            resume=resume.turns,
            toolbox=self._toolbox(renderer),
        )

    async def _acquire(self, resume: ResumeState) -> RemoteSandbox:
        """The attempt's sandbox. A resumed attempt gets the sandbox that holds its work."""
        request, task = self._request, self._task
        patience_s = self._patience_s(CAPACITY_WAIT_S * 2 ** min(request.handovers, DOUBLED))
        acquire = Acquire(
            run=request.run,
            lane=request.lane,
            role="rollout",
            group=request.group,
            slot=request.slot,
            attempt=request.attempt,
            isolation="episode" if request.lane == "production" else request.isolation,
            seed=request.seed,
            lease_s=self._lease_s,
            handovers=request.handovers,
            network=task.network,
            harness=request.harness,
        )
        acquire = for_task(acquire, task)
        if request.workspace is not None:
            return await self._enter(acquire, request.workspace, resume)
        sandbox = await self._sandboxes.acquire(acquire, node=resume.node, patience_s=patience_s)
        if sandbox.id == resume.sandbox or not any(turn.results for turn in resume.turns):
            return sandbox
        await self._sandboxes.release(sandbox)
        raise SandboxLost(f"sandbox {resume.sandbox} on node {resume.node} is gone, and with it the attempt's work")

    def _patience_s(self, patience_s: float) -> float:
        """A wait in seconds, at most the time that the configuration's waits leave this request."""
        waits = self._waits
        return max(min(patience_s, waits.node_wait_s, waits.wait_s - self._request.waited_s), SHORTEST_WAIT_S)

    async def _enter(self, acquire: Acquire, workspace: Workspace, resume: ResumeState) -> RemoteSandbox:
        """The sandbox of a workspace: the held one, or a new one with the files of the request."""
        request = self._request
        # A later turn or attempt gets the sandbox, no matter how often an earlier one was handed over.
        generation = (workspace.turn * 100 + request.attempt) * 1000 + request.handovers
        acquire = msgspec.structs.replace(acquire, group=workspace.name, slot=0, attempt=0, handovers=generation)
        self._sandboxes.forget(workspace.name)
        patience_s = self._patience_s(CAPACITY_WAIT_S)
        try:
            node = resume.node or workspace.node
            sandbox = await self._sandboxes.acquire(acquire, node=node, patience_s=patience_s)
        except NodeSilent:
            if resume.turns:
                raise
            sandbox = await self._sandboxes.acquire(acquire, patience_s=patience_s)
        work_lost = sandbox.id != resume.sandbox and any(turn.results for turn in resume.turns)
        if work_lost or (sandbox.fresh and workspace.turn and not request.files):
            await self._sandboxes.release(sandbox)
            raise SandboxLost(f"the sandbox of workspace {workspace.name} is gone, and with it its files")
        return sandbox

    def _toolbox(self, renderer: Renderer) -> Toolbox:
        """A new toolbox for every sandbox, because its tools keep state about the sandbox."""
        task, searcher = self._task, self._searcher
        search = (
            SearchSession(searcher, self._request.run, template_of(task), PATTERNS) if searcher is not None else None
        )
        return toolbox_for(task, renderer, self._request.limits.context_tokens, search, TracedToolbox)

    async def _on_sampled(self, turn: Turn) -> None:
        assert self._sandbox is not None
        await self._log.sampled(turn, self._sandbox.node, self._sandbox.id, self._fingerprint)

    async def _on_step(self, ended: int) -> None:
        """Take the changes of a step that ended, and begin the next one."""
        assert self._sandbox is not None
        name = f"{self._request.trajectory}-step{ended}"
        changes, over, _ = await pull(self._sandbox, self._task, name)
        self._over |= over
        self._step = changes
        self._steps.append(changes)
        await begin_step(self._sandbox, self._task, ended, self._request.trajectory)

    async def _on_done(self, index: int, results: Sequence[ToolResult]) -> None:
        await self._log.done(index, results, self._step)
        self._step = UNSET
