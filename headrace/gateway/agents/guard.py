"""Wraps every handler of the agents API: checks the key, and turns each error into the API's JSON form."""

import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from headrace.bus.errors import BusError
from headrace.gateway.agents.requests import AgentRefused
from headrace.gateway.http import BUS_AGAIN_S, HttpRefused
from headrace.gateway.tenants.keys import ApiKey
from headrace.gateway.tenants.limits import retry_after

CODES = {
    400: "invalid_request",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    408: "timeout",
    413: "too_large",
    429: "rate_limit",
    503: "unavailable",
}
_log = logging.getLogger("headrace.gateway")
Handler = Callable[[web.Request, ApiKey], Awaitable[web.StreamResponse]]


def guarded(
    admit: Callable[[web.Request], ApiKey], handler: Handler
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """The handler with a check of the key before it. admit: returns the key of a request or raises HttpRefused."""

    async def respond(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request, admit(request))
        except HttpRefused as error:
            code = error.code if isinstance(error, AgentRefused) else CODES.get(error.status, "error")
            headers = {"Retry-After": retry_after(error.retry_s)} if error.retry_s else None
            return _error(error.status, code, str(error), headers)
        except BusError as error:
            again = {"Retry-After": retry_after(BUS_AGAIN_S)}
            return _error(503, "unavailable", f"the message bus is unavailable, try again: {error}", again)
        except ConnectionError:
            raise
        except Exception:
            _log.exception("a request failed: %s", request.path)
            return _error(500, "internal", "the server failed; its log has the reason")

    return respond


def _error(status: int, code: str, text: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"error": {"code": code, "message": text}}, status=status, headers=headers)
