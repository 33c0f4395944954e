"""Plain text and code: whole files, or JSONL with a field `text`. Every token is a target.

A plain file above BLOCK bytes is several documents, cut at line ends, so that no file has to fit the memory.
"""

from pathlib import Path
from typing import BinaryIO

import msgspec

from headrace.rendering.tokenizer import Tokenizer
from headrace.training.data.base import Document, next_line

BLOCK = 256 << 10
_CONTINUED = 0x80
"""First two bits of a byte inside a UTF-8 character."""


class _Line(msgspec.Struct, frozen=True):
    text: str


class TextReader:
    """Reads text. end: the id that closes a document, None for a tokenizer without such a token."""

    suffixes: tuple[str, ...] = ()
    splits = True

    def __init__(self, tokenizer: Tokenizer, end: int | None) -> None:
        self._tokenizer, self._end = tokenizer, end
        self._decoder = msgspec.json.Decoder(_Line)

    def next(self, file: BinaryIO, path: Path, line: int) -> tuple[bytes, int] | None:
        """A line of JSONL; a block of another file."""
        if path.suffix == ".jsonl":
            return next_line(file)
        block = file.read(BLOCK)
        if not block:
            return None
        if len(block) == BLOCK:
            block += file.readline(BLOCK)
            while (following := file.peek(1)[:1]) and following[0] & 0xC0 == _CONTINUED:  # type: ignore[attr-defined]
                block += file.read(1)
        return block, block.count(b"\n")

    def check(self, record: bytes, path: Path) -> None:
        """The text is valid."""
        self._text(record, path)

    def encode(self, record: bytes, path: Path) -> Document:
        """All tokens of the text, and the end of a document where the tokenizer has one."""
        ids = self._tokenizer.encode(self._text(record, path))
        if self._end is not None:
            ids.append(self._end)
        return Document(ids=ids, weights=[1.0] * len(ids))

    def _text(self, record: bytes, path: Path) -> str:
        return self._decoder.decode(record).text if path.suffix == ".jsonl" else record.decode()
