"""Converts a history to the messages of a chat template, with placeholders for all text from outside.

Calls are answered by tool messages. A turn without any call of a known tool is answered by a user message: every
template takes that, while an answer to a call that was never made is refused by some. Names and ids of calls are the
only sampled text that a template sees, and only where they are those of a known tool.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from headrace.messages.rollout import ToolCall, ToolResult
from headrace.rendering.base import Answered, Call, Exchange
from headrace.rendering.native.slots import Kind
from headrace.rendering.native.template import ChatTemplate, Message
from headrace.rendering.parsers.base import Syntax
from headrace.rendering.schemas import ToolSchema

FILLER = "x"
"""Content of messages whose text is removed."""


class Inserter(Protocol):
    """Inserts a content into a message: as a placeholder, or unchanged."""

    def add(self, kind: Kind, content: str) -> str:
        """The text that the message gets."""


class Traits(msgspec.Struct, frozen=True, kw_only=True):
    """The features that a template supports."""

    system: bool = True
    """It takes a system message; otherwise the system text is put before the task."""
    tools: bool = True
    """It shows the tools that it gets; otherwise their schemas are put into the system text."""
    parallel: bool = True
    """It takes several calls in one turn."""
    objects: bool = True
    """It takes the arguments of a call as an object; otherwise as JSON text, as DeepSeek publishes them."""
    empty: str | None = ""
    """The content of a turn that has calls alone; None where the template asks for that."""


class Conversation:
    """Messages of one format: template, tools, syntax."""

    def __init__(
        self, template: ChatTemplate, syntax: Syntax, tools: Sequence[ToolSchema], system: str, traits: Traits
    ) -> None:
        self.template, self._syntax, self._system = template, syntax, system
        self.traits = traits
        self.tools = {tool.name: tool for tool in tools}
        self._functions = [tool.function() for tool in tools]
        if tools and not traits.tools:
            schemas = "\n".join(json.dumps(function["function"]) for function in self._functions)
            self._system = f"{system}\n\nYou have these tools, each with the JSON Schema of its arguments:\n{schemas}"

    def render(self, messages: Sequence[Message], *, generation: bool) -> str:
        """The template's text. TemplateRefused."""
        return self.template.render(messages, self._functions, generation=generation)

    def opening(self, slots: Inserter, task: str) -> list[Message]:
        """The system's and the user's message."""
        if not self._system:
            return [{"role": "user", "content": slots.add("user", task)}]
        if not self.traits.system:
            return [{"role": "user", "content": slots.add("user", f"{self._system}\n\n{task}")}]
        return [
            {"role": "system", "content": slots.add("system", self._system)},
            {"role": "user", "content": slots.add("user", task)},
        ]

    def history(self, slots: Inserter, history: Sequence[Exchange], anchor: str, request: str = "") -> list[Message]:
        """The turns with their answers. anchor: a word in the last turn's text, before the
        turn's end; request: text after its last result."""
        messages: list[Message] = []
        count = 0
        for exchange in history[:-1]:
            named, _ = self._answers(exchange)
            messages += self._turn(named, FILLER, count)
            messages += self._tool_messages(named, [FILLER] * len(named), count) if named else [_user(FILLER)]
            count += len(named)
        named, loose = self._answers(history[-1])
        messages += self._turn(named, anchor, count)
        if not named:
            return [*messages, _user(slots.add("user", "\n".join(loose) + request))]
        texts = [_text(result) for _, result in named]
        texts[-1] = "\n".join([texts[-1], *loose]) + request
        return messages + self._tool_messages(named, [slots.add("result", text) for text in texts], count)

    def _answers(self, exchange: Exchange) -> tuple[list[tuple[ToolCall, ToolResult]], list[str]]:
        """Calls that a tool message can answer, and the texts of all other results."""
        pairs = list(zip(exchange.calls, exchange.results, strict=True))
        named = [pair for pair in pairs if pair[0].name in self.tools]
        if not self.traits.parallel:
            named = named[:1]
        return named, [_text(result) for call, result in pairs if all(call is not other for other, _ in named)]

    def _turn(self, named: Sequence[tuple[ToolCall, ToolResult]], word: str, count: int) -> list[Message]:
        if not named:
            return [{"role": "assistant", "content": word}]
        calls = [
            self._call(call.name, {self._first_argument(call.name): word}, count + index, call.wire_id)
            for index, (call, _) in enumerate(named)
        ]
        return [{"role": "assistant", "content": self.traits.empty, "tool_calls": calls}]

    def _tool_messages(
        self, named: Sequence[tuple[ToolCall, ToolResult]], texts: Sequence[str], count: int
    ) -> list[Message]:
        return [
            self._tool_message(call.name, text, count + index, call.wire_id)
            for index, ((call, _), text) in enumerate(zip(named, texts, strict=True))
        ]

    def _tool_message(self, name: str, text: str, index: int, written: str = "") -> Message:
        wire_id = self._syntax.wire_id(name, index, written)
        return {"role": "tool", "tool_call_id": wire_id, "name": name, "content": text}

    def _call(self, name: str, arguments: Mapping[str, str], index: int, written: str = "") -> Message:
        given = dict(arguments) if self.traits.objects else json.dumps(arguments, ensure_ascii=False)
        function: dict[str, Any] = {"name": name, "arguments": given}
        return {"id": self._syntax.wire_id(name, index, written), "type": "function", "function": function}

    def _first_argument(self, name: str) -> str:
        return next(iter(self.tools[name].parameters), None) or "x"

    def before(self, calls: int) -> list[Message]:
        """`calls` earlier turns with one call each."""
        name = next(iter(self.tools))
        messages: list[Message] = []
        for index in range(calls):
            messages.append(
                {
                    "role": "assistant",
                    "content": self.traits.empty,
                    "tool_calls": [self._call(name, {self._first_argument(name): FILLER}, index)],
                }
            )
            messages.append(self._tool_message(name, FILLER, index))
        return messages

    def written(self, slots: Inserter, calls: Sequence[Call], mark: str, before: int, field: str) -> list[Message]:
        """A turn as a message, and an answer to it. mark: what stands for its thought or its text. field: the message's
        field for the thought of a turn with calls."""
        if not calls:
            return [{"role": "assistant", "content": mark}, _user(FILLER)]
        turn: Message = {"role": "assistant", "content": self.traits.empty}
        if mark:
            turn[field] = mark
        turn["tool_calls"] = [
            self._call(name, {key: slots.add("argument", value) for key, value in arguments.items()}, before + index)
            for index, (name, arguments) in enumerate(calls)
        ]
        answers = [self._tool_message(name, FILLER, before + index) for index, (name, _) in enumerate(calls)]
        return [turn, *answers]


def answered(calls: Sequence[ToolCall], outputs: Sequence[str]) -> Answered:
    """A turn whose calls succeeded, with these results."""
    pairs = zip(calls, outputs, strict=True)
    results = tuple(ToolResult(call_id=call.id, ok=True, output=output) for call, output in pairs)
    return Answered(calls=tuple(calls), results=results)


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _text(result: ToolResult) -> str:
    return result.output if result.ok else f"error: {result.output}"
