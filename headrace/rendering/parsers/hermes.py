"""Hermes: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, of Hermes 2 and 3, Qwen2.5, Qwen3, SmolLM2."""

from collections.abc import Iterator

from headrace.rendering.parsers.base import (
    Malformed,
    Span,
    Syntax,
    Types,
    WrittenCall,
    after,
    call_of,
    json_closing,
    json_value,
)


class Hermes(Syntax):
    """JSON between tags."""

    name = "hermes"
    stops = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>")
    opening, end = "<tool_call>", "</tool_call>"
    marks = (opening,)

    def find(self, text: str, types: Types) -> Iterator[Span]:
        """Each opening tag starts a call."""
        at = 0
        while (start := text.find(self.opening, at)) >= 0:
            try:
                value, stop = json_value(text, start + len(self.opening))
                at = after(text, stop, self.end)
                name, arguments = call_of(value)
                call = WrittenCall(name=name, arguments=arguments)
            except Malformed as error:
                closed = text.find(self.end, start)
                at = len(text) if closed < 0 else closed + len(self.end)
                call = WrittenCall(error=str(error))
            yield Span(start, at, call)

    def closing(self, call: str, types: Types) -> tuple[int, str] | None:
        """See `Syntax.closing`."""
        return json_closing(call, len(self.opening), self.end)
