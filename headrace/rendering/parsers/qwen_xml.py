"""Qwen XML: ``<tool_call><function=NAME><parameter=KEY>...``, of Qwen3-Coder, Qwen3.5 and Nemotron 3."""

from collections.abc import Iterator

from headrace.rendering.parsers import tagged
from headrace.rendering.parsers.base import Span, Syntax, Types

_TAGS = tagged.tags(
    call=r"<function=(?P<name>[^<>\n]+)>",
    parameter=r"<parameter=(?P<name>[^<>\n]+)>",
    parameter_end=r"</parameter>",
    end=r"</function>",
    section=r"<tool_call>",
    section_end=r"</tool_call>",
    closers=("</parameter>", "</function>"),
    closing="</parameter></function>",
)


class QwenXml(Syntax):
    """Verbatim values between tags."""

    name = "qwen_xml"
    stops = ("<|im_end|>", "<|endoftext|>")
    marks = ("<tool_call>", "<function=", "</tool_call>")

    def find(self, text: str, types: Types) -> Iterator[Span]:
        """``<function=`` starts a call, with or without the tag around it."""
        return tagged.find(text, types, _TAGS, tagged.without_frame_newlines)

    def closing(self, call: str, types: Types) -> tuple[int, str] | None:
        """See `Syntax.closing`."""
        return tagged.closing(call, types, _TAGS)
