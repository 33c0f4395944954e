"""Kimi K2: ``<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>{...}<|tool_call_end|>``.

The index counts the calls of the whole conversation; the template answers a call under the id that the model wrote.
"""

import re
from collections.abc import Iterator

from headrace.rendering.parsers.base import (
    Malformed,
    Span,
    Syntax,
    Types,
    WrittenCall,
    after,
    between_tokens,
    json_closing,
    json_object,
)

_ID = re.compile(r"(?:functions\.)?(.+?):(\d+)")


class KimiK2(Syntax):
    """JSON arguments behind an id that carries the name."""

    name = "kimi_k2"
    stops = ("<|im_end|>", "[EOS]")
    begin, arguments, end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    section = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    marks = (begin, *section)

    def wire_id(self, name: str, index: int, written: str = "") -> str:
        """``functions.NAME:INDEX``."""
        match = _ID.fullmatch(written)
        return f"functions.{name}:{match.group(2) if match and match.group(1) == name else index}"

    def find(self, text: str, types: Types) -> Iterator[Span]:
        """Each begin token starts a call."""
        return between_tokens(text, self.begin, self.end, self.section, self._call)

    def _call(self, text: str, at: int) -> tuple[WrittenCall, int]:
        closed = text.find(self.end, at)
        middle = text.find(self.arguments, at, closed if closed >= 0 else len(text))
        if middle < 0:
            raise Malformed("the call has no arguments")
        wire_id = text[at:middle].strip()
        match = _ID.fullmatch(wire_id)
        if match is None:
            raise Malformed("a call's id is functions.NAME:INDEX")
        arguments, end = json_object(text, middle + len(self.arguments))
        end = after(text, end, self.end)
        return WrittenCall(name=match.group(1), arguments=arguments, wire_id=wire_id), end

    def closing(self, call: str, types: Types) -> tuple[int, str] | None:
        """See `Syntax.closing`."""
        start = call.find(self.arguments)
        return json_closing(call, start, self.end) if start >= 0 else (len(call), "")
