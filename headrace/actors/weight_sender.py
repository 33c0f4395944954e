"""The sender: from the trainer's snapshot files to versions in the stream. It skips to the newest and never makes the
trainer wait.

It keeps no state of its own: the head record says what is committed, the last SnapshotReady what is wanted, and a lost
base is built again from the chain. The head is written with an expected sequence, so of two senders one is refused; it
fails, and its successor reads the head again.
"""

import asyncio
from pathlib import Path
from typing import ClassVar

from headrace.bus.actor import Actor
from headrace.messages.subjects import EVENT
from headrace.messages.training import SnapshotReady
from headrace.weights import chain, release
from headrace.weights.encoding import Encoding
from headrace.weights.release import Commit
from headrace.weights.shelf import Shelf
from headrace.weights.snapshot import Snapshot
from headrace.weights.state import WeightError


class WeightSender(Actor):
    """SnapshotReady in; chunks, manifest and head out."""

    role: ClassVar[str] = "weight_sync"

    async def start(self) -> None:
        """Read the head, then follow the trainer's snapshots from the newest on."""
        self.shelf = Shelf(Path(self.config.run.dir) / self.run / "nodes" / self.bus.node / "sender")
        """Links to at most two of the trainer's files: the base and the one in work."""
        await asyncio.to_thread(self.shelf.scan)
        self.commit = await self._recover()
        self._wanted: SnapshotReady | None = None
        self._news = asyncio.Event()
        self.spawn(self._follow(), "snapshots")
        self.spawn(self._work(), "publishing")

    async def _recover(self) -> Commit | None:
        found = await chain.head(self.bus, self.run)
        if found is None:
            return None
        seq, head = found
        manifest = await chain.manifest(self.bus, self.run, head.manifest_seq)
        anchor = await chain.manifest(self.bus, self.run, head.anchor_seq)
        return Commit(seq=seq, head=head, manifest=manifest, anchor_bytes=anchor.wire_bytes)

    async def _follow(self) -> None:
        where = EVENT.where(run=self.run, type=SnapshotReady.type_name)
        last = await self.bus.last("HR_EVENT", where)
        async for received in self.bus.follow("HR_EVENT", where, start=last.seq if last else 1):
            ready = received.message
            if isinstance(ready, SnapshotReady) and (self._wanted is None or ready.version >= self._wanted.version):
                self._wanted = ready
                self._news.set()

    async def _work(self) -> None:
        while True:
            with self.waiting():
                await self._news.wait()
            self._news.clear()
            ready = self._wanted
            if ready is None or self._committed(ready):
                continue
            try:
                await self._publish(ready)
            except FileNotFoundError:
                # The trainer replaces a file that is still unsent; the newer one is announced next.
                await self.event("snapshot_replaced", f"version {ready.version} is gone: {ready.path}", level="warning")
            except (WeightError, OSError) as error:
                self.shelf.drop([ready.version])
                await self.event("snapshot_refused", f"version {ready.version}: {error}", level="error")

    def _committed(self, ready: SnapshotReady) -> bool:
        """Whether the head has it, or has left it behind. Other bits under the head's number are a new incarnation."""
        if self.commit is None:
            return False
        head = self.commit.head
        return ready.version < head.version or (ready.version, ready.state_hash) == (head.version, head.state_hash)

    async def _publish(self, ready: SnapshotReady) -> None:
        base = await self._base()
        path = await asyncio.to_thread(self.shelf.take, ready.path, ready.version)
        target = Snapshot(path)
        if base is not None and base.tensors != target.tensors:
            await self.event("tensors_changed", f"version {ready.version} has other tensors: publishing an anchor")
            base = None
        codec, before = self.config.weights.codec, self.commit
        hashes = before.manifest.slab_hashes if before is not None and base is not None else b""
        encoding = Encoding(target, base, name=codec, base_hashes=hashes)
        self.commit = await release.release(
            self.bus,
            encoding,
            self.run,
            ready.version,
            before,
            state_hash=ready.state_hash,
            rate=ready.learning_rate,
        )
        self.shelf.put(ready.version, ready.state_hash)
        self.shelf.keep(0, [ready.version])
        await self._tell(encoding)
        if release.anchor_due(self.commit, self.config.weights.anchor_every):
            anchor = Encoding(target, None, name=codec)
            self.commit = await release.add_anchor(self.bus, anchor, self.commit)

    async def _base(self) -> Snapshot | None:
        """The committed version's bits: our link to the trainer's file, or the chain's when that was lost."""
        if self.commit is None:
            return None
        head = self.commit.head
        path = self.shelf.find(head.version, head.state_hash)
        if path is None:
            path = self.shelf.path(head.version)
            await chain.obtain(self.bus, head, path, self.shelf.find)
            self.shelf.put(head.version, head.state_hash)
            await self.event("base_rebuilt", f"version {head.version} was built again from the chain")
        return Snapshot(path)

    async def _tell(self, encoding: Encoding) -> None:
        assert self.commit is not None
        head, wire = self.commit.head, encoding.wire_bytes
        self.status = f"version {head.version}, {wire} bytes"
        await self.event(
            "published",
            f"version {head.version}: {encoding.changed} of {encoding.elements} elements changed, {wire} bytes",
            version=head.version,
            base_version=self.commit.manifest.base_version,
            wire_bytes=wire,
            raw_bytes=encoding.raw_bytes,
            changed=encoding.changed,
            encode_s=round(encoding.seconds, 6),
        )
        await self.metric(
            version=float(head.version),
            wire_bytes=float(wire),
            density=encoding.changed / max(1, encoding.elements),
            encode_s=encoding.seconds,
        )
