"""GLM: ``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>``, of GLM 4.5 to 5.

The stop token is the opener of the next role: ``<|observation|>`` before results, ``<|user|>`` before a user.
"""

from collections.abc import Iterator

from headrace.rendering.parsers import tagged
from headrace.rendering.parsers.base import Span, Syntax, Types

_TAGS = tagged.tags(
    call=r"<tool_call>\s*(?P<name>[^\s<]+)\s*",
    parameter=r"<arg_key>(?P<name>[^<]*)</arg_key>\s*<arg_value>",
    parameter_end=r"</arg_value>",
    end=r"</tool_call>",
    closers=("</arg_value>", "</tool_call>"),
    closing="</arg_value></tool_call>",
)


class Glm(Syntax):
    """Key and value tags in turn."""

    name = "glm"
    stops = ("<|observation|>", "<|user|>", "<|endoftext|>")
    marks = ("<tool_call>",)

    def find(self, text: str, types: Types) -> Iterator[Span]:
        """Each ``<tool_call>`` with a name starts a call."""
        return tagged.find(text, types, _TAGS)

    def closing(self, call: str, types: Types) -> tuple[int, str] | None:
        """See `Syntax.closing`."""
        return tagged.closing(call, types, _TAGS)
