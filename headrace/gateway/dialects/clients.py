"""The headers in which client programs name their own session; docs/clients.md has also those that name none.

Such a name is a tree of sessions of its API key and user: a program and its sub-agents send the same one. Other values
that programs send (`prompt_cache_key`, metadata) are hints for caches, which unrelated conversations may share.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Client(NamedTuple):
    """A client program."""

    name: str
    version: str
    """The newest that was tried."""
    headers: tuple[str, ...]


CLIENTS = (
    Client("Claude Code", "2.1.332", ("x-claude-code-session-id",)),
    Client("Codex", "0.171.0", ("session-id", "session_id", "conversation_id")),
    Client("OpenCode", "1.18.33", ("x-session-affinity", "x-opencode-session", "x-session-id")),
    Client("LiteLLM", "1.106.2", ("x-litellm-session-id",)),
)


def session_name(headers: Mapping[str, str]) -> str:
    """The session as a client's own header names it; empty without one."""
    return next((headers[name] for client in CLIENTS for name in client.headers if headers.get(name)), "")
