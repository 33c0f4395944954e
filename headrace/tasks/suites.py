"""Opening a suite by name: generated ones are made from seeds, all others are folders of files.

A folder suite holds ``suite.json`` (name, ids in order, where it came from) and per task ``<id>.task`` and
``<id>.oracle`` (msgpack, lz4 where it pays, the same codec as on the bus), so that the agent's side and the judge's
side are apart on the disk too.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, overload

import msgspec

from headrace.messages.base import Message
from headrace.messages.codec import UnknownType, decode_as, encode
from headrace.messages.tasks import CANARY, Oracle, Task
from headrace.tasks import generated
from headrace.tasks.canaries import CanarySuite

_LZ4_MAGIC = b"\x04\x22\x4d\x18"


class UnknownSuite(Exception):
    """There is no such suite or task; the text says which and what there is."""


class Suite(Protocol):
    """Tasks under one name."""

    @property
    def name(self) -> str:
        """As `open_suite` knows it."""

    def ids(self) -> Sequence[str]:
        """All task ids in order; may be far too many to list."""

    def task(self, id: str) -> Task:
        """The agent's side. UnknownSuite when the id is not of this suite."""

    def oracle(self, id: str) -> Oracle:
        """The judge's side."""


class _SeedIds(Sequence[str]):
    """A range of seeds as text, without making the list."""

    def __init__(self, seeds: range) -> None:
        self._seeds = seeds

    def __len__(self) -> int:
        return len(self._seeds)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> "_SeedIds": ...
    def __getitem__(self, index: int | slice) -> "str | _SeedIds":
        return _SeedIds(self._seeds[index]) if isinstance(index, slice) else str(self._seeds[index])

    def __contains__(self, id: object) -> bool:
        return isinstance(id, str) and id.isascii() and id.isdigit() and str(int(id)) == id and int(id) in self._seeds


class GeneratedSuite:
    """Repositories made from seeds (tasks/generated.py)."""

    def __init__(self, kind: str) -> None:
        self.name = f"generated/{kind}"
        self._kind = kind
        self._ids = _SeedIds(generated.SEEDS[kind])

    def ids(self) -> Sequence[str]:
        """Seeds as text."""
        return self._ids

    def make(self, id: str) -> generated.Made:
        """Task, oracle and what only trace making may know."""
        if id not in self._ids:
            raise UnknownSuite(f"{self.name} has no task {id!r}")
        return generated.make(self._kind, int(id))

    def task(self, id: str) -> Task:
        """The agent's side."""
        return self.make(id).task

    def oracle(self, id: str) -> Oracle:
        """The judge's side."""
        return self.make(id).oracle


class _Index(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    ids: tuple[str, ...]
    source: str = ""


class FolderSuite:
    """A suite written by `write_suite`."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self._folder = name, folder
        try:
            self._index = msgspec.json.decode((folder / "suite.json").read_bytes(), type=_Index)
        except FileNotFoundError:
            known = [f"generated/{kind}" for kind in generated.SEEDS]
            known += sorted(found.parent.name for found in folder.parent.glob("*/suite.json"))
            raise UnknownSuite(
                f"there is no suite {name!r} in {folder.parent}; there are {', '.join(known)}, "
                "and `headrace tasks from-sdist NAME==VERSION` makes one"
            ) from None
        except (OSError, msgspec.DecodeError) as error:
            raise UnknownSuite(f"{folder} is not a suite: {error}") from None
        self._known = frozenset(self._index.ids)

    def ids(self) -> Sequence[str]:
        """In the order in which they were written."""
        return self._index.ids

    def _read(self, id: str, kind: type[Task] | type[Oracle]) -> Message:
        if id not in self._known:
            raise UnknownSuite(f"{self.name} has no task {id!r}")
        file = self._folder / f"{id}.{kind.type_name}"
        try:
            payload = file.read_bytes()
            packed = {"Hr-Encoding": "lz4"} if payload.startswith(_LZ4_MAGIC) else {}
            return decode_as(kind, payload, packed)
        except (OSError, UnknownType) as error:
            raise UnknownSuite(f"{file} cannot be read: {error}") from None

    def task(self, id: str) -> Task:
        """The agent's side."""
        found = self._read(id, Task)
        assert isinstance(found, Task)
        return found

    def oracle(self, id: str) -> Oracle:
        """The judge's side."""
        found = self._read(id, Oracle)
        assert isinstance(found, Oracle)
        return found


def write_suite(name: str, folder: Path, pairs: Sequence[tuple[Task, Oracle]], source: str) -> FolderSuite:
    """Write a folder suite; the index comes last, so a half-written folder is not a suite."""
    folder.mkdir(parents=True, exist_ok=True)
    for task, oracle in pairs:
        for side in (task, oracle):
            (folder / f"{task.ref.task}.{side.type_name}").write_bytes(encode(side)[0])
    index = _Index(name=name, ids=tuple(task.ref.task for task, _ in pairs), source=source)
    (folder / "suite.json").write_bytes(msgspec.json.format(msgspec.json.encode(index)))
    return FolderSuite(name, folder)


def open_suite(name: str, root: str | Path = "suites") -> Suite:
    """A suite by name: ``generated/<kind>``, a folder under `root`, or ``canary/`` and one of those. UnknownSuite when
    there is none."""
    first, _, kind = name.partition("/")
    if name.startswith(CANARY):
        return CanarySuite(open_suite(kind, root))
    if first == "generated":
        if kind not in generated.SEEDS:
            raise UnknownSuite(f"unknown suite {name!r}; generated suites are {', '.join(generated.SEEDS)}")
        return GeneratedSuite(kind)
    if not name or ".." in Path(name).parts or Path(name).is_absolute():
        raise UnknownSuite(f"{name!r} is not the name of a suite")
    return FolderSuite(name, Path(root) / name)
