"""The agents of a gateway: their records, their permitted actions and the results of their runs.

A run is a session of the gateway: a group of the production lane with one slot. An agent is a record in HR_SESSION that
lists its runs. Its sandbox is held between runs. If the sandbox is lost, the next run begins in a new one with the
files of the last finished run, and is marked `restored`.
"""

import asyncio
import hashlib
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple

import msgspec

from headrace.bus.connection import Bus
from headrace.bus.errors import BusError
from headrace.config import Config
from headrace.gateway.agents.requests import AgentRefused, NewAgent
from headrace.gateway.agents.webhooks import Webhooks
from headrace.gateway.sessions import Run, Sessions
from headrace.gateway.signals.persistence import added_lines
from headrace.gateway.split import Split
from headrace.gateway.user_keys import UserKeys
from headrace.messages import subjects
from headrace.messages.product import Agent, AgentRun, ApiKey, AttemptControl
from headrace.messages.rollout import PolicyRef, SlotFailed, Trajectory, TurnSampled, Workspace

KEPT_BYTES = 512 << 10
"""The most bytes of files that an agent's record holds. With more, the next run needs the held sandbox."""
REPEAT_S = 1.0
IDLE_S = 1800.0
"""How long the sandbox of an agent is held for the next run."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """A run that the gateway opens as a session."""

    group: str
    image: str
    """Empty: a machine without an image."""
    prompt: str
    files: dict[str, bytes]
    policy: PolicyRef
    workspace: Workspace


Open = Callable[[Order], Awaitable[None]]
"""Opens a run as a session. BusError."""


class GatewayParts(NamedTuple):
    """The parts of a gateway that its agents API uses."""

    bus: Bus
    config: Config
    run: str
    users: UserKeys
    split: Split
    sessions: Sessions
    open: Open
    event: Callable[..., Awaitable[None]]
    """Publishes an event."""
    spawn: Callable[[Coroutine[Any, Any, Any], str], Any]
    """Starts a task of the gateway."""


class Member(NamedTuple):
    """The set of an agent, and the agent's share of the preparation."""

    set_id: str
    files: dict[str, bytes]
    check: str
    node: str
    sandbox: str
    """The agent's fork; empty if the backend cannot fork."""


class Agents:
    """All agents of one run of headrace."""

    def __init__(self, parts: GatewayParts) -> None:
        self._bus, self._config, self._run, self._users = parts.bus, parts.config, parts.run, parts.users
        self._split = parts.split
        self._sessions, self._open, self._spawn = parts.sessions.runs, parts.open, parts.spawn
        self._webhooks = Webhooks(parts.event, parts.config.production.webhook_hosts)
        self._agents: dict[str, Agent] = {}
        self._revisions: dict[str, int] = {}
        self._creating: set[str] = set()
        self._cancelling: set[str] = set()
        self.check: Callable[[Agent], Awaitable[tuple[int | None, str]]] | None = None
        """Tests the files of an agent of a set: exit code and output."""
        self.rate_cancelled: Callable[[Agent, AgentRun], Awaitable[None]] | None = None
        """Rates a run that its user cancelled."""

    async def start(self) -> None:
        """Load the agents that an earlier gateway stored, and wait for the ends of their runs."""
        self._kept = await self._bus.kv("HR_SESSION")
        for value, revision in (await self._kept.items(f"{self._run}.session.agent.*.*")).values():
            if isinstance(value, Agent) and value.runs:
                self.apply(value.id, value, revision)
                if value.runs[-1].state == "RUNNING":
                    self._spawn(self._store_end(value.id, value.runs[-1]), f"agent {value.id}")

    def apply(self, id: str, agent: Agent | None, revision: int) -> None:
        """Take up an agent as a gateway stored it, or its end."""
        if agent is None:
            self._agents.pop(id, None)
        elif revision > self._revisions.get(id, 0):
            self._revisions[id], self._agents[id] = revision, agent

    # Queries

    def of(self, key: ApiKey) -> list[Agent]:
        """The agents of a key's tenant, newest first."""
        agents = [agent for agent in self._agents.values() if agent.tenant == key.tenant]
        return sorted(agents, key=lambda agent: -agent.runs[0].created)

    def get(self, id: str) -> Agent | None:
        """An agent of any tenant."""
        return self._agents.get(id)

    def owned(self, id: str, key: ApiKey) -> Agent:
        """An agent of the key's tenant. AgentRefused with 404."""
        agent = self._agents.get(id)
        if agent is None or agent.tenant != key.tenant:
            raise AgentRefused(404, "not_found", "there is no such agent")
        return agent

    def group(self, agent: Agent, run: AgentRun) -> str:
        """The name of a run's session."""
        return f"{agent.user}.{run.id}"

    def filters(self, agent: Agent, run: AgentRun) -> list[str]:
        """The subjects of a run's turns, one per attempt."""
        attempts = range(self._config.curriculum.attempts)
        return [subjects.TURN.at(run=self._run, trajectory=f"{self.group(agent, run)}-0-{n}") for n in attempts]

    # Changes

    async def create(
        self, asked: NewAgent, files: dict[str, bytes], key: ApiKey, idempotency: str, member: Member | None = None
    ) -> Agent:
        """Create an agent and start its first run; return the existing agent if the idempotency key was used before."""
        id = idempotent_id(key.tenant, idempotency)
        if id in self._agents:
            return self.owned(id, key)
        user = self._users.hash(key.tenant, asked.user or f"key {key.id}")
        run_id = idempotent_id(key.tenant, f"{idempotency}/0" if idempotency else "")
        first = AgentRun(id=run_id, prompt=asked.prompt, created=time.time())
        agent = Agent(
            id=id,
            user=user,
            tenant=key.tenant,
            training_allowed=key.training,
            policy=self._split.policy(f"{user}.{id}"),
            image=asked.workspace.image,
            files=files,
            runs=(first,),
            webhook=asked.webhook.url if asked.webhook is not None else "",
            webhook_secret=asked.webhook.secret if asked.webhook is not None else "",
            set_id=member.set_id if member is not None else "",
            prepared_node=member.node if member is not None else "",
            prepared_sandbox=member.sandbox if member is not None else "",
        )
        await self._begin(agent, first)
        return agent

    async def go_on(self, agent: Agent, prompt: str, idempotency: str) -> AgentRun:
        """Start another run in the same workspace. AgentRefused with 409 while a run is under way or after archive."""
        id = idempotent_id(agent.tenant, f"{agent.id}/{idempotency}") if idempotency else idempotent_id("", "")
        repeated = next((run for run in agent.runs if run.id == id), None)
        if repeated is not None:
            return repeated
        if agent.archived:
            raise AgentRefused(409, "agent_archived", "this agent is archived; create another one")
        if agent.runs[-1].state == "RUNNING" or agent.id in self._creating:
            raise AgentRefused(409, "agent_busy", f"run {agent.runs[-1].id} is under way: wait for it, or cancel it")
        run = AgentRun(id=id, prompt=prompt, created=time.time())
        await self._begin(msgspec.structs.replace(agent, runs=(*agent.runs, run)), run)
        return run

    async def _begin(self, agent: Agent, run: AgentRun) -> None:
        self._creating.add(agent.id)
        try:
            *earlier, _ = agent.runs
            workspace = Workspace(
                name=f"{agent.user}.{agent.id}",
                turn=len(earlier),
                node=earlier[-1].node if earlier else agent.prepared_node,
                hold_s=IDLE_S,
            )
            order = Order(
                group=self.group(agent, run),
                image=agent.image,
                prompt=told(earlier, run.prompt),
                files=agent.files,
                policy=agent.policy,
                workspace=workspace,
            )
            await self._keep(agent)
            try:
                await self._open(order)
            finally:
                self._spawn(self._store_end(agent.id, run), f"agent {agent.id}")
        finally:
            self._creating.discard(agent.id)

    async def cancel(self, agent: Agent, run: AgentRun) -> None:
        """Cancel a run: the control message is repeated every `REPEAT_S` until the run has ended."""
        if run.state != "RUNNING":
            raise AgentRefused(409, "run_not_cancellable", f"this run has ended: {run.state}")
        if run.id not in self._cancelling:
            self._cancelling.add(run.id)
            self._spawn(self._repeat_cancel(agent, run.id), f"cancel {run.id}")

    async def _repeat_cancel(self, agent: Agent, id: str) -> None:
        while run := next((run for run in self._runs(agent.id) if run.id == id and run.state == "RUNNING"), None):
            await self.control(AttemptControl(run=self._run, group=self.group(agent, run)))
            await asyncio.sleep(REPEAT_S)
        self._cancelling.discard(id)

    def _runs(self, id: str) -> tuple[AgentRun, ...]:
        """The runs of an agent as they are now; none after a purge."""
        return self._agents[id].runs if id in self._agents else ()

    async def archive(self, agent: Agent) -> Agent:
        """Archive an agent: no further runs, and its sandbox is released."""
        if agent.runs[-1].state == "RUNNING":
            raise AgentRefused(409, "agent_busy", f"run {agent.runs[-1].id} is under way: wait for it, or cancel it")
        agent = msgspec.structs.replace(agent, archived=True)
        await self._keep(agent)
        await self.control(AttemptControl(run=self._run, workspace=f"{agent.user}.{agent.id}"))
        return agent

    async def forget(self, user: str) -> None:
        """Remove the agents of a user whose data is purged, and their sandboxes."""
        for agent in [agent for agent in self._agents.values() if agent.user == user]:
            self._agents.pop(agent.id, None)
            await self._kept.delete(self._key(agent))
            for run in agent.runs:
                await self.control(AttemptControl(run=self._run, group=self.group(agent, run)))
            await self.control(AttemptControl(run=self._run, workspace=f"{agent.user}.{agent.id}"))

    async def control(self, message: AttemptControl) -> None:
        """Send a control message to all rollout actors of the run."""
        where = subjects.RPC.at(service="rollout", caller="gateway", method=f"control-{subjects.token(self._run)}")
        await self._bus.emit(where, message)

    def _key(self, agent: Agent) -> str:
        return f"{self._run}.session.agent.{agent.user}.{agent.id}"

    async def _keep(self, agent: Agent) -> None:
        small = sum(map(len, agent.files.values())) <= KEPT_BYTES
        stored = agent if small else msgspec.structs.replace(agent, files={})
        self._revisions[agent.id] = await self._kept.put(self._key(agent), stored)
        self._agents[agent.id] = agent

    # Ends

    async def _store_end(self, id: str, run: AgentRun) -> None:
        """Wait for the end of a run and store it."""
        agent = self._agents[id]
        session = self._sessions.get(self.group(agent, run))
        while session is not None and not session.over and id in self._agents:
            await session.changed.wait()
        if id not in self._agents:
            return
        agent = self._agents[id]
        ended = await self._ended(agent, run, session)
        done = ended.state == "FINISHED"
        files = await self._files_after(agent, run) if done else agent.files
        if done:
            ended = msgspec.structs.replace(ended, added=added_lines(agent.files, files))
        agent = msgspec.structs.replace(agent, files=files, runs=(*agent.runs[:-1], ended))
        if done and agent.set_id and self.check is not None:
            code, output = await self.check(agent)
            ended = msgspec.structs.replace(ended, check_code=code, check_output=output)
            agent = msgspec.structs.replace(agent, runs=(*agent.runs[:-1], ended))
            if id not in self._agents:  # its user's data was purged meanwhile
                return
        await self._keep(agent)
        if ended.state == "CANCELLED" and self.rate_cancelled is not None:
            await self.rate_cancelled(agent, ended)
        if agent.webhook and ended.state in ("FINISHED", "ERROR"):
            await self._webhooks.post(agent, ended)

    async def _ended(self, agent: Agent, run: AgentRun, session: Run | None) -> AgentRun:
        replace = msgspec.structs.replace
        node = sandbox = ""
        async for received in self._bus.history("HR_TURN", *self.filters(agent, run)):
            if isinstance(received.message, TurnSampled):
                node, sandbox = received.message.node, received.message.sandbox
        before = next((each.sandbox for each in reversed(agent.runs[:-1]) if each.sandbox), agent.prepared_sandbox)
        run = replace(run, ended=time.time(), node=node, sandbox=sandbox)
        run = replace(run, restored=bool(before and sandbox and before != sandbox))
        trajectory = await self.trajectory(agent, run)
        if trajectory is not None:
            changed = tuple(sorted((*trajectory.diff, *trajectory.deleted)))
            ended: Any = "CANCELLED" if trajectory.outcome == "cancelled" else "FINISHED"
            return replace(run, state=ended, detail=trajectory.outcome, changed=changed)
        if session is not None:
            reason, detail = str(session.result.get("reason", "")), str(session.result.get("detail", ""))
        else:  # the run failed while no gateway was running
            last = await self._bus.last("HR_LEDGER", subjects.FAIL.at(run=self._run, group=self.group(agent, run)))
            failed = last.message if last is not None else None
            reason, detail = (failed.reason, failed.detail) if isinstance(failed, SlotFailed) else ("lost", "")
        state: Any = "CANCELLED" if reason == "cancelled" else "ERROR"
        return replace(run, state=state, detail=f"{reason}: {detail}" if detail else reason)

    async def trajectory(self, agent: Agent, run: AgentRun) -> Trajectory | None:
        """The record of a finished run; None before its end, and after a purge."""
        where = subjects.TRAJ.at(run=self._run, group=self.group(agent, run))
        try:
            last = await self._bus.last("HR_TRAJ", where)
        except BusError:
            return None
        return last.message if last is not None and isinstance(last.message, Trajectory) else None

    async def _files_after(self, agent: Agent, run: AgentRun) -> dict[str, bytes]:
        trajectory = await self.trajectory(agent, run)
        assert trajectory is not None
        files = agent.files | trajectory.diff
        return {path: data for path, data in files.items() if path not in trajectory.deleted}


def told(earlier: list[AgentRun], prompt: str) -> str:
    """A run's prompt: the earlier requests in this workspace, then the new one."""
    if not earlier:
        return prompt
    lines = [f"- {run.prompt} ({run.state.lower()}; changed: {', '.join(run.changed) or 'nothing'})" for run in earlier]
    return "\n".join(("Earlier requests in this workspace:", *lines, "", prompt))


def idempotent_id(tenant: str, idempotency: str) -> str:
    """12 hexadecimal digits: random, or the same ones for the same idempotency key of a tenant."""
    if not idempotency:
        return secrets.token_hex(6)
    return hashlib.sha256(f"{tenant}\0{idempotency}".encode(errors="surrogatepass")).hexdigest()[:12]
