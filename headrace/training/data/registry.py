"""Readers by name: ``chat``, ``text``, ``trajectories``, entry points of ``headrace.readers``, ``module:attribute``.

A part of this seam is a function from the run's renderer bundle to a reader (`base.Reader`). A reader from outside may
raise anything; here it becomes the fault of a record, with file and line.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, TypeVar

from headrace.config.training import Data
from headrace.messages.plugins import Plugin
from headrace.messages.rollout import RendererBundle
from headrace.registry import PluginError, Registry, plugins
from headrace.training.data.base import DataError, Document, Reader

T = TypeVar("T")

READERS: Registry[Callable[[RendererBundle], Reader]] = Registry(
    "readers",
    {
        "chat": "headrace.training.data.opening:open_chat",
        "text": "headrace.training.data.opening:open_text",
        "trajectories": "headrace.training.data.opening:open_trajectories",
    },
    needs=("__call__",),
)
_NEEDED = ("suffixes", "splits", "next", "check", "encode")


def plugins_of(data: Sequence[Data]) -> tuple[Plugin, ...]:
    """The readers from outside that sources use. DataError for a kind that no registry has."""
    try:
        return plugins((READERS, [source.kind for source in data if source.kind != "generated"]))
    except PluginError as error:
        raise DataError(f"[[mid_training.data]] kind: {error}; 'generated' needs no reader") from None


def open_reader(kind: str, bundle: RendererBundle) -> tuple[Reader, str]:
    """The reader of a kind, and the source hash of one from outside. DataError when it cannot be opened."""
    plugin = next(iter(plugins_of((Data(kind=kind),))), None)
    open_kind = READERS.get(kind)
    if plugin is None:
        return open_kind(bundle), ""
    try:
        reader = open_kind(bundle)
    except Exception as error:  # a user's function may raise anything
        raise DataError(f"the reader {kind!r} raised {type(error).__name__}: {error}") from error
    if missing := [name for name in _NEEDED if not hasattr(reader, name)]:
        raise DataError(f"the reader {kind!r} has no {', '.join(missing)}; docs/extending.md shows one")
    return _Foreign(kind, reader), plugin.source


class _Foreign:
    """A reader from outside: what it raises is a ValueError, which `Index` reports with file and line."""

    def __init__(self, kind: str, reader: Reader) -> None:
        self._kind, self._reader = kind, reader
        self.suffixes, self.splits = reader.suffixes, reader.splits

    def next(self, file: BinaryIO, path: Path, line: int) -> tuple[bytes, int] | None:
        """As `Reader.next`."""
        return self._called(lambda: self._reader.next(file, path, line))

    def check(self, record: bytes, path: Path) -> None:
        """As `Reader.check`."""
        self._called(lambda: self._reader.check(record, path))

    def encode(self, record: bytes, path: Path) -> Document:
        """As `Reader.encode`; ids and weights belong together."""
        document = self._called(lambda: self._reader.encode(record, path))
        if not document.ids or len(document.ids) != len(document.weights):
            raise ValueError(
                f"expected ids from the reader {self._kind!r} with one weight each, got {len(document.ids)} ids and "
                f"{len(document.weights)} weights"
            )
        return document

    def _called(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except (ValueError, OSError):
            raise
        except Exception as error:
            raise ValueError(f"the reader {self._kind!r} raised {type(error).__name__}: {error}") from error
