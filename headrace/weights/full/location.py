"""A location of full snapshots: objects behind a URL of fsspec, such as a folder or s3://bucket/prefix.

The URL is this node's own configuration, and the name of an object is computed from a signed manifest, so no message
names a path. fsspec takes its options, keys and endpoints from its own files and variables (FSSPEC_S3_ENDPOINT_URL).
"""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from secrets import token_hex
from typing import Any, Protocol, TypeVar

from headrace.messages.subjects import token
from headrace.weights.state import WeightError

NAME = re.compile(r"(?P<version>[0-9]{1,16})-[0-9a-f]{32}\.chunks", re.ASCII)
FOLDER = "full_snapshots"
"""Where the objects of a run are in its folder, without `[weights] full_snapshots_url`."""
T = TypeVar("T")


class NoSnapshot(WeightError):
    """A full snapshot is not where this node looks for it, or cannot be read there."""


class Section(Protocol):
    """The part of ``[weights]`` that is needed here."""

    @property
    def full_snapshots_url(self) -> str:
        """Empty: a folder in the run's folder."""


class Location:
    """The objects of one run. The methods block; NoSnapshot with the cause when the location does not answer."""

    def __init__(self, url: str) -> None:
        """url: of the folder that holds the objects. It is opened when it is first used."""
        self.url = url
        self._fs: Any = None
        self._root = ""

    @classmethod
    def of_run(cls, section: Section, folder: Path) -> "Location":
        """The location of a run. folder: the run's, named by its id. WeightError when that is no id of a run."""
        run = folder.name
        if not run or token(run) != run:
            raise WeightError(f"expected a run id of lower-case letters, digits, '-' and '_', got {run!r}")
        url = section.full_snapshots_url.rstrip("/")
        return cls(f"{url}/{run}" if url else str(folder.absolute() / FOLDER))

    def open(self) -> None:
        """Import what the URL needs. NoSnapshot for a URL that fsspec does not know, or whose package is missing."""
        if self._fs is None:
            import fsspec.core  # a tenth of a second

            self._fs, self._root = self._call("open", lambda: fsspec.core.url_to_fs(self.url))

    def _call(self, what: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except NoSnapshot:
            raise
        except Exception as error:  # each implementation of fsspec raises errors of its own
            raise NoSnapshot(f"{self.url}: cannot {what}: {error or type(error).__name__}") from error

    def _at(self, name: str) -> str:
        if NAME.fullmatch(name) is None:
            raise NoSnapshot(f"{name!r} is no name of a full snapshot")
        self.open()
        return f"{self._root}/{name}"

    def size(self, name: str) -> int | None:
        """Bytes of an object; None when there is none of this name."""
        path = self._at(name)

        def look() -> int | None:
            self._fs.invalidate_cache()
            try:
                return int(self._fs.info(path)["size"] or 0)
            except FileNotFoundError:
                return None

        return self._call(f"find {name}", look)

    def read(self, name: str, start: int, end: int) -> bytes:
        """The bytes of an object from `start` to before `end`."""
        path = self._at(name)
        data = self._call(f"read {name}", lambda: bytes(self._fs.cat_file(path, start=start, end=end)))
        if len(data) != end - start:
            raise NoSnapshot(f"{self.url}: {name} gave {len(data)} bytes, expected {end - start} from {start}")
        return data

    def put(self, file: Path, name: str) -> None:
        """Move a local file to an object, which appears whole or not at all."""
        path = self._at(name)

        def move() -> None:
            if "file" not in self._fs.protocol:
                self._fs.put_file(str(file), path)
                file.unlink()
                return
            part = Path(path).with_name(f".{name}.{token_hex(4)}.part")
            part.parent.mkdir(parents=True, exist_ok=True)
            try:
                shutil.move(file, part)
                with open(part, "rb") as written:
                    os.fsync(written.fileno())
                os.replace(part, path)
            finally:
                part.unlink(missing_ok=True)

        size = file.stat().st_size
        self._call(f"store {name}", move)
        if (stored := self.size(name)) != size:
            raise NoSnapshot(f"{self.url}: {name} has {stored} bytes after it was stored, expected {size}")

    def versions(self) -> dict[str, int]:
        """The name of each object, with its version."""
        self.open()

        def look() -> list[str]:
            self._fs.invalidate_cache()
            try:
                return [str(path) for path in self._fs.ls(self._root, detail=False)]
            except FileNotFoundError:
                return []

        names = (path.rpartition("/")[2] for path in self._call("list the objects", look))
        return {name: int(match["version"]) for name in sorted(names) if (match := NAME.fullmatch(name))}

    def remove(self, name: str) -> None:
        """Remove an object; nothing when it is gone."""
        path = self._at(name)

        def drop() -> None:
            try:
                self._fs.rm_file(path)
            except FileNotFoundError:
                return

        self._call(f"remove {name}", drop)

    def discard_parts(self) -> None:
        """Remove what senders that were killed have left in a folder. Only the run's sender calls this."""
        self.open()
        if "file" in self._fs.protocol:
            for part in Path(self._root).glob(".*.part"):
                part.unlink(missing_ok=True)
