"""Opens the agents API of a gateway."""

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from aiohttp import web

from headrace.bus.connection import Bus
from headrace.config import Config
from headrace.gateway.agents.endpoints import AgentEndpoints
from headrace.gateway.agents.events import Events
from headrace.gateway.agents.set_endpoints import SetEndpoints
from headrace.gateway.agents.sets import AgentSets
from headrace.gateway.agents.store import Agents, Open, Sessions
from headrace.gateway.agents.webhooks import Webhooks
from headrace.gateway.keys import ApiKey
from headrace.gateway.signals.follow_ups import FollowUps
from headrace.gateway.signals.ratings import Ratings
from headrace.gateway.split import Split
from headrace.gateway.user_keys import UserKeys


async def open_agents(
    bus: Bus,
    config: Config,
    run: str,
    users: UserKeys,
    split: Split,
    sessions: Sessions,
    open: Open,
    event: Callable[..., Awaitable[None]],
    spawn: Callable[[Coroutine[Any, Any, Any], str], Any],
    admit: Callable[[web.Request], ApiKey],
    ratings: Ratings,
    follow_ups: FollowUps,
) -> tuple[AgentSets, list[web.RouteDef]]:
    """Load the stored agents and sets. Returns the sets, and the routes of both."""
    agents = Agents(bus, config, run, users, split, sessions, open, Webhooks(event), spawn)
    sets = AgentSets(bus, config, run, users, agents)
    await sets.start()
    await agents.start()
    endpoints = AgentEndpoints(
        agents, sets, Events(bus, agents, sessions), admit, bus, run, config.production, ratings, follow_ups
    )
    return sets, [*endpoints.routes(), *SetEndpoints(sets, admit, config.production).routes()]
