"""Opens the agents API of a gateway."""

from aiohttp import web

from headrace.gateway.agents.endpoints import AgentEndpoints
from headrace.gateway.agents.events import Events
from headrace.gateway.agents.set_endpoints import SetEndpoints
from headrace.gateway.agents.sets import AgentSets
from headrace.gateway.agents.store import Agents, GatewayParts
from headrace.gateway.signals.follow_ups import FollowUps
from headrace.gateway.signals.ratings import Ratings


async def open_agents(
    parts: GatewayParts, ratings: Ratings, follow_ups: FollowUps
) -> tuple[AgentSets, list[web.RouteDef]]:
    """Load the stored agents and sets. Returns the sets, and the routes of both."""
    agents = Agents(parts)
    sets = AgentSets(parts, agents)
    await sets.start()
    await agents.start()
    events = Events(parts.bus, agents, parts.sessions)
    endpoints = AgentEndpoints(parts, agents, sets, events, ratings, follow_ups)
    return sets, [*endpoints.routes(), *SetEndpoints(sets, parts.config.production).routes()]
