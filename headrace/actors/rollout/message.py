"""One attempt at a task without a sandbox: samples a message and publishes the Trajectory.

The Trajectory's diff has the message under `ANSWER`; the judge passes it to the task's checker.
"""

import time
from collections.abc import Sequence

import msgspec

from headrace.actors.rollout.publication import publish, trajectory_of
from headrace.actors.rollout.spans import TracedEngine
from headrace.actors.rollout.turn_log import ResumeState, TurnLog
from headrace.bus.connection import Bus
from headrace.engines.base import Engine
from headrace.harness.message import run_message
from headrace.messages.plugins import Plugin
from headrace.messages.rollout import RolloutRequest, ToolResult, Trajectory, Turn
from headrace.messages.tasks import ANSWER, Task
from headrace.rendering.base import Renderer


class MessageEpisode:
    """The work on one RolloutRequest."""

    def __init__(
        self, request: RolloutRequest, task: Task, *, bus: Bus, rollout: str, plugins: Sequence[Plugin] = ()
    ) -> None:
        self._request, self._task, self._bus, self._rollout = request, task, bus, rollout
        self._log = TurnLog(bus, request.run, request.group, request.trajectory)
        self._fingerprint = ""
        self._plugins = plugins

    async def resume_state(self) -> ResumeState:
        """The state at which an earlier rollout actor stopped. Read it once, before `run`."""
        return await self._log.read()

    async def run(self, resume: ResumeState, engine: Engine, renderer: Renderer) -> Trajectory:
        """Finish the attempt and publish it. EngineError, WrongSequence."""
        request, task, started = self._request, self._task, time.monotonic()
        self._fingerprint = engine.fingerprint
        episode, text = await run_message(
            engine=TracedEngine(engine, request.trajectory),
            renderer=renderer,
            request=request,
            task=task,
            on_sampled=self._on_sampled,
            on_done=self._on_done,
            resume=resume.turns,
        )
        await self._log.flush()
        trajectory = trajectory_of(
            request,
            task,
            episode,
            bundle=renderer.bundle,
            fingerprint=self._fingerprint,
            rollout=self._rollout,
            since=started,
            plugins=self._plugins,
        )
        message = {ANSWER: text.encode("utf-8", "replace")}
        return await publish(self._bus, msgspec.structs.replace(trajectory, diff=message), self._log.first)

    async def _on_sampled(self, turn: Turn) -> None:
        await self._log.sampled(turn, "", "", self._fingerprint)

    async def _on_done(self, index: int, results: Sequence[ToolResult]) -> None:
        await self._log.done(index, results)
