"""Sets of agents on one codebase: prepares one sandbox, forks it for each agent, checks and compares their work.

The preparation runs once, in a sandbox that a rollout actor acquires. Each fork is held under the key of its agent's
workspace. With a backend that cannot fork, every agent begins in a new sandbox with the prepared files, and the set
has `forked` false: files that `setup` wrote outside the workspace are missing there.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from headrace.bus.errors import BusTimeout, NoResponders
from headrace.gateway.agents.comparing import file_diffs, overlaps
from headrace.gateway.agents.merging import Merged, merge
from headrace.gateway.agents.requests import AgentRefused, NewAgent
from headrace.gateway.agents.store import IDLE_S, KEPT_BYTES, Agents, GatewayParts, Member, idempotent_id
from headrace.gateway.agents.views import agent_view, check_view, run_view
from headrace.messages import subjects
from headrace.messages.base import Message
from headrace.messages.product import Agent, AgentSet, ApiKey, AttemptControl, WorkspaceCommand, WorkspaceReport

COMMAND_S = 120.0
"""Time limit of the commands `setup` and `check`."""
ANSWER_S = 60.0
"""Seconds to acquire and copy a sandbox, in addition to the command's own time limit."""
Control = Callable[[AttemptControl], Awaitable[None]]


class AgentSets:
    """All sets of agents of one run of headrace."""

    def __init__(self, parts: GatewayParts, agents: Agents) -> None:
        self._bus, self._config, self._run, self._users = parts.bus, parts.config, parts.run, parts.users
        self._agents = agents
        self._sets: dict[str, AgentSet] = {}
        self._making: dict[str, asyncio.Lock] = {}
        agents.check = self.check

    async def start(self) -> None:
        """Load the sets that an earlier gateway stored."""
        self._kept = await self._bus.kv("HR_SESSION")
        for value, _ in (await self._kept.items(f"{self._run}.session.set.*.*")).values():
            if isinstance(value, AgentSet):
                self._sets[value.id] = value

    def apply(self, key: str, entry: Message | None, revision: int) -> None:
        """Take up an agent or a set as a gateway stored it, or its end."""
        kind, _, id = key.split(".")[-3:]
        if kind == "agent" and (entry is None or isinstance(entry, Agent)):
            self._agents.apply(id, entry, revision)
        elif kind == "set" and entry is None:
            self._sets.pop(id, None)
        elif kind == "set" and isinstance(entry, AgentSet):
            self._sets.setdefault(id, entry)

    def owned(self, id: str, key: ApiKey) -> AgentSet:
        """A set of the key's tenant. AgentRefused with 404."""
        made = self._sets.get(id)
        if made is None or made.tenant != key.tenant:
            raise AgentRefused(404, "not_found", "there is no such set of agents")
        return made

    def members(self, made: AgentSet) -> list[Agent]:
        """The agents of a set that exist, in the set's order."""
        return [agent for id in made.agents if (agent := self._agents.get(id)) is not None]

    # Creation

    async def create(self, asked: NewAgent, files: dict[str, bytes], key: ApiKey, idempotency: str) -> AgentSet:
        """Create a set and start its agents; return the existing set if this idempotency key was used before.
        AgentRefused with 400 if `setup` fails, with 503 if there is no sandbox."""
        token = idempotency or secrets.token_hex(12)
        id = idempotent_id(key.tenant, f"{token}/set")
        async with self._making.setdefault(id, asyncio.Lock()):
            made = self._sets.get(id)
            if made is None:
                made = await self._prepare(id, asked, files, key, token)
                await self._keep(made)
            for at in range(asked.n):  # a repeated request creates the agents that a killed gateway did not
                sandbox = made.sandboxes[at] if made.forked else ""
                member = Member(set_id=id, files=made.files, check=made.check, node=made.node, sandbox=sandbox)
                await self._agents.create(asked, made.files, key, f"{token}/{at}", member)
        self._making.pop(id, None)
        return made

    async def _prepare(self, id: str, asked: NewAgent, files: dict[str, bytes], key: ApiKey, token: str) -> AgentSet:
        user = self._users.hash(key.tenant, asked.user or f"key {key.id}")
        agents = tuple(idempotent_id(key.tenant, f"{token}/{at}") for at in range(asked.n))
        command = WorkspaceCommand(
            run=self._run,
            # Each try has a new name, because the forks of a try whose answer was lost still hold theirs.
            name=f"{user}.{id}-{secrets.token_hex(4)}",
            image=asked.workspace.image,
            files=files,
            command=asked.setup,
            timeout_s=COMMAND_S,
            copies=tuple(f"{user}.{agent}" for agent in agents),
            hold_s=IDLE_S,
        )
        report = await self._ask(command, user)
        if report.failed:
            await self._release(command)
            raise AgentRefused(503, "unavailable", f"the sandbox could not be prepared: {report.failed}")
        if report.code:
            text = f"setup: `{asked.setup}` ended with code {report.code}: {report.output[-1000:]}"
            raise AgentRefused(400, "setup_failed", text)
        return AgentSet(
            id=id,
            user=user,
            tenant=key.tenant,
            agents=agents,
            files=report.files,
            forked=bool(report.sandboxes),
            check=asked.check,
            setup=asked.setup,
            node=report.node,
            sandboxes=report.sandboxes,
        )

    async def _ask(self, command: WorkspaceCommand, user: str) -> WorkspaceReport:
        subject = subjects.RPC.at(service="rollout", caller="gateway", method=f"command-{subjects.token(self._run)}")
        try:
            answer = await self._bus.request(subject, command, timeout=command.timeout_s + ANSWER_S, owner=user)
        except NoResponders:
            return WorkspaceReport(failed="no rollout actor serves the production lane now")
        except BusTimeout:
            return WorkspaceReport(failed=f"no answer within {command.timeout_s + ANSWER_S:g} s")
        if isinstance(answer, WorkspaceReport):
            return answer
        return WorkspaceReport(failed=str(getattr(answer, "detail", answer.type_name)))

    async def _release(self, command: WorkspaceCommand) -> None:
        for name in command.copies:
            await self._agents.control(AttemptControl(run=self._run, workspace=name))

    async def _keep(self, made: AgentSet) -> None:
        small = sum(map(len, made.files.values())) <= KEPT_BYTES
        stored = made if small else msgspec.structs.replace(made, files={}, complete=False)
        await self._kept.put(f"{self._run}.session.set.{made.user}.{made.id}", stored)
        self._sets[made.id] = made

    async def forget(self, user: str) -> None:
        """Remove the agents and sets of a user whose data is purged, and their sandboxes."""
        await self._agents.forget(user)
        for made in [made for made in self._sets.values() if made.user == user]:
            self._sets.pop(made.id, None)
            await self._kept.delete(f"{self._run}.session.set.{made.user}.{made.id}")

    # Results

    async def check(self, agent: Agent) -> tuple[int | None, str]:
        """Exit code and output of the set's check on an agent's files; None and the reason if the check did not run."""
        made = self._sets.get(agent.set_id)
        if made is None or not made.check:
            return None, ""
        command = WorkspaceCommand(
            run=self._run,
            name=f"{agent.user}.{agent.id}-check-{secrets.token_hex(4)}",
            image=agent.image,
            files=agent.files,
            command="\n".join(filter(None, (f"({made.setup}) || exit" if made.setup else "", made.check))),
            timeout_s=COMMAND_S,
        )
        report = await self._ask(command, agent.user)
        return (None, report.failed) if report.failed else (report.code, report.output)

    def view(self, made: AgentSet) -> dict[str, Any]:
        """The set with its agents and their latest runs, as a JSON object."""
        agents = [
            {"agent": agent_view(agent), "run": run_view(agent.runs[-1]), "restored": agent.runs[0].restored}
            for agent in self.members(made)
        ]
        return {"set": made.id, "forked": made.forked, "agents": agents}

    async def compare(self, made: AgentSet) -> dict[str, Any]:
        """Each agent's diff and the outcome of its check, and the overlaps of each pair of agents."""
        bases = {agent.id: await self._base(made, agent) for agent in self.members(made)}
        files = {agent.id: agent.files for agent in self.members(made)}
        diffs = {id: await file_diffs(bases[id], files[id]) for id in files}
        agents = [
            {
                "agent": agent.id,
                "status": agent.runs[-1].state,
                "check": check_view(agent.runs[-1]) if made.check else None,
                "files": [diff.view() for diff in diffs[agent.id]],
                "linesAdded": sum(diff.added for diff in diffs[agent.id]),
                "linesRemoved": sum(diff.removed for diff in diffs[agent.id]),
            }
            for agent in self.members(made)
        ]
        return {"set": made.id, "agents": agents, "overlaps": overlaps(diffs, files)}

    async def merge(self, made: AgentSet, agent: Agent, codebase: dict[str, bytes] | None) -> Merged:
        """Merge an agent's work into a codebase. codebase: None merges into the files that the agents began with."""
        base = await self._base(made, agent)
        return await merge(base, base if codebase is None else codebase, agent.files, agent.id)

    async def _base(self, made: AgentSet, agent: Agent) -> dict[str, bytes]:
        """The files that an agent began with. Of an image's files it contains those that the agent changed."""
        if not made.complete:
            text = "the files that this set began with are too large to keep, and the gateway was restarted since"
            raise AgentRefused(410, "base_expired", text)
        base = dict(made.files)
        for run in agent.runs:
            trajectory = await self._agents.trajectory(agent, run) if agent.image else None
            base = (trajectory.originals if trajectory is not None else {}) | base
        return base
