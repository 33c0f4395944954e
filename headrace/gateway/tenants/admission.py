"""Admits requests: by the API key, its scope and its rate.

Programs on the gateway's machine may use the routes of headrace's own sessions and of purges without a key, as
`[production] tenant`. Every other request needs a key, because a purge deletes a user's data and a session uses a
sandbox. A request that a proxy passed on has come from elsewhere, also where the gateway listens on loopback alone.
"""

import ipaddress
from collections.abc import Awaitable, Callable

from aiohttp import web

from headrace.gateway.http import Handler, HttpRefused
from headrace.gateway.tenants.keys import ApiKey, ApiKeys, Scope
from headrace.gateway.tenants.limits import RateLimit

FORWARDED = ("Forwarded", "X-Forwarded-For", "X-Real-IP", "Via")
"""Headers that proxies add."""


def scope_of(route: str) -> Scope:
    """The scope that a route needs. route: its pattern, as ``/v1/agents/{agent}``."""
    if route.endswith(("/feedback", "/reward", "/lines")):
        return "feedback"
    if route.startswith("/v1/users"):
        return "purge"
    return "agents" if route.startswith(("/v1/agent", "/v1/sessions")) else "turns"


class Admission:
    """The check of every request that needs a key."""

    def __init__(self, keys: ApiKeys, limits: RateLimit | None = None) -> None:
        self._keys, self._limits = keys, limits or RateLimit()

    def admit(self, request: web.Request) -> ApiKey:
        """The request's key. HttpRefused with 401, 403 or 429."""
        token = _token(request)
        if not token:
            raise HttpRefused(401, "no API key: send `Authorization: Bearer KEY` or `x-api-key: KEY`")
        key = self._keys.find(token)
        if key is None:
            raise HttpRefused(401, "this API key is unknown or revoked")
        wait = self._limits.take(key.id, key.requests_per_minute)
        if wait > 0:
            raise HttpRefused(429, f"more than {key.requests_per_minute} requests a minute with this key", wait)
        resource = request.match_info.route.resource
        scope = scope_of(resource.canonical if resource is not None else request.path)
        if scope not in key.scopes:
            raise HttpRefused(403, f"this key lacks the scope {scope!r}; it has {', '.join(key.scopes) or 'none'}")
        return key

    def _tenant(self, request: web.Request, own: str) -> str:
        """The tenant of a request's key; `own` for one without a key from this machine. HttpRefused as in `admit`."""
        if _token(request) or not _from_here(request):
            return self.admit(request).tenant
        return own

    def with_tenant(
        self, own: str, handler: Callable[[web.Request, str], Awaitable[web.StreamResponse]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """A handler that gets the tenant of each request. Programs of this machine need no key: theirs is `own`."""

        async def respond(request: web.Request) -> web.StreamResponse:
            return await handler(request, self._tenant(request, own))

        return respond

    def of_tenant(self, own: str, handler: Handler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """A handler of a route whose data belongs to the tenant `own`; a key of another tenant gets a 403."""

        async def respond(request: web.Request, tenant: str) -> web.StreamResponse:
            if tenant != own:
                raise HttpRefused(403, f"this key is of the tenant {tenant!r}; these sessions are of {own!r}")
            return await handler(request)

        return self.with_tenant(own, respond)


def _token(request: web.Request) -> str:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


def _from_here(request: web.Request) -> bool:
    """Whether a program of this machine sent the request, and no proxy passed it on."""
    if any(name in request.headers for name in FORWARDED):
        return False
    try:
        return ipaddress.ip_address(request.remote or "").is_loopback
    except ValueError:
        return False
