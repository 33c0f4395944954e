"""Errors in the form that the clients of each route expect."""

from collections.abc import Callable
from typing import Any

from headrace.gateway.dialects.chat import ChatCompletions
from headrace.gateway.dialects.messages import Messages
from headrace.gateway.dialects.responses import Responses

Form = Callable[[int, str, str], dict[str, Any]]
"""(status, text, field of the body or empty) to the JSON object."""
_DIALECTS: dict[str, Form] = {
    "/v1/messages": Messages().error,
    "/v1/responses": Responses().error,
    "/v1/chat": ChatCompletions().error,
    "/v1/models": ChatCompletions().error,
    "/v1/client": ChatCompletions().error,
}
_AGENTS = {
    400: "invalid_request",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    408: "timeout",
    413: "too_large",
    415: "invalid_request",
    429: "rate_limit",
    500: "internal",
    503: "unavailable",
}


def error_of(path: str, status: int, text: str, field: str = "", code: str = "") -> dict[str, Any]:
    """The JSON object of an error. path: of the request. code: of the agents API; empty: by the status."""
    if path.startswith("/v1/agent"):
        return {"error": {"code": code or _AGENTS.get(status, "error"), "message": text}}
    form = next((form for start, form in _DIALECTS.items() if path.startswith(start)), None)
    return form(status, text, field) if form is not None else {"error": text}
