"""The sender: publishes the trainer's snapshot files as versions in the stream.

It publishes the newest file and skips older ones; the trainer never waits for it. It keeps no state of its own: the
head record names the committed version, the last SnapshotReady names the version to publish, and a lost base is built
again from the chain. The head is written with an expected sequence, so the broker refuses one of two senders; the
refused sender fails, and after its restart it reads the head again. The sender signs the records that commit a version
with the publisher's key, which is only in its own credentials folder.

It stores full snapshots as objects (``[weights] full_snapshots_url``) and publishes their manifests. An object stays as
long as its manifest does.
"""

import asyncio
import os
from pathlib import Path
from typing import ClassVar

from msgspec.structs import replace

from headrace.bus.broker import credentials, keys
from headrace.bus.errors import Unrecoverable, WrongSequence
from headrace.bus.nats import capacity
from headrace.bus.runtime import tracing
from headrace.bus.runtime.actor import Actor
from headrace.config import versions
from headrace.inner_paths import own_file
from headrace.messages.operations import Event
from headrace.messages.subjects import EVENT, WEIGHT_HEAD
from headrace.messages.training import SnapshotReady
from headrace.messages.weights import ChunkInfo
from headrace.weights import chain, heads, shards, snapshot, state
from headrace.weights.full import retention, snapshots
from headrace.weights.full.location import Location, NoSnapshot
from headrace.weights.full.snapshots import FullSnapshots
from headrace.weights.publishing import release
from headrace.weights.publishing.encoding import Encoding
from headrace.weights.publishing.release import Commit, NewVersion
from headrace.weights.receiving.store import SnapshotStore
from headrace.weights.signing import Trust
from headrace.weights.snapshot import Snapshot
from headrace.weights.state import WeightError

AGAIN_S = 5.0
"""Seconds after which a location that did not answer is asked again."""


class WeightSender(Actor):
    """SnapshotReady in; chunks, manifest and head out."""

    role: ClassVar[str] = "weight_sync"

    async def start(self) -> None:
        """Read the head, then follow the trainer's snapshots from the newest on."""
        self.folder = versions.folder(self.config, self.run)
        self.store = SnapshotStore(SnapshotStore.sent(self.folder, self.bus.node))
        """Links to the trainer's files: the base, and the one that is being published."""
        await asyncio.to_thread(self.store.scan)
        await self._take_key()
        await self._open_location()
        self.commit = await self._recover()
        await self._sweep()
        if self.commit is not None:
            await self._require_stream(self.commit.manifest.raw_bytes)
        elif expected := self._expected_bytes():
            await self._require_stream(expected)
        self._wanted: SnapshotReady | None = None
        self._origin: tracing.Link | None = None
        """The span, in a step's trace, that announced `_wanted`."""
        self._unanswered = 0
        """How often in a row the location of full snapshots did not answer."""
        self._asked = -1
        """The newest version that a receiver cannot build from its records."""
        self._news = asyncio.Event()
        self.spawn(self._follow(), "snapshots")
        self.spawn(self._follow_asks(), "receivers without a chain")
        self.spawn(self._work(), "publishing")

    async def _take_key(self) -> None:
        folder, section = self.bus.credentials, self.config.weights
        try:
            self.signer = keys.load(folder, credentials.PUBLISHER) if folder and folder.is_dir() else None
        except ValueError:
            self.signer = None
        own_key = () if self.signer is None else (self.signer.public,)
        self.trust = Trust.load(folder, (*section.publishers, *own_key), unsigned=section.unsigned or not own_key)
        if self.signer is None:
            where = f"{folder or 'the credentials folder'}"
            await self.event(
                "unsigned", f"no {credentials.PUBLISHER}.nk in {where}: versions go out unsigned", level="warning"
            )

    async def _recover(self) -> Commit | None:
        tail = await self.bus.tail("HR_WEIGHTS", WEIGHT_HEAD.at(run=self.run))
        valid = await heads.read(self.bus, self.run, self.trust)
        self._last_head = max(tail, valid.last_seq)
        return await release.recover(self.bus, valid.newest, self.trust, self.signer, self._last_head)

    def _expected_bytes(self) -> int:
        """Bytes of a version's file by the configuration; 0 where the trainer's first file says how large it is."""
        from headrace.policy.layout import sizes

        return sizes.version_bytes(self.config)

    async def _require_stream(self, file_bytes: int) -> None:
        """Unrecoverable when the stream cannot hold the chains that the run keeps of it. file_bytes: of a version."""
        if lack := await capacity.lacking(self.bus.connection, self.config, file_bytes):
            raise Unrecoverable(lack)

    async def _open_location(self) -> None:
        """Find where full snapshots are. Unrecoverable."""
        section, folder = self.config.weights, Path(self.config.run.dir) / self.run
        try:
            self._location = Location.of_run(section, folder)
            await asyncio.to_thread(self._location.open)
        except WeightError as error:
            raise Unrecoverable(f"[weights] full_snapshots_url: {error}") from error
        copies = Path(section.region_dir) / self.run if section.region_dir else None
        self._snapshots = FullSnapshots(self._location, copies, self._tell_copy)
        await asyncio.to_thread(self._location.discard_parts)

    async def _tell_copy(self, text: str) -> None:
        await self.event("copy_failed", text, level="warning")

    async def _keep(self, encoding: Encoding, version: int) -> list[ChunkInfo]:
        """Store a full snapshot, before a record names it."""
        return await snapshots.store(self._location, encoding, version, Path(self.config.run.dir) / self.run)

    async def _sweep(self) -> None:
        """Drop the objects of full snapshots whose manifests were collected."""
        try:
            gone = await retention.sweep(self.bus, self.run, self._location)
        except NoSnapshot as error:
            await self.event("objects_not_removed", str(error), level="warning")
            return
        if gone:
            await self.event(
                "objects_removed", f"{len(gone)} full snapshots at {self._location.url}: {', '.join(gone)}"
            )

    async def _follow(self) -> None:
        where = EVENT.where(run=self.run, type=SnapshotReady.type_name)
        last = await self.bus.last("HR_EVENT", where)
        async for received in self.bus.follow("HR_EVENT", where, start=last.seq if last else 1):
            ready = received.message
            if isinstance(ready, SnapshotReady) and (self._wanted is None or ready.version >= self._wanted.version):
                try:
                    await asyncio.to_thread(own_file, self.folder.parent, ready.path, ".safetensors")
                except OSError:
                    pass  # the trainer has deleted it for a newer one, which is announced next
                except ValueError as error:
                    await self.event("snapshot_refused", f"version {ready.version}: {error}", level="error")
                    continue
                self._wanted, self._origin = ready, tracing.link(received)
                self._news.set()

    async def _follow_asks(self) -> None:
        """Hear of receivers that cannot build a version: a record of its chain is lost or damaged."""
        where = EVENT.where(run=self.run, actor=self.role, type=Event.type_name)
        async for received in self.bus.follow("HR_EVENT", where):
            event = received.message
            if isinstance(event, Event) and event.data.get("asks") == chain.ASKS:
                version = event.data.get("version")
                self._asked = max(self._asked, version) if isinstance(version, int) else self._asked
                self._news.set()

    async def _work(self) -> None:
        while True:
            await self.news(self._news)
            ready = self._wanted
            if ready is None:
                continue
            attributes: dict[str, str | int] = {"hr.run": self.run, "hr.version": ready.version}
            try:
                if self._committed(ready) and not await self._full_snapshot_due():
                    continue
                # A trace of its own, linked to the step; the regions that stage the version continue it.
                with tracing.span("weight version", root=True, links=[self._origin], attributes=attributes):
                    if self._committed(ready):
                        await self._add_full_snapshot()
                    else:
                        await self._publish(ready)
            except FileNotFoundError:
                # The trainer has deleted the file for a newer one, which is announced next.
                await self.event("snapshot_replaced", f"version {ready.version} is gone: {ready.path}", level="warning")
            except WrongSequence as error:
                newest = (await heads.read(self.bus, self.run, self.trust)).newest
                before = self.commit.head.manifest_seq if self.commit is not None else None
                if before != (newest.manifest_seq if newest is not None else None):
                    raise  # another sender publishes this run
                # Only records that are not valid heads were stored since: publish on top of them.
                await self.event("head_overtaken", f"version {ready.version}: {error}", level="warning")
                self.commit = await self._recover()
                self._news.set()
            except NoSnapshot as error:
                # Nobody announces this version again, so the location is asked again.
                self._unanswered += 1
                if self._unanswered & (self._unanswered - 1) == 0:
                    text = f"version {ready.version}: {error}"
                    await self.event("full_snapshot_failed", text, level="error", times=self._unanswered)
                await asyncio.sleep(AGAIN_S)
                self._news.set()
            except (WeightError, OSError) as error:
                if self._committed(ready):  # only the full snapshot failed; the next version tries again
                    await self.event("full_snapshot_failed", f"version {ready.version}: {error}", level="error")
                    continue
                self.store.drop([ready.version])
                await self.event("snapshot_refused", f"version {ready.version}: {error}", level="error")
            else:
                self._unanswered = 0

    def _committed(self, ready: SnapshotReady) -> bool:
        """Whether the head has this version or a newer one. The head's version number with other bits is a new
        incarnation, which is not committed yet."""
        if self.commit is None:
            return False
        head = self.commit.head
        made_of = head.source_hash or head.state_hash
        return ready.version < head.version or (ready.version, ready.state_hash) == (head.version, made_of)

    async def _publish(self, ready: SnapshotReady) -> None:
        try:
            base = await self._base()
        except NoSnapshot as error:
            await self.event("base_lost", f"{error}; publishing version {ready.version} as a full snapshot", "error")
            base = None
        section = self.config.weights
        path, new = await self._target(ready)
        target = Snapshot(path)
        before = self.commit
        if base is None:
            await self._require_stream(sum(map(state.nbytes, target.tensors)))
        cut = shards.assign(target.tensors, section.shards)
        if base is not None and before is not None and before.manifest.tensors != cut:
            await self.event(
                "tensors_changed", f"version {ready.version} has other tensors: publishing a full snapshot"
            )
            base = None
        hashes = before.manifest.block_hashes if before is not None and base is not None else b""
        encoding = self._encoding(target, base, hashes)
        self.commit = await release.release(
            self.bus,
            encoding,
            new,
            before,
            self._keep,
            signer=self.signer,
            after=self._last_head,
        )
        self.store.put(ready.version, new.state_hash)
        if base is None:
            await self._sweep()
        self.store.keep(0, [ready.version])
        await self._tell(encoding)
        if await self._full_snapshot_due():
            await self._add_full_snapshot()

    async def _full_snapshot_due(self) -> bool:
        """Whether the committed version needs a full snapshot: a receiver asks for one, the newest one is old, or its
        object is gone. NoSnapshot when the location does not answer."""
        commit = self.commit
        if commit is None:
            return False
        if commit.head.full_version < self._asked <= commit.head.version:
            return True
        if release.full_snapshot_due(commit, self.config.weights.anchor_every):
            return True
        name = commit.full_object
        return bool(name) and await asyncio.to_thread(self._location.size, name) is None

    async def _add_full_snapshot(self) -> None:
        """Publish a full snapshot of the committed version beside it."""
        base = await self._base()
        assert base is not None and self.commit is not None
        full = self._encoding(base, None, b"")
        self.commit = await release.add_full_snapshot(self.bus, full, self.commit, self._keep, signer=self.signer)
        await self._sweep()

    def _encoding(self, target: Snapshot, base: Snapshot | None, hashes: bytes) -> Encoding:
        section = self.config.weights
        return Encoding(
            target,
            base,
            name=section.codec,
            base_hashes=hashes,
            shards=section.shards,
            workers=min(section.shards, os.cpu_count() or 1),
        )

    async def _target(self, ready: SnapshotReady) -> tuple[Path, NewVersion]:
        """The file that is published, and its description.

        The trainer's file is rounded only when it has the bits that were announced.
        """
        kind = self.config.weights.precision
        new = NewVersion(self.run, ready.version, ready.state_hash, ready.learning_rate)
        if kind == "as_trained":
            return await asyncio.to_thread(self.store.take, ready.path, ready.version), new
        path = self.store.path(ready.version)

        def rounded() -> str:
            from headrace.weights.publishing import precision  # it needs torch, which takes seconds to import

            file_hash = snapshot.file_hash(ready.path)
            if file_hash != ready.state_hash:
                raise WeightError(f"the file has state {file_hash}, the trainer announced {ready.state_hash}")
            return precision.publish(ready.path, path, kind)

        state_hash = await asyncio.to_thread(rounded)
        return path, replace(new, state_hash=state_hash, precision=kind, source_hash=ready.state_hash)

    async def _base(self) -> Snapshot | None:
        """The committed version's file: the link to the trainer's file, or one that is built from the chain."""
        if self.commit is None:
            return None
        head = self.commit.head
        path = self.store.find(head.version, head.state_hash)
        if path is None:
            path = self.store.path(head.version)
            await chain.obtain(self.bus, head, path, self.store.find, trust=self.trust, fetch=self._snapshots.fetch)
            self.store.put(head.version, head.state_hash)
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
