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

SENTENCES = {
    "sandbox_lost": "the machine with the session's sandbox was lost",
    "engine_error": "the inference engine failed",
    "search_lost": "no search actor answered",
    "no_policy": "no engine could serve the session's policy version",
    "tree_too_large": "the workspace is too large to be read",
    "no_environment": "no environment node is running, so there is no sandbox",
    "no_capacity": "no sandbox became free",
    "harness_failed": "the harness did not start",
    "dead_letter": "no rollout actor could handle the request",
    "judge_lost": "the judge was lost",
    "judge_endpoint": "the judge's model did not answer",
    "timed_out": "the session did not end in time",
    "files_lost": "the gateway was restarted and no longer has the session's files",
    "purged": "the user's data was purged",
    "bus_error": "the broker did not accept the request",
    "cancelled": "the user cancelled the session",
}
"""The sentence that a user reads for each reason."""


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
