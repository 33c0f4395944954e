"""Suites by name: sources of the registry (``generated/train``), and folders of files.

A source from outside is a function that opens a suite: an entry point of the group ``headrace.suites``, or
``module:attribute`` (docs/extending.md). A folder suite holds ``suite.json`` (name, ids in order, origin) and per task
``<id>.task`` and ``<id>.oracle`` (msgpack, lz4 where it pays, the same codec as on the bus), so that the agent's side
and the judge's side are apart on the disk too.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from headrace.inner_paths import inner
from headrace.messages.base import Message
from headrace.messages.codec import UnreadableMessage, decode_as, encode
from headrace.messages.plugins import Plugin
from headrace.messages.product import CLIENT_SUITE
from headrace.messages.tasks import Oracle, Task
from headrace.registry import PluginError, Registry, plugins
from headrace.tasks.base import Suite, Trust, UnknownSuite
from headrace.tasks.generated import notes, repositories
from headrace.tasks.generated.seeds import SeedIds
from headrace.tasks.mix import NAME as MIX
from headrace.tasks.mix import SelectedSuite, mixed, parts
from headrace.tasks.workspace import WORKSPACE, ClientSuite, WorkspaceSuite

_LZ4_MAGIC = b"\x04\x22\x4d\x18"


class GeneratedSuite:
    """Repositories made from seeds (tasks/generated/repositories.py)."""

    def __init__(self, kind: str) -> None:
        self.name = f"generated/{kind}"
        self._kind = kind
        self._ids = SeedIds(repositories.SEEDS[kind])

    def ids(self) -> Sequence[str]:
        """Seeds as text."""
        return self._ids

    @property
    def source(self) -> str:
        """Hash of the templates that every task follows from: others make the suite's certificates void."""
        return repositories.source(self._kind)

    @property
    def sample(self) -> Sequence[str]:
        """The first id of each template: what a certificate of the suite has to cover."""
        return repositories.first_of_each(self._kind)

    def make(self, id: str, *, judged: bool = True) -> repositories.Made:
        """Task, oracle, and the facts that only the generator of traces uses. judged: as in `repositories.make`."""
        if id not in self._ids:
            raise UnknownSuite(f"{self.name} has no task {id!r}")
        return repositories.make(self._kind, int(id), judged=judged)

    def covered_by(self, id: str) -> str:
        """The task of the sample whose certificate covers this one: they have the same template."""
        if id not in self._ids:
            raise UnknownSuite(f"{self.name} has no task {id!r}")
        return repositories.first_of(self._kind, int(id))

    def equivalent(self, id: str, files: dict[str, bytes]) -> bool:
        """Whether a changed solution behaves like the solution: a certificate does not count it against the tests."""
        made = self.make(id)
        return repositories.behaves(made, files[made.path])

    def task(self, id: str) -> Task:
        """The agent's side."""
        return self.make(id, judged=False).task

    def oracle(self, id: str) -> Oracle:
        """The judge's side."""
        return self.make(id).oracle


class _Index(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    ids: tuple[str, ...]
    source: str = ""
    trust: Trust = "report"
    of: str = ""
    """The suite whose tasks the ids name; empty: the folder has the tasks."""


class FolderSuite:
    """A suite written by `write_task` and `write_index`."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self._folder = name, folder
        try:
            self.index = msgspec.json.decode((folder / "suite.json").read_bytes(), type=_Index)
        except FileNotFoundError:
            names = [f"generated/{kind}" for kind in (*repositories.SEEDS, *notes.SEEDS)]
            names += sorted(file.parent.name for file in folder.parent.glob("*/suite.json"))
            raise UnknownSuite(
                f"there is no suite {name!r} in {folder.parent}; there are {', '.join(names)}, "
                "and `headrace tasks make mutations NAME==VERSION` or `headrace tasks import` makes one"
            ) from None
        except (OSError, msgspec.DecodeError) as error:
            raise UnknownSuite(f"{folder} is not a suite: {error}") from None
        self._known = frozenset(self.index.ids)

    @property
    def trust(self) -> Trust:
        """``log`` where the verdict of a task can be forged by a printed line."""
        return self.index.trust

    def ids(self) -> Sequence[str]:
        """In the order in which they were written."""
        return self.index.ids

    def _read(self, id: str, kind: type[Task] | type[Oracle]) -> Message:
        if id not in self._known:
            raise UnknownSuite(f"{self.name} has no task {id!r}")
        try:
            file = inner(self._folder, f"{id}.{kind.type_name}")
        except ValueError as error:
            raise UnknownSuite(f"{self.name}: {error}") from None
        try:
            payload = file.read_bytes()
            packed = {"Hr-Encoding": "lz4"} if payload.startswith(_LZ4_MAGIC) else {}
            return decode_as(kind, payload, packed)
        except (OSError, UnreadableMessage) as error:
            raise UnknownSuite(f"{file} cannot be read: {error}") from None

    def task(self, id: str) -> Task:
        """The agent's side."""
        task = self._read(id, Task)
        assert isinstance(task, Task)
        return task

    def oracle(self, id: str) -> Oracle:
        """The judge's side."""
        oracle = self._read(id, Oracle)
        assert isinstance(oracle, Oracle)
        return oracle


def write_task(folder: Path, task: Task, oracle: Oracle) -> None:
    """Write both sides of a task into the folder of its suite. ValueError for an id that is no name of a file there."""
    for side in (task, oracle):
        inner(folder, f"{task.ref.task}.{side.type_name}").write_bytes(encode(side)[0])


def write_index(name: str, folder: Path, ids: Iterable[str], source: str, trust: Trust, *, of: str = "") -> FolderSuite:
    """Write the index over the tasks of a folder, or over tasks of the suite `of`."""
    index = _Index(name=name, ids=tuple(ids), source=source, trust=trust, of=of)
    (folder / "suite.json").write_bytes(msgspec.json.format(msgspec.json.encode(index)))
    return FolderSuite(name, folder)


def _generated(rest: str, root: Path) -> Suite:
    """``generated/<kind>``."""
    if rest in notes.SEEDS:
        return notes.NotesSuite(rest)
    if rest not in repositories.SEEDS:
        kinds = ", ".join((*repositories.SEEDS, *notes.SEEDS))
        raise UnknownSuite(f"expected generated/ and one of {kinds}, got 'generated/{rest}'")
    return GeneratedSuite(rest)


def _mixed(rest: str, root: Path) -> Suite:
    """``mix/`` and other suites with their weights."""
    return mixed(rest, root, open_suite)


def _workspace(rest: str, root: Path) -> Suite:
    """``workspace``: what users bring."""
    return WorkspaceSuite()


def _clients(rest: str, root: Path) -> Suite:
    """``client``: what loops outside run."""
    return ClientSuite()


Opener = Callable[[str, Path], Suite]
"""Opens a suite of a source, given the name behind the source's own and the folder of suites. UnknownSuite."""

SUITES: Registry[Opener] = Registry(
    "suites",
    {
        "generated": "headrace.tasks.suites:_generated",
        MIX: "headrace.tasks.suites:_mixed",
        WORKSPACE: "headrace.tasks.suites:_workspace",
        CLIENT_SUITE: "headrace.tasks.suites:_clients",
    },
    needs=("__call__",),
)


def _source(name: str) -> str:
    """The source in a suite's name, empty for a folder: ``generated/train`` and ``package.module:attribute/easy``."""
    first = name.partition("/")[0]
    return first if ":" in first or first in SUITES.names() else ""


def open_suite(name: str, root: str | Path = "suites") -> Suite:
    """A suite by name: a source of the registry, a slash and a name that the source knows; else a folder under `root`.
    UnknownSuite when there is none."""
    try:
        if source := _source(name):
            return SUITES.get(source)(name.partition("/")[2], Path(root))
        try:
            folder = inner(Path(root), name)
        except ValueError:
            raise UnknownSuite(f"{name!a:.200} is not the name of a suite") from None
        suite = FolderSuite(name, folder)
        return SelectedSuite(name, suite.ids(), open_suite(suite.index.of, root)) if suite.index.of else suite
    except PluginError as error:
        raise UnknownSuite(str(error)) from None
    except RecursionError:
        raise UnknownSuite(f"{name!r:.200} holds too many suites, one inside another") from None


def suite_plugins(names: Iterable[str]) -> tuple[Plugin, ...]:
    """The sources from outside among these suites. UnknownSuite as in `open_suite`."""
    try:
        return plugins((SUITES, [source for name in names for source in sources(name)]))
    except PluginError as error:
        raise UnknownSuite(str(error)) from None


def sources(name: str) -> Iterator[str]:
    """The sources that a suite's name has, inside of mixes too; a folder has none. UnknownSuite for text
    that is no mix."""
    source, _, rest = name.partition("/")
    if source == MIX:
        for part, _ in parts(rest):
            yield from sources(part)
    elif _source(name):
        yield source
