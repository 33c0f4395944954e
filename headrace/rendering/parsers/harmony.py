"""Harmony, of gpt-oss: messages with a channel each; a message to ``functions.NAME`` is a call.

``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.NAME
<|constrain|>json<|message|>{...}<|call|>``. The recipient stands behind the channel or behind the role.
"""

import re

from headrace.rendering.parsers.base import (
    MOST_CALLS,
    Completion,
    Malformed,
    Part,
    Syntax,
    Types,
    WrittenCall,
    json_closing,
    json_object,
    skip_space,
)

MOST_MESSAGES = 64
"""Messages of analysis that are read in one turn."""
_END = re.compile(r"<\|(end|call|return)\|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*([a-zA-Z]+)")
_RECIPIENT = re.compile(r"to=([^\s<]+)")


class Harmony(Syntax):
    """One message after another; the channel says what it is."""

    name = "harmony"
    stops = ("<|call|>", "<|return|>", "<|endoftext|>")
    ends = ("<|end|>",)
    marks = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")

    def decided(self, text: str) -> int:
        """A header is read with the message behind it."""
        at = 0
        while (middle := text.find("<|message|>", at)) >= 0:
            end = _END.search(text, middle)
            if end is None:
                return len(text)
            at = end.end()
        return at

    def undecided(self, content: str) -> int:
        """Headers are no content."""
        return len(content)

    def closing(self, call: str, types: Types) -> tuple[int, str] | None:
        """See `Syntax.closing`."""
        start = call.find("{", max(0, call.find("<|message|>")))
        return json_closing(call, start, "<|call|>") if start >= 0 else (len(call), "")

    def completion(self, text: str, types: Types, opened: bool) -> Completion:
        """Analysis is thinking, messages to a function are calls, the rest is content."""
        thinking: list[str] = []
        content: list[str] = []
        calls: list[WrittenCall] = []
        before: list[int] = []
        parts: list[Part] = []
        at = 0
        while at < len(text):
            if len(calls) > MOST_CALLS or len(thinking) > MOST_MESSAGES:
                content.append(text[at:])
                break
            middle = text.find("<|message|>", at)
            if middle < 0:
                head = text[at:].removeprefix("<|start|>")
                if not _RECIPIENT.search(head) and not _CHANNEL.search(head):
                    content.append(head)
                break
            start, head, body = at, text[at:middle], middle + len("<|message|>")
            channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
            if recipient and recipient.group(1) != "assistant":
                call, at = _call(recipient.group(1), text, body)
                calls.append(call)
                before.append(sum(map(len, content)))
                parts.append(Part("call", start, at))
                continue
            message, at = _message(text, body)
            if channel and channel.group(1) == "analysis":
                thinking.append(message)
                parts.append(Part("thinking", start, at))
            else:
                content.append(message)
        return Completion(
            thinking="\n".join(thinking),
            content="".join(content),
            calls=tuple(calls),
            parts=tuple(parts),
            before=tuple(before),
            spans=tuple((part.start, part.end) for part in parts if part.kind == "call"),
        )


def _message(text: str, at: int) -> tuple[str, int]:
    """The message that starts at `at`, and where the next one starts."""
    end = _END.search(text, at)
    return (text[at : end.start()], end.end()) if end else (text[at:], len(text))


def _call(recipient: str, text: str, at: int) -> tuple[WrittenCall, int]:
    """The call whose arguments start at `at`. One without an end marker must be the whole rest of the text."""
    body, behind = _message(text, at)
    try:
        arguments, end = json_object(text, at) if body.strip() else ({}, behind)
        marker = _END.match(text, skip_space(text, end)) if body.strip() else None
        if body.strip() and marker is None and text[end:].strip():
            raise Malformed("the call is not closed")
    except Malformed as error:
        return WrittenCall(error=str(error)), behind
    return WrittenCall(name=recipient.removeprefix("functions."), arguments=arguments), marker.end() if marker else end
