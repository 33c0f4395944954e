"""A client's request and its reply, independent of the dialect.

Every dialect (`dialects/`) reads its requests into a `ModelRequest` and writes a `ModelReply` in its own form. The
client's agent runs its own tools: a reply names the calls, and the next request brings their results.
"""

import msgspec

from headrace.messages.product import ClientMessage, ClientTool, ClientTurnDone, TurnPlace


class Origin(msgspec.Struct, frozen=True):
    """How a client of the responses dialect names a tool."""

    name: str
    namespace: str = ""
    custom: bool = False
    """Whether a call's argument is a text instead of a JSON object."""


class ModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One turn that a client asks for."""

    model: str
    messages: tuple[ClientMessage, ...]
    tools: tuple[ClientTool, ...] = ()
    max_tokens: int | None = None
    """None: the server's limit."""
    temperature: float = 1.0
    stream: bool = False
    include_usage: bool = False
    """Chat completions: a last chunk with the usage."""
    user: str = ""
    parallel: bool = True
    """False: the answer may have one call."""
    origins: dict[str, Origin] = {}
    """By the tool's name: what the dialect has to know when it writes a call. A tool that is absent is an ordinary
    one."""
    forced: tuple[str, ...] = ()
    """The answer calls one of these tools; empty: it may call any."""
    stops: tuple[str, ...] = ()
    answer: str = ""
    """A JSON Schema, as JSON, that the answer's text keeps."""
    logprobs: bool = False
    tokens: bool = False
    """The answer has the turn's token ids, with their log-probabilities, versions and routes."""
    samples: int = 1
    """Turns to sample side by side; `sample` counts them."""
    sample: int = 0
    previous: TurnPlace | None = None
    """The turn that the request goes on behind: `messages` are the new ones."""
    recalled: dict[int, tuple[TurnPlace, frozenset[str]]] = {}
    """Messages that the request names by the ids of items: their turn, and the items by their endings. The message has
    its place in `messages`."""
    left_out: tuple[str, ...] = ()
    """Keys of the request that nothing honours."""


def reply_id(session: str, turn: int) -> str:
    """The id of a reply, without the dialect's prefix: it names the place of the recorded turn."""
    return f"{session.replace('.', '_')}_{turn}"


class ModelReply(ClientTurnDone, frozen=True, kw_only=True):
    """One turn of the model."""

    id: str
    model: str
    created: int
    """Seconds since the epoch."""
    session: str
    """The id under which the session can be named, rated and closed."""
    turn: int = 0
    """The index of the turn in the session's record."""
