"""Webhooks: the address comes from a stored record, and the hosts from the operator."""

import pytest
from aiohttp import web

from headrace.gateway.agents.webhooks import Webhooks
from headrace.messages.product import Agent, AgentRun
from headrace.messages.rollout import PolicyRef
from tests.support.loopback import serving

pytestmark = pytest.mark.anyio
ENDED = AgentRun(id="r", prompt="x", state="FINISHED", created=0.0)


def stored(webhook: str) -> Agent:
    return Agent(
        id="a",
        user="u",
        tenant="t",
        training_allowed=False,
        policy=PolicyRef(),
        runs=(ENDED,),
        webhook=webhook,
        webhook_secret="s" * 16,
    )


async def test_a_stored_agent_posts_to_the_operators_hosts_alone() -> None:
    """The record may be forged, and the operator may have removed the host since."""
    said: list[str] = []
    reached: list[str] = []

    async def event(kind: str, text: str, level: str) -> None:
        said.append(kind)

    async def hook(request: web.Request) -> web.Response:
        reached.append(request.path)
        if request.path == "/redirect":
            raise web.HTTPTemporaryRedirect("/elsewhere")
        return web.Response()

    app = web.Application()
    app.add_routes([web.post("/{path:.*}", hook)])
    async with serving(app) as url:
        named = Webhooks(event, ("127.0.0.1",), (0.0,))
        addresses = (f"{url}/hook", url.replace("127.0.0.1", "localhost"), "file:///etc/passwd", "ftp://hooks.example")
        for address in addresses:
            await Webhooks(event, ("hooks.example", "etc"), (0.0,)).post(stored(address), ENDED)
        assert (reached, said) == ([], ["webhook_failed"] * 4)
        await named.post(stored(f"{url}/hook"), ENDED)
        assert (reached, len(said)) == (["/hook"], 4)
        await named.post(stored(f"{url}/redirect"), ENDED)
        assert (reached, len(said)) == (["/hook", "/redirect"], 5)
