"""Cuts files into chunks: definitions by tree-sitter, other text at blank lines.

A chunk is a function, a method, or the text between definitions (imports, constants, a class without its methods). Its
name is the qualified name of its definition. A definition of more than `MOST_LINES` lines becomes several chunks.
"""

import importlib
import importlib.metadata
from collections.abc import Iterator
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import msgspec

from headrace.errors import HeadraceError
from headrace.vmhost.guest.lines import shown_lines

MOST_LINES = 80
MOST_FILE = 1 << 20
"""Bytes of a file above which it is not indexed: it is data, or generated."""
MOST_FOLDERS = 100
"""Folders around a file above which it is not indexed. The walk of the tree has a call per folder."""
MOST_NESTING = 100
"""Statements around a definition above which it is part of the text around it. Each costs a call."""
MOST_WORK = 8_000_000
"""Work that one workspace may cost. 13 MiB of ordinary Python cost about so much."""
_FILE, _CHUNK, _NODE = 50, 10, 2
_READ = 1 << 16
"""Bytes that the parser gets at a time."""
_STEPS, _STEPS_WITH_ERRORS = 40, 240
"""Work of 100 steps of the parser, without and with syntax errors: it recovers from them by trying several readings."""

_GRAMMARS = {".py": "python", ".pyi": "python"}
"""Ending to the grammar ``tree_sitter_<name>``."""
_TEXT = frozenset(
    ".c .cc .cfg .clj .cpp .cs .css .ex .go .h .hpp .hs .html .ini .java .jl .js .jsx .kt .lua .md .ml .php .pl .proto "
    ".r .rb .rs .rst .scala .sh .sql .swift .tex .toml .ts .tsx .txt .vue .xml .yaml .yml .zig".split()
)
"""Endings of files that are cut at blank lines."""
PATTERNS = tuple(f"**/*{ending}" for ending in sorted({*_GRAMMARS, *_TEXT}))
"""Globs of the files that an index reads."""

_DEFINITIONS = ("function_definition", "class_definition")


class Chunk(msgspec.Struct, frozen=True):
    """A piece of a file. Line numbers are 1-based."""

    path: str
    name: str
    first: int
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        """Path, name and content: what is embedded and what keywords are counted in."""
        return "\n".join((f"{self.path} {self.name}".rstrip(), *self.lines))

    def hash(self) -> str:
        """Identifies the chunk's text, wherever it stands in its file."""
        return blake2b(self.text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


class WorkExceeded(HeadraceError):
    """A file costs more work than is left."""


class Work:
    """The work that cutting and counting words may still cost, in units that follow from the files alone and not from
    the machine: about a microsecond each."""

    __slots__ = ("left",)

    def __init__(self, left: int = MOST_WORK) -> None:
        self.left = left

    def spend(self, units: int) -> None:
        """Count work that was done, or is about to be done. WorkExceeded."""
        self.left -= units
        if self.left < 0:
            raise WorkExceeded


@lru_cache(1)
def identity() -> str:
    """Identifies the inputs of chunks besides the files: the rules of this module and the versions of the parsers."""
    versions = [importlib.metadata.version(name) for name in ("tree-sitter", "tree-sitter-python")]
    return f"chunks-2 {MOST_LINES} {' '.join(versions)}"


def indexed(path: str) -> bool:
    """Whether an index reads this path."""
    if path.count("/") > MOST_FOLDERS:
        return False
    return _ending(path) in _GRAMMARS or _ending(path) in _TEXT


def cut(path: str, data: bytes, work: Work | None = None) -> list[Chunk]:
    """The chunks of a file, in its order; none for an empty, binary or huge one. WorkExceeded."""
    work = work or Work()
    work.spend(_FILE)
    if len(data) > MOST_FILE or b"\0" in data[:1024]:
        return []
    lines = shown_lines(data)
    grammar = _GRAMMARS.get(_ending(path), "")
    pieces = _definitions(grammar, data, len(lines), work) if grammar else [("", 0, len(lines))]
    out = []
    for name, start, end in pieces:
        for first, last in _split(lines, start, end) if name else _paragraphs(lines, start, end):
            if any(line.strip() for line in lines[first:last]):
                work.spend(_CHUNK)
                out.append(Chunk(path, name, first + 1, tuple(lines[first:last])))
    return out


def _ending(path: str) -> str:
    name = path.rpartition("/")[2]
    return name[name.rfind(".") :].lower() if "." in name else ""


def _split(lines: list[str], start: int, end: int) -> Iterator[tuple[int, int]]:
    for first in range(start, end, MOST_LINES):
        yield first, min(first + MOST_LINES, end)


def _paragraphs(lines: list[str], start: int, end: int) -> Iterator[tuple[int, int]]:
    """Runs of at most `MOST_LINES` / 2 lines that end at a blank line where there is one."""
    most = MOST_LINES // 2
    while start < end:
        last = min(start + most, end)
        if last < end:
            blank = next((at for at in range(last, start + most // 2, -1) if not lines[at - 1].strip()), last)
            last = blank
        yield start, last
        start = last


@lru_cache(4)
def _parser(grammar: str) -> Any:
    import tree_sitter

    language = importlib.import_module(f"tree_sitter_{grammar}").language()
    return tree_sitter.Parser(tree_sitter.Language(language))


def _parsed(grammar: str, data: bytes, work: Work) -> Any:
    """The root of the syntax tree. WorkExceeded. The parser calls back after every 100 steps; their number follows from
    the file alone."""
    parser, cheap = _parser(grammar), 0

    def stops(_: int, has_error: bool) -> bool:
        nonlocal cheap
        cheap += not has_error
        work.left -= _STEPS_WITH_ERRORS if has_error else _STEPS
        return work.left < 0

    try:
        tree = parser.parse(lambda offset, _: data[offset : offset + _READ], progress_callback=stops)
    except ValueError:  # it was stopped
        tree = None
    if tree is None or work.left < 0:
        parser.reset()
        raise WorkExceeded
    if tree.root_node.has_error:  # most of them are known at the end alone
        work.spend(cheap * (_STEPS_WITH_ERRORS - _STEPS))
    return tree.root_node


def _definitions(grammar: str, data: bytes, count: int, work: Work) -> list[tuple[str, int, int]]:
    """(qualified name, first line, line behind the last), 0-based, covering the file; the name of text outside every
    definition is empty. A nested function is part of the function around it; a method is not part of its class."""
    pieces: list[tuple[str, int, int]] = []
    at = 0

    def close(until: int, name: str) -> None:
        nonlocal at
        if until > at:
            pieces.append((name, at, until))
            at = until

    def visit(node: Any, prefix: str, depth: int) -> None:
        if depth > MOST_NESTING:
            return
        children = node.named_children
        work.spend(_NODE * len(children))
        for child in children:
            whole = child
            if child.type == "decorated_definition":
                child = child.child_by_field_name("definition") or child
            if child.type not in _DEFINITIONS:
                if child.type in ("if_statement", "try_statement", "block", "else_clause", "except_clause"):
                    visit(child, prefix, depth + 1)
                continue
            title = child.child_by_field_name("name")
            # The text of a node would be read anew from the start of the file.
            text = data[title.start_byte : title.end_byte] if title is not None else b"?"
            name = prefix + text.decode("utf-8", "replace")
            work.spend(len(name) // 256)
            close(whole.start_point[0], prefix.rstrip("."))
            if child.type == "class_definition":
                body = child.child_by_field_name("body")
                if body is not None:
                    visit(body, f"{name}.", depth + 1)
            close(max(at, whole.end_point[0] + 1), name)

    visit(_parsed(grammar, data, work), "", 0)
    close(count, "")
    return pieces
