"""Mistral: ``[TOOL_CALLS]`` before a JSON array of calls (to v7), or before ``NAME[ARGS]{...}`` for each call (v11 on).

The stop is ``</s>``. Call ids are nine letters or digits; the model writes one in some versions only.
"""

import re
from collections.abc import Iterator

from headrace.rendering.parsers.base import (
    Malformed,
    Span,
    Syntax,
    Types,
    WrittenCall,
    call_of,
    json_closing,
    json_object,
    json_value,
)

_ID = re.compile(r"[A-Za-z0-9]{9}")
_ARRAY = re.compile(r"\s*\[\s*\{")
_NAMED = re.compile(r"\s*+([^\[\{\s]++)\s*+(?:\[CALL_ID\]\s*+([^\[\{]*+))?(?:\[ARGS\])?\s*+(?=\{)")


class Mistral(Syntax):
    """One marker before all calls, or before each."""

    name = "mistral"
    stops = ("</s>",)
    thinking = ("[THINK]", "[/THINK]")
    opening = "[TOOL_CALLS]"
    marks = (opening, "<think>", "</think>")

    def decided(self, text: str) -> int:
        """``<think>`` is content unless it is closed."""
        at = text.find("<think>", text.rfind("</think>") + 1)
        return at if at >= 0 else len(text)

    def wire_id(self, name: str, index: int, written: str = "") -> str:
        """Nine letters or digits."""
        return written if _ID.fullmatch(written) else f"call{index % 100000:05d}"

    def find(self, text: str, types: Types) -> Iterator[Span]:
        """Each marker starts an array or a call."""
        at = 0
        while (start := text.find(self.opening, at)) >= 0:
            behind = start + len(self.opening)
            try:
                calls, at = self._array(text, behind) if _ARRAY.match(text, behind) else self._named(text, behind)
            except Malformed as error:
                following = text.find(self.opening, behind)
                at = len(text) if following < 0 else following
                calls = [WrittenCall(error=str(error))]
            for call in calls:
                yield Span(start, at, call)

    def _array(self, text: str, at: int) -> tuple[list[WrittenCall], int]:
        values, end = json_value(text, at)
        calls = []
        for value in values:
            name, arguments = call_of(value)
            wire_id = value.get("id", "")
            calls.append(WrittenCall(name=name, arguments=arguments, wire_id=wire_id if type(wire_id) is str else ""))
        return calls, end

    def _named(self, text: str, at: int) -> tuple[list[WrittenCall], int]:
        match = _NAMED.match(text, at)
        if match is None:
            raise Malformed("expected NAME[ARGS]{...}")
        arguments, end = json_object(text, match.end())
        return [WrittenCall(name=match.group(1), arguments=arguments, wire_id=(match.group(2) or "").strip())], end

    def closing(self, call: str, types: Types) -> tuple[int, str] | None:
        """See `Syntax.closing`."""
        array = _ARRAY.match(call, len(self.opening))
        start = len(self.opening) if array else call.find("{")
        return json_closing(call, start) if start >= 0 else (len(call), "")

    def _thinking(self, text: str, at: int) -> tuple[int, int, str] | None:
        """``[THINK]``, or ``<think>`` in fine-tuned versions."""
        block, begin = super()._thinking(text, at), text.find("<think>", at)
        if begin < 0 or (block is not None and block[0] < begin) or text.find("</think>", begin) < 0:
            return block
        return begin, begin + len("<think>"), "</think>"
