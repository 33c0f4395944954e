"""DeepSeek: special tokens around JSON (V3, R1 and V3.1), and the markup language DSML (V3.2 and V4)."""

import json
import re
from collections.abc import Iterator
from typing import Any

from headrace.rendering.parsers import tagged
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
    skip_space,
)

_STOPS = ("<｜end▁of▁sentence｜>",)
_FENCED = re.compile(r"([^\n]+)\n```json\n")


class DeepSeek(Syntax):
    """V3 and R1 write ``function<sep>NAME`` and fenced JSON, V3.1 writes ``NAME<sep>{...}``."""

    name = "deepseek"
    stops = _STOPS
    begin, end, separator = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
    section = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    marks = (begin, *section)

    def find(self, text: str, types: Types) -> Iterator[Span]:
        """Each begin token starts a call."""
        return between_tokens(text, self.begin, self.end, self.section, self._call)

    def _call(self, text: str, at: int) -> tuple[WrittenCall, int]:
        closed = text.find(self.end, at)
        middle = text.find(self.separator, at, closed if closed >= 0 else len(text))
        if middle < 0:
            raise Malformed(f"the call has no {self.separator}")
        name, behind = text[at:middle].strip(), middle + len(self.separator)
        if name != "function":
            arguments, end = json_object(text, behind)
            return WrittenCall(name=name, arguments=arguments), after(text, end, self.end)
        fenced = _FENCED.match(text, skip_space(text, behind))
        if fenced is None:
            raise Malformed("expected the function's name and a JSON block")
        arguments, end = json_object(text, fenced.end())
        end = skip_space(text, after(text, end, "```"))
        return WrittenCall(name=fenced.group(1).strip(), arguments=arguments), after(text, end, self.end)

    def closing(self, call: str, types: Types) -> tuple[int, str] | None:
        """See `Syntax.closing`."""
        start = call.find(self.separator)
        if start < 0:
            return len(call), ""
        fence = "```" if _FENCED.search(call, start) else ""
        return json_closing(call, start, fence + self.end)


def _dsml_value(text: str, opening: re.Match[str], schema: Any) -> Any:
    """The tag itself says whether a value is a string or JSON."""
    if opening.group("string") == "true":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


_DSML = tagged.tags(
    call=r"<｜DSML｜ ?invoke name=\"(?P<name>[^\"]+)\"\s*/?>",
    parameter=r"<｜DSML｜ ?parameter name=\"(?P<name>[^\"]+)\" string=\"(?P<string>true|false)\">",
    parameter_end=r"</｜DSML｜ ?parameter>",
    end=r"</｜DSML｜ ?invoke>",
    section=r"(?<!\s)\s*<｜DSML｜ ?(?:function_calls|tool_calls|calls)>",
    section_end=r"</｜DSML｜ ?(?:function_calls|tool_calls|calls)>",
    closers=("</｜DSML｜",),
    closing="</｜DSML｜parameter></｜DSML｜invoke>",
)


class Dsml(Syntax):
    """``<｜DSML｜invoke name="..."><｜DSML｜parameter name="..." string="true">...``."""

    name = "dsml"
    stops = _STOPS
    marks = ("<｜DSML｜", "</｜DSML｜")

    def find(self, text: str, types: Types) -> Iterator[Span]:
        """Each ``invoke`` starts a call."""
        return tagged.find(text, types, _DSML, _dsml_value)

    def closing(self, call: str, types: Types) -> tuple[int, str] | None:
        """See `Syntax.closing`."""
        return tagged.closing(call, types, _DSML)
