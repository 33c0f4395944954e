"""Admits requests to the gateway: by their Host and Origin, the API key with its scope and rate, and the body's type.

One check stands before every handler (`Listener`), also before the answer to an unknown path. The health route alone
needs no key. Nothing of a body is read before the request is admitted, and a body is JSON by its type: a page in a
browser can send other types to any address without asking first, and `application/json` only where it is allowed to.
"""

from collections.abc import Awaitable, Callable

from aiohttp import web

from headrace.gateway.http import HEALTH, TOKEN, Handler, HttpRefused
from headrace.gateway.tenants.keys import ApiKeys
from headrace.gateway.tenants.limits import RateLimit, Rounds
from headrace.messages.product import ApiKey, Scope
from headrace.request_names import RequestNames

Keyed = Callable[[web.Request, ApiKey], Awaitable[web.StreamResponse]]
_KEY = web.RequestKey("key", ApiKey)


def scope_of(route: str) -> Scope:
    """The scope that a route needs. route: its pattern, as ``/v1/agents/{agent}``."""
    if route.endswith(("/feedback", "/reward", "/lines")):
        return "feedback"
    if route.startswith("/v1/users"):
        return "purge"
    return "agents" if route.startswith("/v1/agent") else "turns"


class Admission:
    """The check of every request."""

    def __init__(self, keys: ApiKeys, names: RequestNames | None = None, limits: RateLimit | None = None) -> None:
        """names: of the listener; without them loopback's and this machine's."""
        self._keys, self._names, self._limits = keys, names or RequestNames(), limits or RateLimit()
        self._rounds = Rounds()

    async def admit(self, request: web.Request) -> None:
        """Return, in the tenant's round, for a request that a handler may see. HttpRefused with 400, 401, 403, 415 or
        429."""
        if not request.raw_path.startswith("/"):
            raise HttpRefused(400, "expected a path as the request's target, as in GET /v1/models")
        headers = request.headers
        local = request.get_extra_info("sockname")
        address = local[0].removeprefix("::ffff:") if isinstance(local, tuple) else ""
        if refusal := self._names.refusal(headers.getall("Host", []), headers.getall("Origin", []), address):
            raise HttpRefused(403, refusal)
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else request.path
        if resource is None or route != HEALTH:
            request[_KEY] = self._key(request, route)
        if request.body_exists and not _is_json(headers.getall("Content-Type", [])):
            raise HttpRefused(415, "expected a body with Content-Type: application/json")
        if _KEY in request:
            await self._rounds.enter(request[_KEY].tenant)

    def _key(self, request: web.Request, route: str) -> ApiKey:
        token = _token(request)
        if not token:
            raise HttpRefused(401, "no API key: send `Authorization: Bearer KEY` or `x-api-key: KEY`")
        key = self._keys.find(token)
        if key is None:
            raise HttpRefused(401, "this API key is unknown or revoked")
        wait = self._limits.take(key.id, key.requests_per_minute)
        if wait > 0:
            raise HttpRefused(429, f"more than {key.requests_per_minute} requests a minute with this key", wait)
        check_scope(key, scope_of(route))
        request[TOKEN] = token
        return key


def keyed(handler: Keyed) -> Handler:
    """A handler that gets the key with which its request was admitted."""

    async def respond(request: web.Request) -> web.StreamResponse:
        return await handler(request, key_of(request))

    return respond


def key_of(request: web.Request) -> ApiKey:
    """The key with which a request was admitted. KeyError for one of the health route."""
    return request[_KEY]


def check_scope(key: ApiKey, scope: Scope) -> None:
    """Refuse a key without a scope: HttpRefused with 403."""
    if scope not in key.scopes:
        raise HttpRefused(403, f"this key lacks the scope {scope!r}; it has {', '.join(key.scopes) or 'none'}")


def check_own(own: str, key: ApiKey, scope: Scope) -> None:
    """Check the key of a request about headrace's own agent, whose data belongs to the tenant `own`. HttpRefused with
    403."""
    if key.tenant != own:
        raise HttpRefused(403, f"this key is of the tenant {key.tenant!r}; these sessions are of {own!r}")
    check_scope(key, scope)


def _token(request: web.Request) -> str:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


def _is_json(types: list[str]) -> bool:
    """Whether the values of Content-Type name JSON in UTF-8, once."""
    if len(types) != 1:
        return False
    kind, _, parameters = types[0].lower().partition(";")
    return kind.strip() == "application/json" and parameters.strip() in ("", "charset=utf-8", 'charset="utf-8"')
