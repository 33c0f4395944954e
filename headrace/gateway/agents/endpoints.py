"""HTTP endpoints of the agents API, version 1.

    POST /v1/agents                          {prompt, workspace?, webhook?, user?} -> 201 {agent, run}
    GET  /v1/agents?limit=&cursor=           the tenant's agents, newest first; ?idempotencyKey= the one created with it
    GET  /v1/agents/ID                       one agent with its runs
    POST /v1/agents/ID/runs                  {prompt} -> 201; 409 while a run is under way
    GET  /v1/agents/ID/runs/RID              one run
    GET  /v1/agents/ID/runs/RID/stream       server-sent events; resume with Last-Event-ID
    POST /v1/agents/ID/runs/RID/cancel       202
    POST /v1/agents/ID/runs/RID/feedback     {thumb | diff | undo | reward, comment?} of a finished run -> 202
    POST /v1/agents/ID/runs/RID/reward       the same
    POST /v1/agents/ID/runs/RID/lines        {at: 10m | 24h | merge, files} -> 202 {added, kept, thumb}
    POST /v1/agents/ID/archive               no further runs; the sandbox is released
    GET  /v1/agents/ID/usage                 turns and tokens, per run and in all
    GET  /v1/agents/ID/artifacts             paths that the agent's runs changed
    GET  /v1/agents/ID/artifacts/PATH        the content of one

    POST /v1/agents {prompt, n, setup?, check?, workspace?}  -> 201 {set, forked, agents: [{agent, run}]}
    GET  /v1/agent-sets/ID                    the agents and their runs
    GET  /v1/agent-sets/ID/comparison         diffs, hunks, check and overlap
    POST /v1/agent-sets/ID/merge              {agent, onto? | onto_agent?} -> {files, binaryFiles, deleted, conflicts}

`onto` is the present codebase, in the same forms as `workspace`; without it the agent's changes are merged into the
set's base. A merge changes nothing at the gateway: the answer contains the files that differ from `onto`.

A client can repeat a POST that creates an agent, a set or a run: a POST with the same `Idempotency-Key` returns the
first one's agent, set or run. Errors are {error: {code, message}}.
"""

import base64
import logging
from collections import Counter
from itertools import pairwise
from typing import Any

from aiohttp import web

from headrace.bus.errors import BusError
from headrace.gateway.agents.events import Events
from headrace.gateway.agents.merging import Merged
from headrace.gateway.agents.requests import AgentRefused, LaterFiles, Merge, NewAgent, NewRun
from headrace.gateway.agents.sets import AgentSets
from headrace.gateway.agents.store import Agents, GatewayParts, idempotent_id
from headrace.gateway.agents.views import agent_view, run_view
from headrace.gateway.agents.webhooks import allowed
from headrace.gateway.agents.workspace import files_of
from headrace.gateway.http import read_json
from headrace.gateway.requests import NewRating, Thumb
from headrace.gateway.signals.follow_ups import FollowUps
from headrace.gateway.signals.persistence import kept_lines
from headrace.gateway.signals.ratings import Ratings
from headrace.gateway.tenants.admission import keyed
from headrace.messages.product import Agent, AgentRun, AgentSet, ApiKey, Feedback, Signal
from headrace.messages.rollout import Trajectory, TurnSampled

MOST = 100
_log = logging.getLogger("headrace.gateway")


class AgentEndpoints:
    """Routes of the agents API."""

    def __init__(
        self, parts: GatewayParts, agents: Agents, sets: AgentSets, ratings: Ratings, follow_ups: FollowUps
    ) -> None:
        self._agents, self._sets, self._events = agents, sets, Events(parts.bus, agents, parts.sessions.runs)
        self._bus, self._run, self._production = parts.bus, parts.run, parts.config.production
        self._ratings, self._follow_ups = ratings, follow_ups
        agents.rate_cancelled = self._rate_cancelled

    def routes(self) -> list[web.RouteDef]:
        """The routes for an aiohttp application."""
        agent, run, made = "/v1/agents/{agent}", "/v1/agents/{agent}/runs/{run}", "/v1/agent-sets/{set}"
        return [
            web.post("/v1/agents", keyed(self._create)),
            web.get("/v1/agents", keyed(self._list)),
            web.get(agent, keyed(self._read)),
            web.post(f"{agent}/runs", keyed(self._go_on)),
            web.get(run, keyed(self._read_run)),
            web.get(f"{run}/stream", keyed(self._stream)),
            web.post(f"{run}/cancel", keyed(self._cancel)),
            web.post(f"{run}/feedback", keyed(self._rate)),
            web.post(f"{run}/reward", keyed(self._rate)),
            web.post(f"{run}/lines", keyed(self._lines)),
            web.post(f"{agent}/archive", keyed(self._archive)),
            web.get(f"{agent}/usage", keyed(self._usage)),
            web.get(f"{agent}/artifacts", keyed(self._artifacts)),
            web.get(f"{agent}/artifacts/{{path:.+}}", keyed(self._artifact)),
            web.get(made, keyed(self._read_set)),
            web.get(f"{made}/comparison", keyed(self._compare)),
            web.post(f"{made}/merge", keyed(self._merge)),
        ]

    def _found(self, request: web.Request, key: ApiKey) -> tuple[Agent, AgentRun]:
        agent = self._agents.owned(request.match_info["agent"], key)
        run = next((run for run in agent.runs if run.id == request.match_info["run"]), None)
        if run is None:
            raise AgentRefused(404, "not_found", "this agent has no such run")
        return agent, run

    async def _create(self, request: web.Request, key: ApiKey) -> web.StreamResponse:
        asked = await read_json(request, NewAgent)
        allowed(asked.webhook, self._production.webhook_hosts)
        files = await files_of(asked.workspace, self._production.git_hosts)
        idempotency = request.headers.get("Idempotency-Key", "")
        if asked.side_by_side:
            made = await self._sets.create(asked, files, key, idempotency)
            return web.json_response(self._sets.view(made), status=201)
        agent = await self._agents.create(asked, files, key, idempotency)
        return web.json_response({"agent": agent_view(agent), "run": run_view(agent.runs[0])}, status=201)

    async def _list(self, request: web.Request, key: ApiKey) -> web.StreamResponse:
        limit = request.query.get("limit", "20")
        if not limit.isascii() or not limit.isdigit() or len(limit) > 4 or not 1 <= int(limit) <= MOST:
            raise AgentRefused(400, "invalid_request", f"limit: expected 1 to {MOST}, got {limit[:20]!a}")
        agents, cursor = self._agents.of(key), request.query.get("cursor", "")
        if once := request.query.get("idempotencyKey"):
            agents = [agent for agent in agents if agent.id == idempotent_id(key.tenant, once)]
        if cursor:
            place = next((at for at, agent in enumerate(agents) if agent.id == cursor), None)
            if place is None:
                raise AgentRefused(400, "invalid_request", "cursor: expected nextCursor of an earlier answer")
            agents = agents[place + 1 :]
        page = agents[: int(limit)]
        more = {"nextCursor": page[-1].id} if len(agents) > len(page) else {}
        return web.json_response({"agents": [agent_view(agent) for agent in page]} | more)

    async def _read(self, request: web.Request, key: ApiKey) -> web.StreamResponse:
        agent = self._agents.owned(request.match_info["agent"], key)
        return web.json_response(agent_view(agent) | {"runs": [run_view(run) for run in agent.runs]})

    async def _go_on(self, request: web.Request, key: ApiKey) -> web.StreamResponse:
        agent, asked = self._agents.owned(request.match_info["agent"], key), await read_json(request, NewRun)
        run = await self._agents.go_on(agent, asked.prompt, request.headers.get("Idempotency-Key", ""))
        await self._judge_follow_up(self._agents.owned(agent.id, key), run, key)
        return web.json_response(run_view(run), status=201)

    async def _read_run(self, request: web.Request, key: ApiKey) -> web.StreamResponse:
        return web.json_response(run_view(self._found(request, key)[1]))

    async def _stream(self, request: web.Request, key: ApiKey) -> web.StreamResponse:
        return await self._events.stream(request, *self._found(request, key), key)

    async def _cancel(self, request: web.Request, key: ApiKey) -> web.StreamResponse:
        agent, run = self._found(request, key)
        await self._agents.cancel(agent, run)
        return web.json_response({"id": run.id, "status": "CANCELLING"}, status=202)

    async def _rate(self, request: web.Request, key: ApiKey) -> web.StreamResponse:
        (agent, run), given = self._found(request, key), await read_json(request, NewRating)
        trajectory = await self._finished(agent, run)
        outcome = await self._publish(
            agent, key.training, trajectory, given.given, given.signal, comment=given.comment, reward=given.reward
        )
        return web.json_response(outcome | {"id": run.id, "signal": given.signal, "thumb": given.given}, status=202)

    async def _finished(self, agent: Agent, run: AgentRun) -> Trajectory:
        trajectory = await self._agents.trajectory(agent, run)
        if trajectory is None:
            raise AgentRefused(
                409, "run_not_finished", f"expected a finished run, this one is {run.state}: rate it when it has ended"
            )
        return trajectory

    async def _lines(self, request: web.Request, key: ApiKey) -> web.StreamResponse:
        (agent, run), later = self._found(request, key), await read_json(request, LaterFiles)
        trajectory = await self._finished(agent, run)
        if not run.added:
            raise AgentRefused(409, "no_lines", "this run added no lines, so none can be counted")
        remaining, added = kept_lines(run.added, later.files.values()), len(run.added)
        thumb: Thumb = "up" if 2 * remaining >= added else "down"
        comment = f"{remaining} of {added} lines"
        outcome = await self._publish(
            agent, key.training, trajectory, thumb, "persistence", comment=comment, at=later.at
        )
        counted = outcome | {"id": run.id, "at": later.at, "added": added, "kept": remaining, "thumb": thumb}
        return web.json_response(counted, status=202)

    async def _judge_follow_up(self, agent: Agent, run: AgentRun, key: ApiKey) -> None:
        """Rate the run before `run` down when the prompt of `run` says that its work was wrong."""
        earlier = next((before for before, each in pairwise(agent.runs) if each.id == run.id), None)
        if earlier is None:
            return

        async def rate(words: str) -> None:
            try:
                trajectory = await self._agents.trajectory(agent, earlier)
                if trajectory is not None:  # a run that failed has no record to rate
                    await self._publish(agent, key.training, trajectory, "down", "followup", comment=words)
            except BusError as error:  # the new run has begun already, so its answer must not be an error
                _log.warning("the rating by follow-up %s is lost: %s", run.id, error)

        await self._follow_ups.judge(earlier.prompt, run.prompt, agent.training_allowed and key.training, rate)

    async def _rate_cancelled(self, agent: Agent, run: AgentRun) -> None:
        """Rate a run down because its user cancelled it. Provisional: a later rating of the user's counts instead."""
        trajectory = await self._agents.trajectory(agent, run)
        if trajectory is not None:  # one that was cancelled before its first turn has no record to rate
            comment = f"turns until then: {len(trajectory.turns)}"
            await self._publish(agent, True, trajectory, "down", "cancel", comment=comment)

    async def _publish(
        self, agent: Agent, training: bool, trajectory: Trajectory, thumb: Thumb, signal: Signal, **more: Any
    ) -> dict[str, str]:
        """more: further fields of the Feedback."""
        feedback = Feedback(
            tenant=agent.tenant,
            user=agent.user,
            run=self._run,
            trajectory=trajectory.id,
            thumb=thumb,
            signal=signal,
            final=signal not in ("followup", "cancel") and more.get("at") != "10m",
            training_allowed=agent.training_allowed and training,
            **more,
        )
        return await self._ratings.publish(feedback)

    async def _archive(self, request: web.Request, key: ApiKey) -> web.StreamResponse:
        agent = self._agents.owned(request.match_info["agent"], key)
        return web.json_response(agent_view(await self._agents.archive(agent)))

    async def _usage(self, request: web.Request, key: ApiKey) -> web.StreamResponse:
        agent = self._agents.owned(request.match_info["agent"], key)
        runs = []
        for run in agent.runs:
            used = Counter(turns=0, inputTokens=0, outputTokens=0)
            async for received in self._bus.history("HR_TURN", *self._agents.filters(agent, run)):
                if isinstance(received.message, TurnSampled):
                    turn = received.message.turn
                    used.update(turns=1, inputTokens=len(turn.prompt_ids), outputTokens=len(turn.ids))
            runs.append((run.id, used))
        total = {name: sum(used[name] for _, used in runs) for name in ("turns", "inputTokens", "outputTokens")}
        return web.json_response({"total": total, "runs": [{"id": id} | used for id, used in runs]})

    async def _artifacts(self, request: web.Request, key: ApiKey) -> web.StreamResponse:
        agent = self._agents.owned(request.match_info["agent"], key)
        paths = sorted({path for run in agent.runs for path in run.changed})
        entries = [{"path": path, "sizeBytes": len(agent.files[path])} for path in paths if path in agent.files]
        deleted = [path for path in paths if path not in agent.files]
        return web.json_response({"artifacts": entries, "deleted": deleted})

    async def _artifact(self, request: web.Request, key: ApiKey) -> web.StreamResponse:
        agent = self._agents.owned(request.match_info["agent"], key)
        path = request.match_info["path"]
        if path not in agent.files:
            raise AgentRefused(404, "not_found", "the workspace has no such file")
        headers = {"Content-Disposition": "attachment", "X-Content-Type-Options": "nosniff"}
        return web.Response(body=agent.files[path], content_type="application/octet-stream", headers=headers)

    async def _read_set(self, request: web.Request, key: ApiKey) -> web.StreamResponse:
        return web.json_response(self._sets.view(self._sets.owned(request.match_info["set"], key)))

    async def _compare(self, request: web.Request, key: ApiKey) -> web.StreamResponse:
        return web.json_response(await self._sets.compare(self._sets.owned(request.match_info["set"], key)))

    async def _merge(self, request: web.Request, key: ApiKey) -> web.StreamResponse:
        made, asked = self._sets.owned(request.match_info["set"], key), await read_json(request, Merge)
        if asked.onto is not None and asked.onto_agent:
            raise AgentRefused(400, "invalid_request", "expected one of onto and onto_agent, got both")
        codebase: dict[str, bytes] | None = None
        if asked.onto is not None:
            codebase = await files_of(asked.onto, self._production.git_hosts)
        elif asked.onto_agent:
            codebase = self._member(made, asked.onto_agent).files
        return web.json_response(_merged(await self._sets.merge(made, self._member(made, asked.agent), codebase)))

    def _member(self, made: AgentSet, id: str) -> Agent:
        """An agent of the set that has finished. AgentRefused with 404 or 409."""
        agent = next((agent for agent in self._sets.members(made) if agent.id == id), None)
        if agent is None:
            raise AgentRefused(404, "not_found", "this set has no such agent")
        if agent.runs[-1].state == "RUNNING":
            raise AgentRefused(409, "agent_busy", f"run {agent.runs[-1].id} is under way: wait for it, or cancel it")
        return agent


def _merged(merged: Merged) -> dict[str, Any]:
    texts: dict[str, str] = {}
    binary: dict[str, str] = {}
    for path, data in merged.changed.items():
        try:
            texts[path] = data.decode()
        except UnicodeDecodeError:
            binary[path] = base64.b64encode(data).decode()
    return {
        "clean": not merged.conflicts,
        "files": texts,
        "binaryFiles": binary,
        "deleted": list(merged.deleted),
        "conflicts": list(merged.conflicts),
    }
