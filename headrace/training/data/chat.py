"""JSONL of conversations: OpenAI's `messages` and `tools`, in the policy's own chat format.

The ids are those of a conversation in reinforcement learning: prompt, then turn by turn the turn and the text behind
it, where earlier turns stay as they were written even if the template would render them differently. Assistants' turns
are the targets; a message with `"weight": 0` is only shown. An assistant's `reasoning_content` is its thinking: a
target as well, which stays in the text behind it, as sampled thinking does. A field without a meaning here is refused,
such as the older `function_call`: it would change in silence what is learned.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from headrace.messages.product import ClientCall, ClientMessage, ClientTool
from headrace.rendering.native.client import ClientRenderer, UnusableConversation
from headrace.rendering.native.renderer import NativeRenderer
from headrace.training.data.base import Document, Lines


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class _Function(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: str | dict[str, object]


class _Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    function: _Function
    id: str = ""
    type: Literal["function"] = "function"
    index: int = 0


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = ""
    name: str | None = None
    """Of the tool; the call says it too."""
    weight: Annotated[float, Meta(ge=0.0, le=1.0)] = 1.0
    reasoning_content: str | None = None


class _ToolFunction(ClientTool, frozen=True, kw_only=True, forbid_unknown_fields=True):
    strict: bool | None = None
    """Of no effect: the target is the call that stands there."""


class _Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    function: _ToolFunction
    type: Literal["function"] = "function"


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    messages: list[_Message]
    tools: list[_Tool] = []


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation as the renderer takes it."""

    messages: tuple[ClientMessage, ...]
    tools: tuple[ClientTool, ...]
    weights: tuple[float, ...]
    """Loss weight of each message: 0 for all but an assistant's."""
    thinking: tuple[str, ...]
    """The thinking of each message: empty for all but an assistant's."""


class ChatReader(Lines):
    """Reads conversations. renderer: of the policy, with any tools."""

    def __init__(self, renderer: NativeRenderer) -> None:
        self._renderer = renderer
        self._decoder = msgspec.json.Decoder(_Line)

    def check(self, record: bytes, path: Path) -> None:
        """Fields, roles and calls are right; the template is not asked."""
        _conversation(self._decoder.decode(record))

    def encode(self, record: bytes, path: Path) -> Document:
        """Prompt, turns and the messages between them."""
        conversation = _conversation(self._decoder.decode(record))
        try:
            return rendered(ClientRenderer(self._renderer, conversation.tools), conversation)
        except UnusableConversation as error:
            raise ValueError(f"expected a conversation that the policy's format takes: {error}") from None


def rendered(client: ClientRenderer, conversation: Conversation) -> Document:
    """The ids of a conversation up to its last assistant's turn. UnusableConversation."""
    messages = conversation.messages
    ids: list[int] = []
    weights: list[float] = []
    shown_before = 0
    for index, message in enumerate(messages):
        if message.role != "assistant":
            continue
        before = messages[:index]
        shown = client.delta(before, shown_before, stopped=ids[-1]) if shown_before else client.start(before)
        written = client.turn(messages[: index + 1], conversation.thinking[index])
        ids += [*shown, *written]
        weights += [0.0] * len(shown) + [conversation.weights[index]] * len(written)
        shown_before = index + 1
    return Document(ids=ids, weights=weights)


def _conversation(line: _Line) -> Conversation:
    """ValueError names the message that is not right."""
    messages: list[ClientMessage] = []
    open_calls: list[str] = []
    for index, message in enumerate(line.messages):
        where = f"at messages[{index}]"
        calls = _calls(message, index, where)
        call_id = message.tool_call_id or ""
        if message.role == "tool":
            if not open_calls:
                raise ValueError(f"expected a call before a tool's message, got none {where}")
            call_id = call_id or open_calls[0]
            if call_id not in open_calls:
                raise ValueError(f"expected tool_call_id {' or '.join(open_calls)}, got {call_id!r} {where}")
            open_calls.remove(call_id)
        elif open_calls:
            raise ValueError(f"expected a tool's message for the call {open_calls[0]}, got {message.role} {where}")
        if message.role == "assistant" and messages and messages[-1].role == "assistant":
            raise ValueError(f"expected a user's or a tool's message between two of an assistant, got none {where}")
        if message.role == "assistant" and all(earlier.role == "system" for earlier in messages):
            raise ValueError(f"expected a user's message before an assistant's, got none {where}")
        if message.reasoning_content and message.role != "assistant":
            raise ValueError(f"expected reasoning_content of an assistant alone, got that of {message.role} {where}")
        open_calls += [call.id for call in calls]
        role = "system" if message.role == "developer" else message.role
        messages.append(ClientMessage(role=role, text=_text(message.content), calls=calls, call_id=call_id))
    if not any(message.role == "assistant" for message in messages):
        raise ValueError("expected at least one message of an assistant, got none")
    taught = [message.weight if message.role == "assistant" else 0.0 for message in line.messages]
    tools = tuple(tool.function for tool in line.tools)
    thinking = tuple((message.reasoning_content or "").strip() for message in line.messages)
    return Conversation(messages=tuple(messages), tools=tools, weights=tuple(taught), thinking=thinking)


def _calls(message: _Message, index: int, where: str) -> tuple[ClientCall, ...]:
    calls: list[ClientCall] = []
    for at, call in enumerate(message.tool_calls or ()):
        if message.role != "assistant":
            raise ValueError(f"expected tool_calls of an assistant alone, got those of {message.role} {where}")
        arguments = call.function.arguments
        text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
        try:
            msgspec.json.decode(text, type=dict[str, object])
        except msgspec.DecodeError:
            raise ValueError(f"expected arguments that are a JSON object, got {text[:60]!r} {where}") from None
        calls.append(ClientCall(id=call.id or f"{index}.{at}", name=call.function.name, arguments=text))
    return tuple(calls)


def _text(content: str | Sequence[_Part] | None) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.text for part in content or ())
