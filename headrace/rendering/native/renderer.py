"""The renderer of a checkpoint's own chat format: its template renders, its wire syntax is parsed.

Sampled history is never replaced by, or compared with, the template's rendering of the whole conversation. Only the
text from the last turn's stop on is used, so sampled ids stay unchanged even where the template renders that turn
differently (without its thinking, or with another spelling of its JSON).
"""

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from headrace.messages.rollout import ToolCall
from headrace.rendering.base import Call, Exchange, NoStopToken, Parsed, RendererError
from headrace.rendering.kinds import token_kinds
from headrace.rendering.native.conversation import Conversation, Traits, answered
from headrace.rendering.native.slots import Change, Kind, Slots
from headrace.rendering.native.template import ChatTemplate, Message, TemplateRefused
from headrace.rendering.parsers.base import Completion, Syntax, Types, WrittenCall
from headrace.rendering.tokenizer import Piece, Tokenizer

SUMMARY_REQUEST = """

The context is nearly full. Do not call a tool now. Write down everything that is needed to go on with the task from \
here, then stop."""
SUMMARY_HEAD = "\n\nYour own summary of the work so far:\n"
THOUGHT_FIELDS = ("reasoning_content", "thinking", "reasoning", "content")
"""Fields of a message that templates read thinking from; every template reads the last one."""
_TAIL = 16
"""Ids before a turn in which a prompt's opening of the thinking is looked for."""


class Format(NamedTuple):
    """A checked chat format, independent of the tools."""

    template: ChatTemplate
    syntax: Syntax
    changes: dict[Kind, Change]
    closers: re.Pattern[str]
    """Matches the tokens that end a turn."""
    traits: Traits


class NativeRenderer:
    """Template, tokenizer and syntax of one policy, with the tools of one kind of task."""

    detailed_results = True

    def __init__(
        self,
        tokenizer: Tokenizer,
        conversation: Conversation,
        syntax: Syntax,
        changes: dict[Kind, Change],
        eos_ids: Sequence[int],
        bundle: str = "",
    ) -> None:
        """changes: the template's change of each kind of content. eos_ids: of generation_config.json."""
        self.tokenizer, self.bundle = tokenizer, bundle
        self._conversation, self._syntax, self._changes = conversation, syntax, changes
        self._types = {name: tool.properties for name, tool in conversation.tools.items()}
        tags = tokenizer.tags
        eos = {token for token, id in tags.items() if id in eos_ids}
        self._stops = _either(eos | {stop for stop in syntax.stops if stop in tags})
        self._ends = eos | {end for end in (*syntax.stops, *syntax.ends) if end in tags}
        self._closers = _either(self._ends)
        self.stop_ids: tuple[int, ...] = tuple(sorted({*eos_ids, *self._cuts()}))

    @property
    def parallel(self) -> bool:
        """Whether the template takes several calls in one turn."""
        return self._conversation.traits.parallel

    @property
    def format(self) -> Format:
        """The parts of the format that other conversations share."""
        conversation = self._conversation
        return Format(conversation.template, self._syntax, self._changes, self._closers, conversation.traits)

    def _cuts(self) -> set[int]:
        """Ids that end a turn in this template: after a call, and after plain text."""
        named = [ToolCall(id="0", name=name) for name in list(self._conversation.tools)[:1]]
        turns = [*named, ToolCall(id="0", name="", error="none")]
        ends = {self._after_turn(Slots(), [answered([turn], ["ok"])], "")[0] for turn in turns}
        return {self.tokenizer.tags[end] for end in ends if end not in self._syntax.ends}

    def _after_turn(self, slots: Slots, history: Sequence[Exchange], request: str, task: str = "") -> tuple[str, str]:
        """The token that ends the last turn, and the rendered text from that token on."""
        anchor = f"{slots.nonce}A"
        opening = self._conversation.opening(slots, "")
        messages = [*opening, *self._conversation.history(slots, history, anchor, request)]
        text = self._with_task(slots, messages, task) if task else ""
        if task and not text:
            messages = [*opening, *self._conversation.history(slots, history, anchor, f"{request}\n\n{task}")]
        text = text or self._conversation.render(messages, generation=True)
        _, separator, tail = text.rpartition(anchor)
        end = self._closers.search(tail) if separator else None
        if end is None:
            raise NoStopToken(
                f"the chat template writes none of the stop tokens {', '.join(sorted(self._ends))} after a turn "
                "(eos_token_id of generation_config.json adds to them)"
            )
        return end.group(), tail[end.start() :]

    def _with_task(self, slots: Slots, messages: Sequence[Message], task: str) -> str:
        """The messages and a user's message; empty where the template takes none between results and a turn."""
        content = slots.add("user", task)
        try:
            text = self._conversation.render([*messages, {"role": "user", "content": content}], generation=True)
        except TemplateRefused:
            return ""
        return text if content in text else ""

    def prompt(self, task_prompt: str, summary: Sequence[int] = ()) -> list[int]:
        """The system's and the task's message and the opening of the first turn."""
        slots = Slots()
        if not summary:
            messages = self._conversation.opening(slots, task_prompt)
            return self._encode(slots, self._conversation.render(messages, generation=True))
        mark = f"{slots.nonce}M"
        messages = self._conversation.opening(slots, f"{task_prompt}{SUMMARY_HEAD}{mark}")
        pieces = slots.fill(self._conversation.render(messages, generation=True), self._changes)
        at = max(index for index, (text, _) in enumerate(pieces) if mark in text)
        before, _, behind = pieces[at][0].partition(mark)
        head: list[Piece] = [*pieces[:at], (before, pieces[at][1])]
        rest: list[Piece] = [(behind, pieces[at][1]), *pieces[at + 1 :]]
        encode = self.tokenizer.encode_pieces
        return [*encode(head), *self._without_thinking(summary), *encode(rest)]

    def _without_thinking(self, summary: Sequence[int]) -> list[int]:
        """The plain ids of a summary: as content of a message it may hold no added token."""
        ids = list(summary)
        end = self.tokenizer.tag(self._syntax.thinking[1])
        if end in ids:
            ids = ids[len(ids) - ids[::-1].index(end) :]
        added = set(self.tokenizer.tags.values())
        return [id for id in ids if id not in added]

    def delta(
        self, history: Sequence[Exchange], *, stopped: int | None, summary: bool = False, task: str = ""
    ) -> list[int]:
        """The template's own text from the last turn's stop to the opening of the next turn. A template that refuses a
        user's message behind results gets the task as the end of the last result, as a request for a summary is."""
        slots = Slots()
        end, text = self._after_turn(slots, history, SUMMARY_REQUEST if summary else "", task)
        ids = self._encode(slots, text)
        if ids[0] != self.tokenizer.tag(end):
            raise RendererError(f"the stop token {end!r} is not encoded as one id")
        return ids[1:] if stopped == ids[0] else ids

    def _encode(self, slots: Slots, text: str) -> list[int]:
        return self.tokenizer.encode_pieces(slots.fill(text, self._changes))

    def turn(self, calls: Sequence[Call], thought: str = "", *, before: int = 0) -> list[int]:
        """A turn as the template renders it: it follows the opening with which `prompt` and `delta` end."""
        conversation = self._conversation
        if len(calls) > 1 and not self.parallel:
            raise RendererError("the chat template takes one call per turn")
        for field in THOUGHT_FIELDS:
            slots = Slots()
            messages = [*conversation.opening(slots, ""), *conversation.before(before)]
            opened = conversation.render(messages, generation=True)
            mark = slots.add("thought", thought)
            messages += conversation.written(slots, calls, mark if thought or not calls else "", before, field)
            whole = conversation.render(messages, generation=False)
            ids = self.written(slots, opened, whole, thought, mark)
            if ids:
                return ids
        raise RendererError("the chat template shows no thought of a turn with calls")

    def written(self, slots: Slots, opened: str, whole: str, thought: str = "", mark: str = "") -> list[int]:
        """The ids of a turn, its stop included. opened: a rendering that ends with the turn's opening; whole: one that
        contains the turn. Empty when the turn has a thought that `whole` does not show. mark: the thought's
        placeholder.

        Some templates change earlier messages once a turn follows (Mistral-Nemo leaves out the system text), so the two
        are compared from their last common content on."""
        try:
            ends = slots.behind_last(opened, whole)
        except ValueError:
            raise RendererError("the chat template leaves out a message when a turn follows it") from None
        rest, body = opened[ends[0] :], whole[ends[1] :]
        start = self._common(rest, body)
        body, rest = body[start:], rest[start:]
        end = self._stops.search(body) or self._closers.search(body)
        if end is None:
            raise RendererError("the chat template does not end a turn with a stop token")
        body = body[: end.end()]
        begin, close = self._syntax.thinking
        if begin in rest and close not in rest and not body.lstrip().startswith(close):
            body = f"{slots.add('thought', thought)}\n{close}\n\n{body}"  # the opening begins to think
            return self._encode(slots, body)
        return self._encode(slots, body) if not thought or mark in body else []

    def _common(self, first: str, second: str) -> int:
        """The length of two texts' common start, in whole added tokens and thinking tags."""
        at = next((at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(first))
        at = min(at, len(second))
        if at == len(first):
            return at
        whole = _either({*self.tokenizer.tags, *self._syntax.thinking})
        for text in (first, second):
            for match in whole.finditer(text, max(0, at - 64)):
                if match.start() < at < match.end():
                    at = match.start()
        return at

    def parse(self, ids: Sequence[int], *, prompt: Sequence[int] = ()) -> Parsed:
        """Thinking, text and calls. A call of an unknown tool, or with arguments that its tool does not take, has an
        error."""
        completion = self.read(ids, self._types, prompt=prompt)
        calls = [self._checked(call, str(index)) for index, call in enumerate(completion.calls)]
        if not self.parallel:
            calls[1:] = [_refused(call, "this format takes one call per turn") for call in calls[1:]]
        if not calls:
            names = ", ".join(self._conversation.tools)
            calls = [ToolCall(id="0", name="", error=f"no tool was called; call one of {names}")]
        kinds = token_kinds(self.tokenizer, ids, completion.parts)
        return Parsed(calls=tuple(calls), text=completion.content, thinking=completion.thinking, kinds=kinds)

    def read(self, ids: Sequence[int], types: Types, *, prompt: Sequence[int]) -> Completion:
        """A sampled turn as the syntax reads it. types: the properties of each tool's arguments."""
        ended = bool(ids) and ids[-1] in self.stop_ids
        text = self.tokenizer.decode(ids[:-1] if ended else ids)
        return self._syntax.read(text, types, opened=self.thinks(prompt))

    def thinks(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt opens the thinking of the turn behind it."""
        tail = self.tokenizer.decode(list(prompt)[-_TAIL:]).rstrip()
        return tail.endswith(self._syntax.thinking[0])

    def _checked(self, call: WrittenCall, id: str) -> ToolCall:
        if call.error:
            return ToolCall(id=id, name="", error=f"the call cannot be read: {call.error}")
        arguments = {name: as_text(value) for name, value in call.arguments.items() if value is not None}
        tool = self._conversation.tools.get(call.name)
        if tool is None:
            error = f"no tool {call.name}; there are {', '.join(self._conversation.tools)}"
        else:
            error = tool.complaint(arguments)
        return ToolCall(id=id, name=call.name, arguments=arguments, error=error, wire_id=call.wire_id)


def _refused(call: ToolCall, error: str) -> ToolCall:
    return ToolCall(id=call.id, name=call.name, arguments=call.arguments, error=call.error or error)


def _either(words: set[str]) -> re.Pattern[str]:
    """Matches any of the words, the longest first; nothing when there are none."""
    return re.compile("|".join(re.escape(word) for word in sorted(words, key=len, reverse=True) if word) or r"(?!)")


def as_text(value: Any) -> str:
    """An argument as tools take it: strings as they are, other values as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
