"""Errors in the form that the clients of each route expect."""

from typing import Any

from headrace.gateway.dialects.base import openai_error
from headrace.gateway.dialects.messages import anthropic_error

_OPENAI = ("/v1/chat", "/v1/responses", "/v1/models", "/v1/client")
_AGENTS = {
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    408: "timeout",
    413: "too_large",
    429: "rate_limit",
    503: "unavailable",
}


def error_of(path: str, status: int, text: str, field: str = "", code: str = "") -> dict[str, Any]:
    """The JSON object of an error. path: of the request. code: of the agents API; empty: by the status."""
    if path.startswith("/v1/agent"):
        return {
            "error": {
                "code": code or _AGENTS.get(status, "invalid_request" if status < 500 else "internal"),
                "message": text,
            }
        }
    if path.startswith("/v1/messages"):
        return anthropic_error(status, text)
    return openai_error(status, text, field) if path.startswith(_OPENAI) else {"error": text}
