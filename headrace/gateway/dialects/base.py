"""The protocol of a dialect: it reads a request, writes a reply or its stream, and shapes its own errors."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from headrace.errors import HeadraceError
from headrace.gateway.conversation import ModelReply, ModelRequest
from headrace.gateway.dialects.writer import Head, Writer
from headrace.messages.product import ClientTool

Body = Mapping[str, Any]
"""A decoded JSON object."""


class Unusable(HeadraceError):
    """A request cannot be used. The text says what is wrong and what was expected; `field` names the key."""

    def __init__(self, text: str, field: str = "") -> None:
        super().__init__(text)
        self.field = field


class Dialect(Protocol):
    """One HTTP API for which clients exist."""

    path: str
    """The path to which clients post requests."""

    def request(self, body: Body) -> ModelRequest:
        """Read a request by the table of its keys (`keys`). Unusable for a value that headrace does not support."""

    def reply(self, replies: Sequence[ModelReply], request: ModelRequest) -> dict[str, Any]:
        """The whole reply as a JSON object. replies: one for each of `ModelRequest.samples`."""

    def writer(self, request: ModelRequest, head: Head) -> Writer:
        """Makes the server-sent events of a streamed reply."""


def event(data: Mapping[str, Any], name: str = "", id: str = "") -> bytes:
    """One server-sent event."""
    head = f"id: {id}\n" * bool(id) + f"event: {name}\n" * bool(name)
    return f"{head}data: {json.dumps(data, separators=(',', ':'), ensure_ascii=False)}\n\n".encode(errors="replace")


ATTACHMENTS = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "file": "file",
    "input_file": "file",
    "document": "document",
    "input_audio": "audio",
}
"""Types of parts that hold something else than text, and what they hold."""


def placeholder(kind: str) -> str:
    """The text that the model reads instead of an attachment in a history or in a tool's result."""
    return f"[{ATTACHMENTS[kind]} left out: the model reads text]"


def no_attachment(content: object, field: str) -> None:
    """Refuse an attachment to a user's newest message: Unusable. In an older message it becomes a placeholder, so that
    the refusal does not end the session."""
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in ATTACHMENTS:
            raise Unusable(f"{field}: expected text, got {ATTACHMENTS[kind]}; the model reads text", field)


def text_of(value: object, field: str, kinds: tuple[str, ...] = ("text",)) -> str:
    """A message's content as text. It is a string, or a list of parts; an attachment becomes a placeholder.

    kinds: the names that the dialect gives to text parts. Unusable names the first part of another type.
    """
    if value is None:
        return ""
    if isinstance(value, str):
        return plain(value, field)
    if not isinstance(value, list):
        raise Unusable(f"{field}: expected a string or a list of parts, got {type(value).__name__}", field)
    texts: list[str] = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in ATTACHMENTS:
            texts.append(placeholder(kind))
        elif kind in kinds and isinstance(part.get("text"), str):
            texts.append(plain(part["text"], field))
        else:
            raise Unusable(f"{field}: expected parts of type {' or '.join(kinds)}, got {kind!r}", field)
    return "\n".join(texts)


def plain(text: str, field: str) -> str:
    """Text that UTF-8 can encode: JSON strings may hold unpaired surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Unusable(f"{field}: expected text, got an unpaired surrogate", field) from None
    return text


def string(value: object, field: str, default: str = "") -> str:
    """The string value of a key; the default if the key is absent or null."""
    if value is None:
        return default
    if not isinstance(value, str):
        raise Unusable(f"{field}: expected a string, got {type(value).__name__}", field)
    return plain(value, field)


def end_user(body: Body) -> str:
    """The person for whom a client of OpenAI's dialects asks; empty if it names none."""
    return string(body.get("user"), "user") or string(body.get("safety_identifier"), "safety_identifier")


def objects(value: object, field: str) -> list[dict[str, Any]]:
    """The value of a key that is a list of JSON objects; empty if the key is absent or null."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise Unusable(f"{field}: expected a list of objects", field)
    return value


def arguments(value: object, field: str) -> str:
    """A call's arguments as the client sends them back: a JSON object as text, kept unchanged."""
    text = string(value, field, "{}")
    try:
        parsed = json.loads(text or "{}")
    except (ValueError, RecursionError):
        raise Unusable(f"{field}: expected a JSON object as text", field) from None
    if not isinstance(parsed, dict):
        raise Unusable(f"{field}: expected a JSON object as text, got {type(parsed).__name__}", field)
    return text or "{}"


def flag(value: object, field: str, default: bool = False) -> bool:
    """True or false; the default if the key is absent or null."""
    if value is None:
        return default
    if not isinstance(value, bool):
        raise Unusable(f"{field}: expected true or false, got {value!r:.80}", field)
    return value


def whole_number(value: object, field: str, most: int = 1 << 53) -> int | None:
    """An integer of 1 to `most`; None if the key is absent or null."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise Unusable(f"{field}: expected an integer of 1 to {most}, got {value!r:.80}", field)
    return value


def temperature(value: object) -> float:
    """The sampling temperature, from 0 to 2; 1 if the client sends none."""
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 2.0:
        raise Unusable(f"temperature: expected a number from 0 to 2, got {value!r}", "temperature")
    return float(value)


_FORCING = {"any", "required", "tool", "function", "custom"}


def offered(body: Body) -> list[dict[str, Any]]:
    """The entries of `tools`; none if ``tool_choice`` is none."""
    choice = body.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind not in (None, "auto", "none", *_FORCING):
        raise Unusable(f"tool_choice: expected none, auto, any (required) or a tool, got {kind!r:.80}", "tool_choice")
    return objects(body.get("tools"), "tools") if kind != "none" else []


def forced(body: Body, names: Sequence[str], called: Callable[[str], str] = str) -> tuple[str, ...]:
    """The tools of which one must be called; none if a call is not forced. names: of the tools that are offered.
    called: the name of a tool as the policy reads it."""
    choice = body.get("tool_choice")
    one = choice.get("function", choice) if isinstance(choice, dict) else {}
    if (choice if isinstance(choice, str) else choice and choice.get("type")) not in _FORCING:
        return ()
    if choice in ("any", "required") or one.get("type") in ("any", "required"):
        wanted = tuple(names)
    else:
        wanted = tuple(name for name in (called(string(one.get("name"), "tool_choice.name")),) if name in names)
    if not wanted:
        raise Unusable(
            f"tool_choice: expected a tool of `tools`, which has {', '.join(names) or 'none'}", "tool_choice"
        )
    return wanted


def stops(value: object, field: str) -> tuple[str, ...]:
    """Stop sequences: a string or a list of at most 16."""
    given = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(given, list) or len(given) > 16 or not all(isinstance(stop, str) and stop for stop in given):
        raise Unusable(f"{field}: expected a string that is not empty, or a list of at most 16", field)
    return tuple(plain(stop, field) for stop in given)


def answer_schema(value: object, field: str) -> str:
    """The JSON Schema, as JSON, of an answer's format; empty for text."""
    kind = value.get("type") if isinstance(value, dict) else value
    if not isinstance(value, dict) or kind == "text":
        if kind in (None, "text"):
            return ""
        raise Unusable(f"{field}: expected an object", field)
    if kind not in ("json_object", "json_schema"):
        raise Unusable(f"{field}.type: expected text, json_object or json_schema, got {kind!r:.80}", field)
    inner = value.get("json_schema", value)
    given = inner.get("schema") if isinstance(inner, dict) else None
    if kind == "json_schema" and not isinstance(given, dict):
        raise Unusable(f"{field}: expected a JSON Schema object in the key schema", field)
    return json.dumps(schema(given, field) if kind == "json_schema" else {"type": "object"}, ensure_ascii=False)


def logprobs_of(reply: ModelReply) -> list[dict[str, Any]]:
    """The log-probabilities of the text, as OpenAI's dialects have them."""
    return [
        {"token": each.text, "logprob": each.logprob, "bytes": [*each.text.encode()], "top_logprobs": []}
        for each in reply.logprobs
    ]


_CODES = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}


def openai_error(status: int, text: str, field: str = "") -> dict[str, Any]:
    """An error as clients of OpenAI's dialects expect it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": text, "type": kind, "param": field or None, "code": _CODES.get(status)}}


def tool_of(tool: Body, key: str, field: str) -> ClientTool:
    """A tool. key: the key of its JSON Schema."""
    return ClientTool(
        name=string(tool.get("name"), f"{field}.name"),
        description=string(tool.get("description"), f"{field}.description"),
        parameters=schema(tool.get(key), f"{field}.{key}"),
    )


def schema(value: object, field: str) -> dict[str, object]:
    """A tool's JSON Schema; a tool without a schema takes no arguments."""
    if value is None:
        return {"type": "object", "properties": {}}
    if not isinstance(value, dict):
        raise Unusable(f"{field}: expected a JSON Schema object", field)
    try:
        msgspec.msgpack.encode(value)
    except (OverflowError, UnicodeEncodeError, RecursionError) as error:
        raise Unusable(f"{field}: no message can hold it: {error}", field) from None
    return value
