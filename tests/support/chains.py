"""A run whose trainer and sender are the test."""

from pathlib import Path
from secrets import token_hex
from typing import Any

from headrace.bus.broker.keys import Key
from headrace.bus.connection import Bus
from headrace.messages.weights import WeightHead
from headrace.weights import tensor_state
from headrace.weights.publishing import release
from headrace.weights.publishing.encoding import Encoding
from headrace.weights.publishing.release import Commit
from headrace.weights.snapshot import Snapshot
from tests.support.object_folder import ObjectFolder
from tests.support.weights import model, step


class Run:
    """Versions in a stream of a real broker, and the trainer's file of each."""

    def __init__(self, bus: Bus, folder: Path, *, signer: Key | None = None):
        self.bus, self.folder, self.signer = bus, folder, signer
        self.id = f"r{token_hex(4)}"
        self.objects = ObjectFolder(folder / "objects")
        self.codec, self.wide = "d8-zstd", 3000
        self.commit: Commit | None = None
        self.tensors: dict[str, Any] = {}
        self.heads: list[WeightHead] = []

    def path(self, version: int) -> Path:
        """The trainer's file of a version."""
        return self.folder / f"{version}.safetensors"

    async def publish(self, version: int, *, density: float = 0.02) -> WeightHead:
        """The next version, as a delta to the one before."""
        self.tensors = step(self.tensors, version, density) if self.tensors else model(wide=self.wide)
        digest = tensor_state.write(self.path(version), self.tensors)
        base = Snapshot(self.path(self.commit.head.version)) if self.commit else None
        encoding = Encoding(Snapshot(self.path(version)), base, name=self.codec)
        new = release.NewVersion(self.id, version, digest)
        self.commit = await release.release(self.bus, encoding, new, self.commit, self.objects.keep, signer=self.signer)
        self.heads.append(self.commit.head)
        return self.commit.head

    async def full(self) -> None:
        """A full snapshot beside the newest version."""
        assert self.commit is not None
        encoding = Encoding(Snapshot(self.path(self.commit.head.version)), None, name=self.codec)
        self.commit = await release.add_full_snapshot(
            self.bus, encoding, self.commit, self.objects.keep, signer=self.signer
        )
