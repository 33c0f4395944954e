"""The double's pages about itself."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from aiohttp import web

from tests.support.sglang.priority import page

if TYPE_CHECKING:
    from tests.support.sglang.double import Double


def gets(double: "Double") -> dict[str, Callable[[web.Request], Awaitable[web.Response]]]:
    """The handlers by path."""

    async def ready(request: web.Request) -> web.Response:
        return web.Response(status=503 if double.paused else 200)

    async def health(request: web.Request) -> web.Response:
        return web.Response(status=503 if double.paused and double.sick_when_paused else 200)

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text=page(double))

    async def ping(request: web.Request) -> web.Response:
        return web.Response()

    async def described(request: web.Request) -> web.Response:
        return web.json_response(double.openapi) if double.openapi else web.Response(status=404)

    return {"/ready": ready, "/health": health, "/metrics": metrics, "/ping": ping, "/openapi.json": described}
