"""An importer: entries of a source one after another, each with a function that makes its task or refuses it."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from headrace.config import Environment
from headrace.errors import WRONG_INPUT, HeadraceError
from headrace.messages.tasks import LONGEST_TEST_S, Oracle, SandboxLimits, Task, TaskRef

LARGEST_TREE = 32 << 20
"""Bytes of a repository that travels with its task; a larger one belongs into an image."""
LARGEST_ROW = 128 << 20
"""Bytes of a line of JSONL: a tree of `LARGEST_TREE` with its escapes fits."""
FORM = "4"
"""Of the tasks that importers make: with another one an earlier import is not continued."""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")


class ImportRefused(HeadraceError):
    """One entry makes no task; the text says why, and what would help."""


class SourceError(HeadraceError, exit_status=WRONG_INPUT):
    """The source cannot be read at all; one sentence says why."""


class MadeTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task from outside, and what its import left out."""

    task: Task
    oracle: Oracle
    notes: tuple[str, ...] = ()
    """Files and settings of the source that the task does not have."""


class SourceEntry(NamedTuple):
    """One task of a source."""

    id: str
    digest: str
    """Digest of everything that the task is made of. An entry that was imported under the same digest is skipped."""
    make: Callable[[], MadeTask]
    """ImportRefused says why not."""


class ImportOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that the command line adds to a source."""

    suite: str
    source: Path
    repos: Path | None = None
    """Folder of checkouts, for rows that name a repository and a commit."""
    template: str = ""
    """Run without the task's image, in this template; needs the files beside the row."""
    system: str = ""
    tools: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    """Globs of absolute paths, outside of the work folder of an image, whose changes the judge makes again."""
    python: Path | None = None
    """Interpreter of the environment that a verifiers taskset is installed in."""
    taskset_config: str = ""
    """Configuration of a verifiers taskset, JSON."""
    environment: Environment = Environment()
    """Of this node: its image store, and how Dockerfiles are built."""
    count: int = 0
    """The most tasks that are read of a verifiers taskset; 0: all."""

    def ref(self, id: str) -> TaskRef:
        """The task's name in the suite."""
        return TaskRef(self.suite, id)


Read = Callable[[ImportOptions], Iterator[SourceEntry]]
"""Reads a source as a stream. SourceError."""


def clean_id(text: str) -> str:
    """An id that is a file's name too. ImportRefused when nothing is left of it."""
    id = re.sub(r"[^A-Za-z0-9._-]+", "_", text.replace("/", "__")).lstrip("._-")[:120]
    if not _ID.fullmatch(id):
        raise ImportRefused(f"expected an id with letters or digits, got {text!r}")
    return id


def rows(path: Path) -> Iterator[tuple[int, bytes, Any]]:
    """The rows of a JSONL file (or of one JSON list): number from 1, bytes, and the value; an unreadable row is a
    ValueError in place of its value. SourceError."""
    try:
        if path.exists() and not path.is_file():  # a pipe may never be written to, a device never end
            raise SourceError(f"{path} cannot be read: expected a file, it is a folder, a pipe or a device")
        with path.open("rb") as file:
            head = file.read(1)
            file.seek(0)
            if head == b"[":
                for number, row in enumerate(_value(file.read()), 1):
                    yield number, json.dumps(row, sort_keys=True).encode(), row
                return
            number = 0
            while line := file.readline(LARGEST_ROW + 1):
                number += 1
                if len(line) > LARGEST_ROW:
                    raise SourceError(f"{path}, line {number}: expected at most {LARGEST_ROW >> 20} MiB, it has more")
                if line.strip():
                    try:
                        yield number, line, _value(line)
                    except ValueError as error:
                        yield number, line, error
    except (OSError, ValueError) as error:
        raise SourceError(f"{path} cannot be read: {error}") from None


def _value(data: bytes) -> Any:
    """The value of a JSON text. ValueError also where it is nested too deep, or where a string holds half of a pair of
    surrogates, which no task can store."""
    try:
        value = json.loads(data)
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("its lists and objects are nested too deep") from None
    except UnicodeEncodeError as error:
        raise ValueError(f"a string holds half of a surrogate pair, {error.object[error.start]!a}") from None
    return value


def digest(*parts: bytes) -> str:
    """The digest of the parts of an entry."""
    hash = hashlib.blake2b(digest_size=16)
    for part in parts:
        hash.update(len(part).to_bytes(8, "little") + part)
    return hash.hexdigest()


def text_of(row: Mapping[str, Any], key: str, default: str | None = None) -> str:
    """A string of a row. ImportRefused when it is missing and has no default, or is something else."""
    value = row.get(key)
    if value is None:
        if default is None:
            raise ImportRefused(f"the row has no {key}")
        return default
    if not isinstance(value, str):
        raise ImportRefused(f"{key}: expected a string, got {type(value).__name__}")
    return value


def names_of(row: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A list of strings of a row, also written as JSON in a string. ImportRefused."""
    value = row.get(key, [])
    if isinstance(value, str):
        try:
            value = json.loads(value or "[]")
        except ValueError:
            raise ImportRefused(f"{key}: expected a JSON list of test names") from None
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ImportRefused(f"{key}: expected a list of test names")
    return tuple(dict.fromkeys(value))


def limits_of(values: Mapping[str, Any]) -> SandboxLimits | UnsetType:
    """Limits by the names of `SandboxLimits`; unset where there are none. ImportRefused for one that is no number."""
    try:
        limits = msgspec.convert({key: value for key, value in values.items() if value is not None}, SandboxLimits)
    except msgspec.ValidationError as error:
        raise ImportRefused(f"limits: {error}") from None
    return UNSET if limits == SandboxLimits() else limits


def test_seconds(key: str, value: Any) -> float:
    """A time limit of tests in s. ImportRefused unless it is a number above 0 and at most 86,400."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LONGEST_TEST_S:
        raise ImportRefused(f"{key}: expected seconds above 0 and at most {LONGEST_TEST_S:g}, got {value!r:.80}")
    return float(value)


MakeRow = Callable[[dict[str, Any], str, ImportOptions], MadeTask]
"""From a row of a JSONL file and its id to a task. ImportRefused."""


def row_entries(options: ImportOptions, id_key: str, make: MakeRow) -> Iterator[SourceEntry]:
    """The entries of a JSONL file."""
    for number, data, row in rows(options.source):
        named = row.get(id_key) if isinstance(row, dict) else None
        try:
            id = clean_id(str(named)) if named is not None else f"{number:06d}"
        except ImportRefused:
            id = f"{number:06d}"
        key = digest(data, msgspec.json.encode(_settings(options)))
        yield SourceEntry(id, key, _maker(row, id, make, options))


def _settings(options: ImportOptions) -> tuple[str, ...]:
    return (FORM, options.template, options.system, *options.tools, str(options.repos or ""))


def _maker(row: Any, id: str, make: MakeRow, options: ImportOptions) -> Callable[[], MadeTask]:
    def made() -> MadeTask:
        if isinstance(row, ValueError):
            raise ImportRefused(f"the row is not JSON: {row}")
        if not isinstance(row, dict):
            raise ImportRefused(f"expected a row that is an object, got {type(row).__name__}")
        return make(row, id, options)

    return made
