"""The versions that a node holds as files. Files are verified when they are written and again after a restart.

One folder, one writer: ``<version>.safetensors`` per version. A file whose bits do not give the recorded hash does not
count as held.
"""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from headrace.weights import snapshot
from headrace.weights.state import WeightError


class SnapshotStore:
    """Files of versions in one folder, by version and state hash."""

    def __init__(self, folder: str | Path):
        """The folder need not exist yet."""
        self.folder = Path(folder)
        self._hashes: dict[int, str] = {}

    @staticmethod
    def sent(folder: Path, node: str) -> Path:
        """The store of a node's sender: the version that it published last. folder: `config.versions.folder`."""
        return folder / "nodes" / node / "sender"

    def scan(self) -> dict[int, str]:
        """Hash every file after a start, and remove partial and unreadable ones. Returns version to state hash."""
        self._hashes = {}
        self.folder.mkdir(parents=True, exist_ok=True)
        for part in self.folder.glob(".*.part"):
            part.unlink()
        for file in self.folder.glob("*.safetensors"):
            if file.stem.isascii() and file.stem.isdigit() and len(file.stem) < 16:
                try:
                    self._hashes[int(file.stem)] = snapshot.file_hash(file)
                except WeightError:
                    file.unlink()
        return dict(self._hashes)

    def path(self, version: int) -> Path:
        """The path of a version's file, whether it exists or not."""
        return self.folder / f"{version}.safetensors"

    def find(self, version: int, state_hash: str) -> Path | None:
        """The file of exactly this state; None when the node does not hold it."""
        path = self.path(version)
        return path if self._hashes.get(version) == state_hash and path.exists() else None

    def put(self, version: int, state_hash: str) -> Path:
        """Record that `path(version)` is a verified file of this state."""
        self._hashes[version] = state_hash
        return self.path(version)

    def take(self, source: str | Path, version: int) -> Path:
        """Link a file of another owner into this store, so that the owner may delete its own link; on another file
        system the file is copied.

        The caller verifies the file and then calls `put`. FileNotFoundError when the source is gone.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.path(version)
        part = self.folder / f".{version}.{os.getpid()}.part"
        part.unlink(missing_ok=True)
        try:
            os.link(source, part)
        except FileNotFoundError:
            raise
        except OSError:
            shutil.copyfile(source, part)
        self._hashes.pop(version, None)
        os.replace(part, path)
        # By POSIX, os.replace does nothing when both names are links to the same file: both names stay.
        part.unlink(missing_ok=True)
        return path

    def versions(self) -> list[int]:
        """Versions in the store, ascending."""
        return sorted(self._hashes)

    def drop(self, versions: Iterable[int]) -> None:
        """Remove versions; a process that has one mapped keeps its mapping."""
        for version in versions:
            self._hashes.pop(version, None)
            self.path(version).unlink(missing_ok=True)

    def keep(self, newest: int, pinned: Iterable[int] = ()) -> list[int]:
        """Remove all versions but the `newest` highest and the pinned ones. Returns the removed versions."""
        held = self.versions()
        stay = set(held[max(0, len(held) - newest) :]) | set(pinned)
        gone = [version for version in held if version not in stay]
        self.drop(gone)
        return gone
