"""Documents, and the protocol of a reader: one file of this folder is one kind of data."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

import msgspec

from headrace.errors import WRONG_INPUT, HeadraceError

LINE_BYTES = 64 << 20
"""Longest line of a JSONL file."""


class DataError(HeadraceError, exit_status=WRONG_INPUT):
    """Data cannot be used: file, line, what was expected, what was found, in one sentence."""


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """One document as ids. `weights[i]` is the loss weight of predicting ids[i]; the first one is not used."""

    ids: list[int]
    weights: list[float]

    @property
    def teaches(self) -> bool:
        """Whether any token of it is a target."""
        return any(self.weights[1:])


class Record(NamedTuple):
    """Where a document lies in its file."""

    offset: int
    size: int
    line: int
    """Its first line, counted from 1."""


class Reader(Protocol):
    """One kind of data. A reader holds no document: files may be larger than the memory."""

    suffixes: tuple[str, ...]
    """Of the files that are read in a folder; empty: all of them."""
    splits: bool
    """Whether a document that is longer than a sequence is cut into several; else what is longer is dropped."""

    def next(self, file: BinaryIO, path: Path, line: int) -> tuple[bytes, int] | None:
        """Read one record from an open file: its bytes, and the lines that it has. None at the end of the file.
        ValueError when the file cannot be cut into records."""

    def check(self, record: bytes, path: Path) -> None:
        """Check a record without encoding it. ValueError says what was expected and what was found."""

    def encode(self, record: bytes, path: Path) -> Document:
        """The document of a record. ValueError as in `check`."""


class Lines(ABC):
    """The base of readers of JSONL: one record is one line, and a long document is not cut."""

    suffixes: tuple[str, ...] = (".jsonl",)
    splits = False

    def next(self, file: BinaryIO, path: Path, line: int) -> tuple[bytes, int] | None:
        """One line."""
        return next_line(file)

    def check(self, record: bytes, path: Path) -> None:
        """As `Reader.check`; a record that can be encoded is right."""
        self.encode(record, path)

    @abstractmethod
    def encode(self, record: bytes, path: Path) -> Document:
        """As `Reader.encode`."""


def next_line(file: BinaryIO) -> tuple[bytes, int] | None:
    """The next line of a JSONL file. ValueError when it is too long."""
    line = file.readline(LINE_BYTES)
    if not line:
        return None
    if len(line) == LINE_BYTES and not line.endswith(b"\n"):
        raise ValueError(f"expected a line of less than {LINE_BYTES >> 20} MiB")
    return line, 1


def complaint(error: Exception) -> str:
    """The text of a decoder's error, as a clause that begins with the expectation."""
    text = str(error)
    if isinstance(error, UnicodeDecodeError):
        return f"expected UTF-8, got byte 0x{error.object[error.start]:02x}"
    if isinstance(error, msgspec.ValidationError):
        return text[:1].lower() + text[1:]
    if isinstance(error, msgspec.DecodeError):
        return f"expected JSON, got: {text}"
    return text
