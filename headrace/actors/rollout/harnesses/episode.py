"""An attempt in which a harness acts: an unmodified program in the sandbox, whose model calls the endpoint answers.

Everything else is as with headrace's own agent: request, sandbox, turn log, diff, Trajectory. The program ends by
itself, or by a limit of the attempt: of turns and tokens the endpoint tells it, and it has `GRACE_S` to end. Its exit
code decides between ``finished`` and ``crashed``; a failure of the endpoint is infrastructure. The state of a program
is in no record, so an attempt that another rollout actor began fails and is issued again.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from headrace.actors.rollout.episode import Episode
from headrace.actors.rollout.failures import HarnessFailed
from headrace.actors.rollout.harnesses.conversations import Conversations
from headrace.actors.rollout.harnesses.endpoint import Endpoint
from headrace.actors.rollout.harnesses.record import AttemptRecord
from headrace.actors.rollout.harnesses.tunnel import EndpointError, Tunnel
from headrace.actors.rollout.pins import NoPolicy
from headrace.actors.rollout.policies import ClientServed
from headrace.actors.rollout.turn_log import ResumeState
from headrace.config import Config, Program
from headrace.engines.base import Engine, EngineError
from headrace.harness.loop import Episode as Turns
from headrace.harness.loop import Outcome
from headrace.harnesses import programs
from headrace.messages.rollout import HarnessEnd
from headrace.messages.sandbox import Cancel, Exec, OpResult, SandboxLost
from headrace.rendering.base import Renderer
from headrace.sandboxes.client import RemoteSandbox

GRACE_S = 10.0
"""Seconds that a harness has to end once it was told that a limit is reached."""
SAID = 2000
"""Characters of a harness's output that are recorded when it did not finish."""


class HarnessEpisode(Episode):
    """The work on one RolloutRequest with a harness."""

    def __init__(
        self, *arguments: Any, config: Config, endpoint: Endpoint, serve: Callable[..., Any], **more: Any
    ) -> None:
        """config: with the program. serve: `Policies.serving_clients`. Others: as of `Episode`."""
        super().__init__(*arguments, **more)
        self._config, self._endpoint, self._serve = config, endpoint, serve

    async def _act(
        self, sandbox: RemoteSandbox, resume: ResumeState, engine: Engine, renderer: Renderer | ClientServed
    ) -> Turns:
        """Start the harness and answer it until it ends. EngineError, SandboxLost, HarnessFailed, NoPolicy."""
        request, task = self._request, self._task
        program = programs.programs(self._config).get(request.harness or "")
        if program is None:
            raise NoPolicy(
                f"the harness {request.harness!r} is unknown: expected a table [harnesses.{request.harness}]"
            )
        if task.later:
            raise NoPolicy(f"the harness {request.harness} cannot act in a task with steps: use headrace's own agent")
        if resume.turns:
            raise SandboxLost("the harness ended with the rollout actor that answered it")
        record = AttemptRecord(self._log, sandbox.node, sandbox.id)
        conversations = Conversations(self._bus, request, record, self._serve)
        tunnel = Tunnel(sandbox, await self._endpoint.protocol())
        try:
            url, home = await tunnel.open()
        except EndpointError as error:
            raise HarnessFailed(f"the sandbox has no endpoint: {error}") from None
        with self._endpoint.serving(conversations):
            serving = asyncio.create_task(tunnel.serve())
            try:
                done = await self._run(sandbox, program, url, home, conversations)
                if serving.done() and (lost := serving.exception()) is not None:
                    raise lost
            finally:
                serving.cancel()
                with suppress(asyncio.CancelledError, SandboxLost):
                    await serving
                await conversations.close()
        outcome = self._outcome(done, record, conversations)
        unrewarded: Sequence[int] = ()
        if self._config.harness.reward == "main":
            unrewarded = [each for each in range(record.segments) if each != record.longest()]
        self._harness_end = HarnessEnd(
            name=request.harness or "",
            code=done.code,
            requests=conversations.requests,
            rewritten=conversations.rewritten,
            unrewarded=tuple(unrewarded),
            said=_said(done) if outcome != "finished" else "",
        )
        return Turns(turns=tuple(record.turns), outcome=outcome)

    async def _run(
        self, sandbox: RemoteSandbox, program: Program, url: str, home: str, conversations: Conversations
    ) -> OpResult:
        """Run the program to its end, or to a limit."""
        request, task = self._request, self._task
        if not sandbox.harness:
            raise HarnessFailed(f"node {sandbox.node} mounted no harness")
        values = {
            "prompt": f"{task.system}\n\n{task.prompt}" if task.system else task.prompt,
            "url": url,
            "key": conversations.key,
            "home": home,
            "bundle": sandbox.harness.folder,
        }
        command = programs.started(program, sandbox.harness.runners, self._config.harness.arguments, values)
        call = f"{request.trajectory}/harness"
        wall_s = task.sandbox_limits.time_s or request.limits.wall_s
        running = asyncio.ensure_future(sandbox.call(Exec(argv=command.argv, env=command.env, timeout_s=wall_s), call))
        ends: set[asyncio.Future[Any]] = {running, conversations.limit, conversations.fault}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if conversations.limit.done():
                await asyncio.wait(ends - {conversations.limit}, timeout=GRACE_S)
            if not running.done():
                await sandbox.call(Cancel(call_id=call))
            done = await running
        finally:
            running.cancel()
        return done

    def _outcome(self, done: OpResult, record: AttemptRecord, conversations: Conversations) -> Outcome:
        """How the attempt ended. EngineError, HarnessFailed."""
        if conversations.fault.done():
            raise EngineError(conversations.fault.result())
        if conversations.limit.done():
            return conversations.limit.result()
        if not record.turns:
            raise HarnessFailed(f"{done.error or 'it ended'} before the first turn: {_said(done)}")
        if done.timed_out:
            return "wall_time"
        if done.code == 0:
            return "finished"
        return "context" if conversations.full else "crashed"


def _said(done: OpResult) -> str:
    return f"{done.stdout}\n{done.stderr}".strip()[-SAID:]
