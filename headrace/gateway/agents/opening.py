"""Opens the agents API of a gateway."""

from aiohttp import web

from headrace.gateway.agents.endpoints import AgentEndpoints
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
    return sets, AgentEndpoints(parts, agents, sets, ratings, follow_ups).routes()
