"""Hermes: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, of Hermes 2 and 3, Qwen2.5, Qwen3, SmolLM2."""

from collections.abc import Iterator

from headrace.rendering.parsers.base import Malformed, Span, Syntax, Types, WrittenCall, after, call_of, json_value


class Hermes(Syntax):
    """JSON between tags."""

    name = "hermes"
    stops = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>")
    opening, closing = "<tool_call>", "</tool_call>"

    def find(self, text: str, types: Types) -> Iterator[Span]:
        """Each opening tag starts a call."""
        at = 0
        while (start := text.find(self.opening, at)) >= 0:
            try:
                value, end = json_value(text, start + len(self.opening))
                at = after(text, end, self.closing)
                name, arguments = call_of(value)
                call = WrittenCall(name=name, arguments=arguments)
            except Malformed as error:
                closed = text.find(self.closing, start)
                at = len(text) if closed < 0 else closed + len(self.closing)
                call = WrittenCall(error=str(error))
            yield Span(start, at, call)
