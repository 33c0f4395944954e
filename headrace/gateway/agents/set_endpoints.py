"""HTTP endpoints of sets of agents, which work on one prompt side by side.

    POST /v1/agents {prompt, n, setup?, check?, workspace?}  -> 201 {set, forked, agents: [{agent, run}]}
    GET  /v1/agent-sets/ID                    the agents and their runs
    GET  /v1/agent-sets/ID/comparison         diffs, hunks, check and overlap
    POST /v1/agent-sets/ID/merge              {agent, onto? | onto_agent?} -> {files, binaryFiles, deleted, conflicts}

`onto` is the present codebase, in the same forms as `workspace`; without it the agent's changes are merged into the
set's base. A merge changes nothing at the gateway: the answer contains the files that differ from `onto`.
"""

import base64
from typing import Any

from aiohttp import web

from headrace.config import Production
from headrace.gateway.agents.merging import Merged
from headrace.gateway.agents.requests import AgentRefused, Merge
from headrace.gateway.agents.sets import AgentSets
from headrace.gateway.agents.workspace import files_of
from headrace.gateway.http import read_json
from headrace.gateway.tenants.admission import keyed
from headrace.messages.product import Agent, AgentSet, ApiKey


class SetEndpoints:
    """Routes of sets of agents."""

    def __init__(self, sets: AgentSets, production: Production) -> None:
        self._sets, self._production = sets, production

    def routes(self) -> list[web.RouteDef]:
        """The routes for an aiohttp application."""
        made = "/v1/agent-sets/{set}"
        return [
            web.get(made, keyed(self._read)),
            web.get(f"{made}/comparison", keyed(self._compare)),
            web.post(f"{made}/merge", keyed(self._merge)),
        ]

    async def _read(self, request: web.Request, key: ApiKey) -> web.StreamResponse:
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
