"""A folder of full snapshots for tests that publish and read without actors."""

from pathlib import Path

from headrace.messages.weights import ChunkInfo
from headrace.weights.full import snapshots
from headrace.weights.full.location import Location
from headrace.weights.full.snapshots import FullSnapshots
from headrace.weights.publishing.encoding import Encoding


class ObjectFolder:
    """Stores full snapshots as a sender does, and reads them as a receiver does."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.location = folder, Location(str(folder))
        self.fetch = FullSnapshots(self.location, None, self._tell).fetch

    async def keep(self, encoding: Encoding, version: int) -> list[ChunkInfo]:
        """As `release.Keep`."""
        return await snapshots.store(self.location, encoding, version, self.folder)

    async def _tell(self, text: str) -> None:
        raise AssertionError(text)
