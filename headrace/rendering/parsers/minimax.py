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
)


class MiniMax(Syntax):
    """Verbatim values between tags."""

    name = "minimax"
    stops = ("[e~[",)

    def find(self, text: str, types: Types) -> Iterator[Span]:
        """``<invoke`` starts a call, but only after the section's opening tag."""
        if "<minimax:tool_call>" not in text:
            return iter(())
        return tagged.find(text, types, _TAGS)
