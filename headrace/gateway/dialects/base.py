"""The protocol of a dialect: it reads a request, writes a reply or its stream, and shapes its own errors."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from headrace.errors import HeadraceError
from headrace.gateway.conversation import ModelReply, ModelRequest
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
        """Read a request. Unknown keys are ignored; Unusable for a value that headrace does not support."""

    def reply(self, reply: ModelReply) -> dict[str, Any]:
        """The whole reply as a JSON object."""

    def events(self, reply: ModelReply, request: ModelRequest) -> Iterator[bytes]:
        """The reply as server-sent events, ready to be written."""

    def error(self, status: int, text: str, field: str = "") -> dict[str, Any]:
        """An error as the dialect's clients expect it."""


def event(data: Mapping[str, Any], name: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, separators=(',', ':'), ensure_ascii=False)}\n\n".encode()


def text_of(value: object, field: str, kinds: tuple[str, ...] = ("text",)) -> str:
    """A message's content as text. It is a string, or a list that contains text parts only.

    kinds: the names that the dialect gives to text parts. Unusable names the first part of another type.
    """
    if value is None:
        return ""
    if isinstance(value, str):
        return _plain(value, field)
    if not isinstance(value, list):
        raise Unusable(f"{field}: expected a string or a list of parts, got {type(value).__name__}", field)
    texts: list[str] = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds or not isinstance(part.get("text"), str):
            raise Unusable(f"{field}: expected parts of type {' or '.join(kinds)}, got {kind!r}", field)
        texts.append(_plain(part["text"], field))
    return "\n".join(texts)


def _plain(text: str, field: str) -> str:
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
    return _plain(value, field)


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


def whole_number(value: object, field: str) -> int | None:
    """An integer of at least 1; None if the key is absent or null."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise Unusable(f"{field}: expected an integer >= 1, got {value!r}", field)
    return value


def temperature(value: object) -> float:
    """The sampling temperature, from 0 to 2; 1 if the client sends none."""
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 2.0:
        raise Unusable(f"temperature: expected a number from 0 to 2, got {value!r}", "temperature")
    return float(value)


def offered_tools(body: Body, kind: str, key: str, default_kind: str = "", inside: str = "") -> tuple[ClientTool, ...]:
    """The tools that a request offers; none if ``tool_choice`` is none. A client cannot force a call.

    kind: the dialect's type name for a tool that the client runs. key: the key of a tool's JSON Schema. default_kind:
    the type of an entry that names no type. inside: the key of the nested object with name, description and schema;
    empty if these stand in the entry itself. An entry of another type is refused if `inside` is given. Otherwise it is
    left out, because it is a tool that only the vendor's servers run.
    """
    choice = body.get("tool_choice")
    choice = choice.get("type") if isinstance(choice, dict) else choice
    if choice not in (None, "auto", "none"):
        raise Unusable("tool_choice: expected 'auto' or 'none'; a call cannot be forced", "tool_choice")
    tools: list[ClientTool] = []
    for index, entry in enumerate(objects(body.get("tools"), "tools") if choice != "none" else ()):
        field = f"tools[{index}]"
        tool: Any = entry.get(inside) if inside else entry
        if entry.get("type", default_kind) != kind or not isinstance(tool, dict):
            if inside:
                raise Unusable(f"{field}: expected a tool of type {kind!r}", "tools")
            continue
        field = f"{field}.{inside}" if inside else field
        tools.append(
            ClientTool(
                name=string(tool.get("name"), f"{field}.name"),
                description=string(tool.get("description"), f"{field}.description"),
                parameters=schema(tool.get(key), f"{field}.{key}"),
            )
        )
    return tuple(tools)


def schema(value: object, field: str) -> dict[str, object]:
    """A tool's JSON Schema; a tool without a schema takes no arguments."""
    if value is None:
        return {"type": "object", "properties": {}}
    if not isinstance(value, dict):
        raise Unusable(f"{field}: expected a JSON Schema object", field)
    return value
