"""Conversations of agents that run their own tools, in a policy's own chat format.

The rules are those of headrace's own episodes: text from a client is encoded once, sampled ids are never encoded again,
and no text from outside becomes an added token. A segment is `start`, then turn by turn the sampled ids and a `delta`.
Tool names and schemas stand in the template's own text, so tools that spell an added token are refused.
"""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.errors import HeadraceError
from headrace.messages.product import ClientCall, ClientMessage, ClientTool, results_in_order
from headrace.messages.rollout import TokenKinds
from headrace.rendering.base import RendererError
from headrace.rendering.kinds import places, token_kinds
from headrace.rendering.native.conversation import FILLER
from headrace.rendering.native.live import LiveTurn
from headrace.rendering.native.renderer import THOUGHT_FIELDS, NativeRenderer
from headrace.rendering.native.slots import Kind, Slots
from headrace.rendering.native.template import Message, TemplateRefused
from headrace.rendering.parsers.base import Completion, WrittenCall

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


class UnusableConversation(HeadraceError):
    """The policy's format cannot render this conversation; the text is for the client."""


class ClientRenderer:
    """One policy's format with the tools of one client."""

    def __init__(self, renderer: NativeRenderer, tools: Sequence[ClientTool]) -> None:
        """UnusableConversation when a prompt cannot contain the tools."""
        self._renderer, self._format = renderer, renderer.format
        self._functions = [_function(tool) for tool in tools]
        self._types = {tool.name: _properties(tool) for tool in tools}
        if tools and not self._format.traits.tools:
            raise UnusableConversation("the chat template of this policy shows no tools of a client")
        for tool, function in zip(tools, self._functions, strict=True):
            self._refuse_added(json.dumps(function, ensure_ascii=False), f"the tool {tool.name!r}")

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Sampling ends at any of these ids."""
        return self._renderer.stop_ids

    def start(self, messages: Sequence[ClientMessage]) -> list[int]:
        """The whole prompt up to the opening of the next turn. UnusableConversation."""
        slots = Slots()
        return self._encode(slots, self._render(self._messages(slots, messages)))

    def delta(self, messages: Sequence[ClientMessage], known: int, *, stopped: int | None) -> list[int]:
        """The end of the sampled turn ``messages[known - 1]``, the messages after it, and the next opening.

        stopped: the stop id that ended the turn, None when it was cut at its token limit. UnusableConversation.
        """
        slots = Slots()
        anchor = f"{slots.nonce}A"
        _, separator, tail = self._render(self._messages(slots, messages, known, anchor)).rpartition(anchor)
        end = self._format.closers.search(tail) if separator else None
        if end is None:
            raise UnusableConversation("the chat template of this policy writes no end of a turn with these messages")
        ids = self._encode(slots, tail[end.start() :])
        return ids[1:] if stopped is not None and ids[:1] == [stopped] else ids

    def turn(self, messages: Sequence[ClientMessage], thinking: str = "") -> list[int]:
        """The ids of the last message, an assistant's, as the policy writes it. They follow the opening with which
        `start` and `delta` end, and the stop id is the last. thinking: what the assistant thought before it.
        UnusableConversation."""
        if len(messages[-1].calls) > 1 and not self._format.traits.parallel:
            raise UnusableConversation("the chat template of this policy takes one call per turn")
        plain = self._turn_ids(messages)
        if not thinking:
            return plain
        stop = next(tag for tag, id in self._renderer.tokenizer.tags.items() if id == plain[-1])
        # Templates differ in the field, and some leave out the thinking of a turn that a user's message follows.
        for field, end in itertools.product(THOUGHT_FIELDS[:-1], ("", stop)):
            if ids := self._turn_ids(messages, field, thinking, end):
                return ids
        raise UnusableConversation("the chat template of this policy shows no thinking of this turn")

    def _turn_ids(
        self, messages: Sequence[ClientMessage], field: str = "", thinking: str = "", end: str = ""
    ) -> list[int]:
        """The ids of the last message. Empty when it has thinking that the template does not show. field: of the
        template's message, for the thinking. end: the stop token, which makes another message behind it needless."""
        slots = Slots()
        written = self._messages(slots, messages)
        mark = slots.add("thought", thinking) if thinking else ""
        if thinking:
            written[-1][field] = mark
        # Templates that end a turn with the opening of the next one need a message behind it.
        behind: list[Message] = [{"role": "user", "content": FILLER}]
        if calls := written[-1].get("tool_calls"):
            behind = [
                {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": FILLER}
                for call in calls
            ]
        opened = self._render(written[:-1])
        whole = self._render([*written, *([] if end else behind)], generation=False) + end
        try:
            return self._renderer.written(slots, opened, whole, thinking, mark)
        except RendererError as error:
            raise UnusableConversation(str(error)) from None

    def forced(self, messages: Sequence[ClientMessage], tools: Sequence[str]) -> list[int]:
        """The ids with which every turn behind these messages begins that calls one of the tools; without tools, that
        does not think. UnusableConversation."""

        def written(name: str, word: str) -> list[int]:
            arguments = json.dumps({word: word} if word == "a" else {})
            calls = (ClientCall(id="0", name=name, arguments=arguments),) if name else ()
            return self.turn((*messages, ClientMessage(role="assistant", text="" if name else word, calls=calls)))

        turns = [written(name, word) for name in tools or ("",) for word in ("a", "Q")]
        begin = [ids[0] for ids in itertools.takewhile(lambda ids: len(set(ids)) == 1, zip(*turns, strict=False))]
        if tools and not begin:
            raise UnusableConversation("the format of this policy cannot begin a call, so none can be forced")
        return begin

    def parse(self, ids: Sequence[int], *, prompt: Sequence[int]) -> Completion:
        """Thinking, text and calls of a turn. prompt: the ids before it.

        A call whose name is not allowed in a prompt has its `error` set, because the client would send it back.
        """
        read = self._renderer.read(ids, self._types, prompt=prompt)
        return msgspec.structs.replace(read, calls=tuple(map(_usable, read.calls)))

    def thinks(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt opens the thinking of the turn behind it."""
        return self._renderer.thinks(prompt)

    def live(self, prompt: Sequence[int]) -> LiveTurn:
        """Reads a turn while it is sampled. prompt: the ids before it."""
        renderer = self._renderer
        opened = renderer.thinks(prompt)
        return LiveTurn(renderer.tokenizer, self._format.syntax, self._types, self.stop_ids, opened, _usable)

    def kinds(self, ids: Sequence[int], parsed: Completion, forced: int = 0) -> TokenKinds:
        """The sampled tokens of a turn by kind. parsed: as `parse` gave it for `ids`. forced: the first ids that were
        not sampled."""
        return token_kinds(self._renderer.tokenizer, ids, parsed.parts, forced)

    def words(self, ids: Sequence[int], parsed: Completion) -> list[tuple[int, str]]:
        """The places and texts of the ids outside of thinking and calls, without the stop. parsed: as in `kinds`."""
        tokenizer = self._renderer.tokenizer
        other = {at for _, first, last in places(tokenizer, ids, parsed.parts) for at in range(first, last)}
        other |= {len(ids) - 1} if ids and ids[-1] in self.stop_ids else set()
        return [(at, tokenizer.decode([id])) for at, id in enumerate(ids) if at not in other]

    def _render(self, messages: Sequence[Message], *, generation: bool = True) -> str:
        try:
            return self._format.template.render(messages, self._functions, generation=generation)
        except TemplateRefused as error:
            raise UnusableConversation(f"the chat template of this policy refuses these messages: {error}") from None

    def _encode(self, slots: Slots, text: str) -> list[int]:
        return self._renderer.tokenizer.encode_pieces(slots.fill(text, self._format.changes))

    def _messages(
        self, slots: Slots, messages: Sequence[ClientMessage], known: int = 0, anchor: str = ""
    ) -> list[Message]:
        """The conversation as the template takes it, results in the order of their calls. The text of the first `known`
        messages is removed, and the last of them ends in the anchor."""
        written: list[Message] = []
        calls: dict[str, tuple[str, int]] = {}
        system = "\n\n".join(message.text for message in _head(messages))
        if system:
            text = FILLER if known else slots.add("system" if self._format.traits.system else "user", system)
            written.append({"role": "system" if self._format.traits.system else "user", "content": text})
        for index, message in enumerate(results_in_order(messages)):
            if index < len(_head(messages)):
                continue
            shown = index >= known

            def text_of(kind: Kind, content: str, shown: bool = shown) -> str:
                return slots.add(kind, content) if shown else FILLER

            if message.role == "assistant":
                if len(message.calls) > 1 and not self._format.traits.parallel:
                    raise UnusableConversation(
                        f"message {index} makes {len(message.calls)} calls, and the chat template shows one a turn"
                    )
                written.append(self._turn(message, len(calls), text_of, anchor if index == known - 1 else ""))
                calls |= {call.id: (call.name, len(calls) + at) for at, call in enumerate(message.calls)}
            elif message.role == "tool":
                name, number = calls.get(message.call_id, ("", 0))
                if not name:
                    raise UnusableConversation(f"message {index} answers a call that no message makes")
                wire_id = self._format.syntax.wire_id(name, number)
                content = text_of("result", message.text)
                written.append({"role": "tool", "tool_call_id": wire_id, "name": name, "content": content})
            else:  # Templates accept a system message only at the start; later ones become user messages.
                written.append({"role": "user", "content": text_of("user", message.text)})
        return written

    def _turn(self, message: ClientMessage, count: int, text_of: Any, anchor: str) -> Message:
        """An assistant's message. count: calls before it. anchor: the text that replaces its last text."""
        if not message.calls:
            return {"role": "assistant", "content": anchor or text_of("thought", message.text)}
        calls: list[Message] = []
        for at, call in enumerate(message.calls):
            wire_id = self._format.syntax.wire_id(call.name, count + at)
            arguments = {"x": anchor} if anchor else self._arguments(call, text_of)
            given = arguments if self._format.traits.objects else json.dumps(arguments, ensure_ascii=False)
            function = {"name": self._checked(call.name), "arguments": given}
            calls.append({"id": wire_id, "type": "function", "function": function})
        content = self._format.traits.empty if anchor or not message.text else text_of("thought", message.text)
        return {"role": "assistant", "content": content, "tool_calls": calls}

    def _arguments(self, call: ClientCall, text_of: Any) -> dict[str, Any]:
        """A call's arguments: every text as a placeholder. Where the template writes texts without quotes (XML), a list
        or an object is one placeholder of its JSON."""
        quoted = self._format.changes["argument"]('"') != '"'

        def placed(value: Any) -> Any:
            if isinstance(value, str):
                return text_of("argument", value)
            if isinstance(value, dict | list) and not quoted:
                return text_of("argument", json.dumps(value, ensure_ascii=False))
            if isinstance(value, dict):
                return {text_of("argument", key): placed(inner) for key, inner in value.items()}
            return [placed(inner) for inner in value] if isinstance(value, list) else value

        arguments: Mapping[str, Any] = json.loads(call.arguments)
        return {self._checked(key): placed(value) for key, value in arguments.items()}

    def _checked(self, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise UnusableConversation(_unusable(name))
        return name

    def _refuse_added(self, text: str, place: str) -> None:
        """Check text that becomes part of the prompt's format: UnusableConversation when it spells an added token."""
        token = next((token for token in self._renderer.tokenizer.tags if token and token in text), None)
        if token is not None:
            raise UnusableConversation(f"{place} contains {token!r}, which is a control token of this policy")


def _unusable(name: str) -> str:
    return f"the name {name!r} is not made of letters, digits, '_', '-', '.', ':' and '/'"


def _usable(call: WrittenCall) -> WrittenCall:
    wrong = next((name for name in (call.name, *call.arguments) if not _NAME.fullmatch(name)), None)
    return call if call.error or wrong is None else msgspec.structs.replace(call, error=_unusable(wrong))


def _head(messages: Sequence[ClientMessage]) -> Sequence[ClientMessage]:
    """The system messages at the beginning."""
    count = next((index for index, message in enumerate(messages) if message.role != "system"), len(messages))
    return messages[:count]


def _function(tool: ClientTool) -> dict[str, Any]:
    if not _NAME.fullmatch(tool.name):
        raise UnusableConversation(f"the tool name {tool.name!r} is not made of letters, digits, '_', '-' and '.'")
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _properties(tool: ClientTool) -> dict[str, Any]:
    properties = tool.parameters.get("properties")
    return properties if isinstance(properties, dict) else {}
