"""The sender: publishes the trainer's snapshot files as versions in the stream.

It publishes the newest file and skips older ones; the trainer never waits for it. It keeps no state of its own: the
head record names the committed version, the last SnapshotReady names the version to publish, and a lost base is built
again from the chain. The head is written with an expected sequence, so the broker refuses one of two senders; the
refused sender fails, and after its restart it reads the head again. The sender signs the records that commit a version
with the publisher's key, which is only in its own credentials folder.

Where full snapshots are files on nodes (``[weights] full_snapshots``), it publishes only their manifests, and hands the
files out: it serves them to other nodes, or copies them to the shared folder. They stay as long as their manifests do.
"""

import asyncio
from pathlib import Path
from typing import ClassVar

from msgspec.structs import replace

from headrace.bus.broker import credentials, keys
from headrace.bus.errors import Unrecoverable, WrongSequence
from headrace.bus.nats import capacity
from headrace.bus.runtime import tracing
from headrace.bus.runtime.actor import Actor
from headrace.inner_paths import own_file
from headrace.messages.subjects import EVENT, WEIGHT_HEAD, token
from headrace.messages.training import SnapshotReady
from headrace.messages.weights import WeightManifest
from headrace.secret_files import SecretError
from headrace.weights import chain, heads, shards, snapshot, state
from headrace.weights.publishing import release
from headrace.weights.publishing.encoding import Encoding
from headrace.weights.publishing.release import Commit, NewVersion
from headrace.weights.receiving.store import SnapshotStore
from headrace.weights.signing import Trust
from headrace.weights.snapshot import Snapshot
from headrace.weights.state import WeightError
from headrace.weights.transfer import copies, node, retention
from headrace.weights.transfer.full_snapshots import NoSource, shared_path


class WeightSender(Actor):
    """SnapshotReady in; chunks, manifest and head out."""

    role: ClassVar[str] = "weight_sync"
    _served: node.ServedStore | None = None
    """Serves this node's files, where nodes fetch full snapshots from each other."""

    async def start(self) -> None:
        """Read the head, then follow the trainer's snapshots from the newest on."""
        self.store = SnapshotStore(Path(self.config.run.dir) / self.run / "nodes" / self.bus.node / "sender")
        """Links to the trainer's files: the base, the one that is being published, and the full snapshots that this
        node serves."""
        await asyncio.to_thread(self.store.scan)
        await self._take_key()
        self._detached = self.config.weights.full_snapshots != "broker"
        """Whether full snapshots are files on nodes."""
        self._fulls: set[int] = set()
        """Versions in the store that are full snapshots and stay."""
        await self._open_transfer()
        self.commit = await self._recover()
        await self._sweep()
        if self.commit is not None:
            await self._require_stream(self.commit.manifest.raw_bytes)
        elif expected := self._expected_bytes():
            await self._require_stream(expected)
        self._wanted: SnapshotReady | None = None
        self._origin: tracing.Link | None = None
        """The span, in a step's trace, that announced `_wanted`."""
        self._news = asyncio.Event()
        self.spawn(self._follow(), "snapshots")
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

    async def _open_transfer(self) -> None:
        """Serve full snapshots, and find those of other nodes, as the section says. Unrecoverable."""
        section, values = self.config.weights, await self.bus.kv("HR_NODES")
        try:
            self._served, self._fetcher = await node.opened(
                section,
                values,
                WrongSequence,
                self.run,
                token(self.bus.node),
                self._tell_source,
                store=self.store,
                actor="sender",
                port=section.peer_port + 1 if section.peer_port else 0,
                credentials=self.bus.credentials,
            )
        except (SecretError, OSError) as error:
            raise Unrecoverable(f"full snapshots cannot be served to other nodes: {error}") from error

    async def stop(self) -> None:
        """Serve nothing any more."""
        if self._served is not None:
            await self._served.close()

    async def _tell_source(self, text: str) -> None:
        await self.event("source_failed", text, level="warning")

    async def _fetch(self, manifest: WeightManifest, wanted: frozenset[int] | None, path: Path) -> Path:
        """Bring a full snapshot that other nodes have into the store."""
        if self._fetcher is None:
            raise NoSource(f"full snapshot {manifest.version} is a file on nodes, and [weights] names no place of it")
        path = self.store.path(manifest.version)

        async def arrived() -> None:
            self.store.put(manifest.version, manifest.state_hash)
            if self._served is not None:
                await self._served.name_files()

        await self._fetcher.bring(manifest, wanted, path, arrived)
        return path

    async def _hand_out(self, version: int, state_hash: str) -> None:
        """Make the file of a full snapshot available to other nodes, before a record names it."""
        section, path = self.config.weights, self.store.path(version)
        if section.full_snapshots == "file":
            there = shared_path(section.shared_dir, self.run, version, state_hash)
            await asyncio.to_thread(copies.share, path, there, state_hash)
            return
        assert self._served is not None
        self.store.put(version, state_hash)
        await self._served.name_files()

    async def _sweep(self) -> None:
        """Drop the files of full snapshots whose manifests were collected, and copies that nobody finishes."""
        section, commit = self.config.weights, self.commit
        if section.full_snapshots == "file":
            try:
                gone = await retention.sweep_shared(self.bus, self.run, section.shared_dir)
            except OSError as error:
                await self.event("files_not_removed", f"{section.shared_dir}: {error}", level="warning")
            else:
                if gone:
                    text = f"{len(gone)} files of full snapshots: {', '.join(map(str, gone))}"
                    await self.event("files_removed", text)
        if commit is None:
            return
        held = [file for file in self.store.files() if file.version < commit.head.full_version]
        self.store.drop([file.version for file in await retention.unneeded(self.bus, self.run, held)])
        newest = commit.head.full_version if commit.full_file else commit.head.full_version - 1
        self._fulls = {version for version in self.store.versions() if version <= newest}
        if self._served is not None:
            await self._served.name_files()

    async def _follow(self) -> None:
        where = EVENT.where(run=self.run, type=SnapshotReady.type_name)
        last = await self.bus.last("HR_EVENT", where)
        async for received in self.bus.follow("HR_EVENT", where, start=last.seq if last else 1):
            ready = received.message
            if isinstance(ready, SnapshotReady) and (self._wanted is None or ready.version >= self._wanted.version):
                try:
                    await asyncio.to_thread(own_file, Path(self.config.run.dir), ready.path, ".safetensors")
                except OSError:
                    pass  # the trainer has deleted it for a newer one, which is announced next
                except ValueError as error:
                    await self.event("snapshot_refused", f"version {ready.version}: {error}", level="error")
                    continue
                self._wanted, self._origin = ready, tracing.link(received)
                self._news.set()

    async def _work(self) -> None:
        while True:
            await self.news(self._news)
            ready = self._wanted
            if ready is None or (self._committed(ready) and not self._full_snapshot_due()):
                continue
            attributes: dict[str, str | int] = {"hr.run": self.run, "hr.version": ready.version}
            try:
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
            except (WeightError, OSError) as error:
                if self._committed(ready):  # only the full snapshot failed; the next version tries again
                    await self.event("full_snapshot_failed", f"version {ready.version}: {error}", level="error")
                    continue
                self.store.drop([ready.version])
                await self.event("snapshot_refused", f"version {ready.version}: {error}", level="error")

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
        except NoSource as error:
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
            signer=self.signer,
            after=self._last_head,
            hand_out=self._hand_out,
        )
        self.store.put(ready.version, new.state_hash)
        if base is None:
            await self._sweep()
        self.store.keep(0, [ready.version, *self._fulls])
        await self._tell(encoding)
        if self._full_snapshot_due():
            await self._add_full_snapshot()

    def _full_snapshot_due(self) -> bool:
        """Whether the committed version needs a full snapshot: the newest one is old, or its file is not where nodes
        look for it."""
        commit, section = self.commit, self.config.weights
        if commit is None:
            return False
        if release.full_snapshot_due(commit, section.anchor_every):
            return True
        if not commit.full_file:
            return False
        version = commit.head.full_version
        if section.full_snapshots == "file":
            return not shared_path(section.shared_dir, self.run, version, commit.full_file).exists()
        return self._served is None or self.store.find(version, commit.full_file) is None

    async def _add_full_snapshot(self) -> None:
        """Publish a full snapshot of the committed version beside it."""
        base = await self._base()
        if base is None or self.commit is None or not self._full_snapshot_due():
            return  # the search for the base has brought the file back
        full = self._encoding(base, None, b"")
        self.commit = await release.add_full_snapshot(
            self.bus, full, self.commit, signer=self.signer, hand_out=self._hand_out
        )
        await self._sweep()

    def _encoding(self, target: Snapshot, base: Snapshot | None, hashes: bytes) -> Encoding:
        section = self.config.weights
        return Encoding(
            target,
            base,
            name=section.codec,
            base_hashes=hashes,
            shards=section.shards,
            workers=section.encoders,
            detached=base is None and self._detached,
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
            await chain.obtain(self.bus, head, path, self.store.find, trust=self.trust, fetch=self._fetch)
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
