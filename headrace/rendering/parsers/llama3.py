"""Llama 3: the whole turn is ``{"name": ..., "parameters": {...}}``, with ``<|python_tag|>`` before it or not.

Plain JSON has no marker, so a text counts as a call only if it starts with an object that names one of the tools.
"""

from collections.abc import Iterator

from headrace.rendering.parsers.base import (
    Malformed,
    Span,
    Syntax,
    Types,
    WrittenCall,
    call_of,
    json_closing,
    json_value,
)


class Llama3(Syntax):
    """Bare JSON; several objects are separated by semicolons."""

    name = "llama3"
    stops = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
    tag = "<|python_tag|>"
    marks = (tag,)

    def find(self, text: str, types: Types) -> Iterator[Span]:
        """Objects from the tag on, or from the start of the text."""
        tag = -1 if text.lstrip().startswith("{") else text.find(self.tag)
        start, at = (tag, tag + len(self.tag)) if tag >= 0 else (0, 0)
        while (at := _skip_separators(text, at)) < len(text) and text[at] == "{":
            try:
                value, end = json_value(text, at)
                if not (isinstance(value, dict) and ("parameters" in value or "arguments" in value)):
                    return
                if isinstance(value.get("name"), str) and value["name"] not in types:
                    return
                name, arguments = call_of(value)
                call = WrittenCall(name=name, arguments=arguments)
            except Malformed as error:
                end, call = len(text), WrittenCall(error=str(error))
            yield Span(start, end, call)
            start = at = end

    def closing(self, call: str, types: Types) -> tuple[int, str] | None:
        """See `Syntax.closing`."""
        return json_closing(call, max(0, call.find("{")))


def _skip_separators(text: str, at: int) -> int:
    while at < len(text) and (text[at].isspace() or text[at] == ";"):
        at += 1
    return at
