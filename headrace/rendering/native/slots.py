"""Placeholders: a template renders random words, which are replaced by the content afterwards.

A template gets no content, so content cannot change its output, and every character of the output is known to be the
template's own or content. Templates may transform content (strip it, write it as JSON). The transformation of a
template is determined once, with texts that distinguish the known ones, and is then applied here instead of by the
template.
"""

import json
import re
import secrets
from collections.abc import Callable, Mapping
from typing import Literal

from headrace.rendering.tokenizer import Piece

Kind = Literal["system", "user", "result", "argument", "thought"]
Change = Callable[[str], str]


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


CHANGES: dict[str, Change] = {
    "verbatim": lambda text: text,
    "stripped": str.strip,
    "json": _json,
    "json_stripped": lambda text: _json(text.strip()),
    "stripped_right": str.rstrip,
    "newlines_stripped": lambda text: text.strip("\n"),
    "ascii_json": lambda text: json.dumps(text)[1:-1],
    "json_in_json": lambda text: _json(_json(text)),
}
"""Changes that templates make to content, the most frequent first."""

TELLING = (
    "plain",
    "  \n lead and trail \n\n",
    'quote " back \\ slash\nline\ttab',
    "é中🙂",
    "",
    "<think>x</think> y",
    '{"a": 1}',
)
"""Texts that tell the changes apart."""


class Slots:
    """The placeholders of one rendering. `nonce` is fresh, so no content can spell a placeholder."""

    def __init__(self) -> None:
        self.nonce = "hr" + secrets.token_hex(8)
        self._contents: list[tuple[Kind, str]] = []
        self._pattern = re.compile(rf"{self.nonce}S(\d+)E")

    def add(self, kind: Kind, content: str) -> str:
        """The placeholder of a content."""
        self._contents.append((kind, content))
        return f"{self.nonce}S{len(self._contents) - 1}E"

    def fill(self, text: str, changes: Mapping[Kind, Change]) -> list[Piece]:
        """A rendered text as pieces: the template's own text, and contents as it would have rendered them."""
        pieces: list[Piece] = []
        at = 0
        for match in self._pattern.finditer(text):
            kind, content = self._contents[int(match.group(1))]
            pieces += [(text[at : match.start()], True), (changes[kind](content), False)]
            at = match.end()
        return [piece for piece in [*pieces, (text[at:], True)] if piece[0]]

    def behind_last(self, text: str, other: str) -> tuple[int, int]:
        """The ends of a text's last placeholder in it and in another text. (0, 0) when it has none; ValueError when the
        other text does not show it."""
        placeholders = list(self._pattern.finditer(text))
        if not placeholders:
            return 0, 0
        last = placeholders[-1]
        return last.end(), other.rindex(last.group()) + len(last.group())
