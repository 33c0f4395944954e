"""MiniMax: ``<minimax:tool_call><invoke name="..."><parameter name="...">...``, of MiniMax-M2."""

from collections.abc import Iterator

from headrace.rendering.parsers import tagged
from headrace.rendering.parsers.base import Span, Syntax, Types

_TAGS = tagged.tags(
    call=r"<invoke name=\"?(?P<name>[^\"<>\n]+)\"?>",
    parameter=r"<parameter name=\"?(?P<name>[^\"<>\n]+)\"?>",
    parameter_end=r"</parameter>",
    end=r"</invoke>",
    section=r"<minimax:tool_call>",
    section_end=r"</minimax:tool_call>",
    closers=("</parameter>", "</invoke>"),
    closing="</parameter></invoke>",
)


class MiniMax(Syntax):
    """Verbatim values between tags."""

    name = "minimax"
    stops = ("[e~[",)
    marks = ("<minimax:tool_call>", "<invoke", "</minimax:tool_call>")

    def find(self, text: str, types: Types) -> Iterator[Span]:
        """``<invoke`` starts a call, but only after the section's opening tag."""
        begin = text.find("<minimax:tool_call>")
        if begin >= 0:
            for start, end, call in tagged.find(text[begin:], types, _TAGS):
                yield Span(begin + start, begin + end, call)

    def closing(self, call: str, types: Types) -> tuple[int, str] | None:
        """See `Syntax.closing`."""
        return tagged.closing(call, types, _TAGS)
