"""Claim checks between processes of one node: the payload lies in a file that readers map, the bus carries its digest.

The idea: a large payload that is read on the node that wrote it (a rollout's trajectory, by the judge and the trainer
beside it) need not go through the broker's socket twice. The writer stores it in a folder in memory under its hash and
publishes the same small reference as a claim check on HR_BLOB. A reader maps the file, checks it and decodes from the
mapping. A reader without the file, on another node or after a crash, reads HR_BLOB.

`upload` says when a payload is stored in HR_BLOB too:
    before   stored in HR_BLOB before the reference is published: only reading is cheaper, not writing
    after    some seconds later, by whichever process of the node comes first; a node that is lost in between loses the
             payload, a process that is killed does not
    never    for runs on one node, with a folder on the broker's own disk: the file is the only copy and as safe as
             the broker's own

Crash-safe: a file gets its name when it is complete; one that is not yet uploaded has a second name in `pending`, which
is made before the first and goes last. Safe from others: only this user may open the folder (0700), files are written
once (0400), names are digests, and content with another digest than its name is deleted. Users' data, which a purge
has to find, never lies here: it goes to the broker. Collected: files older than the oldest record that is kept
(`collect`); beyond `CAPACITY` the oldest uploaded files; all files when the last process leaves.

Trade-off: a file is checked by xxh3, which detects damage but not malice. Only the same user on the same node can write
here, and that user can read the credentials of every actor anyway. HR_BLOB's names are sha256 throughout.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import itertools
import mmap
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import xxhash

from headrace.bus.errors import BusError, MessageGone
from headrace.bus.nats.connection import NatsConnection
from headrace.bus.payloads import claim_checks
from headrace.config import Bus as BusSection
from headrace.messages.codec import ENCODING_HEADER, TYPE_HEADER
from headrace.messages.operations import BlobRef
from headrace.messages.subjects import stream_of

Upload = Literal["before", "after", "never"]

FROM = 64 << 10
"""Bytes from which a payload is stored in the folder; a smaller one is cheaper on the bus itself."""
STREAMS = ("HR_TRAJ", "HR_TURN", "HR_SCORE")
"""Streams of episodes, whose age the trainer's purge knows."""
UPLOAD_AFTER_S = 2.0
"""Age at which a payload is uploaded: by then its readers on this node have usually been there."""
UPLOAD_PATIENCE_S = 15.0
"""How long a reader on another node waits for a young payload to arrive in HR_BLOB."""
CAPACITY = 2 << 30
"""Bytes of the folder above which uploaded files are removed, oldest first."""
TRIM_EVERY = 30
"""Searches for files to upload per check of the folder's size."""
RESERVE = 64 << 20
"""Bytes of the file system that must stay free: with fewer, payloads go through the broker."""
LARGE = 4 << 20
"""Bytes from which hashing and copying run in a thread."""
_NAME = re.compile(r"[0-9a-f]{32}|[0-9a-f]{64}")


class SharedMemoryStore:
    """One process's view of the node's folder."""

    def __init__(self, folder: Path, upload: Upload, node: str) -> None:
        self.folder, self.pending, self.upload, self.node = folder, folder / "pending", upload, node
        self._numbers = itertools.count()
        self._lock = -1
        """A shared lock of all processes that use the folder: the last one to leave removes it."""

    @classmethod
    def from_config(cls, config: BusSection, run: str, node: str) -> "SharedMemoryStore | None":
        """The folder of a run as `[bus]` says, None when it names none. BusError."""
        return (
            cls.open(Path(config.blob_dir) / f"headrace-{run}", config.blob_upload, node) if config.blob_dir else None
        )

    @classmethod
    def open(cls, folder: str | Path, upload: Upload, node: str) -> "SharedMemoryStore":
        """Make or join the folder. BusError when other users can access it."""
        shared_memory = cls(Path(folder), upload, node)
        try:
            while shared_memory._lock < 0:
                shared_memory._enter()
        except OSError as error:
            raise BusError(f"[bus] blob_dir: {error}") from error
        for temporary in shared_memory.folder.glob(".*-*"):
            if not Path(f"/proc/{temporary.name[1:].partition('-')[0]}").exists():
                temporary.unlink(missing_ok=True)
        return shared_memory

    def _enter(self) -> None:
        """Make the folder where it is missing, check it, and lock it; not locked when it was removed meanwhile."""
        for path in (self.folder, self.pending):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise BusError(f"{path} must be a folder of this user with mode 700: set [bus] blob_dir to another")
        name = self.folder / ".lock"
        lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_SH)
        if name.exists() and os.path.samestat(os.fstat(lock), name.stat()):
            self._lock = lock
        else:
            os.close(lock)

    def close(self) -> None:
        """Leave the folder. The last process to leave removes it when the broker has all of it too."""
        if self._lock < 0:
            return
        lock, self._lock = self._lock, -1
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self.upload != "never" and not any(self.pending.iterdir()):
                shutil.rmtree(self.folder, ignore_errors=True)
        os.close(lock)

    def takes(self, subject: str, size: int) -> bool:
        """Whether a payload of this size on this subject belongs here."""
        stream = stream_of(subject) if size >= FROM else None
        return stream is not None and stream.name in STREAMS

    async def put(self, store: claim_checks.Store, payload: bytes, headers: Mapping[str, str]) -> BlobRef | None:
        """Store a payload; None when there is no space for it."""
        digest, check = await asyncio.to_thread(self._lay, payload) if len(payload) > LARGE else self._lay(payload)
        if not digest:
            return None
        if self.upload == "before":
            await claim_checks.put(store, payload, headers, digest=digest)
        return BlobRef(
            sha256=digest,
            bytes=len(payload),
            chunks=0 if self.upload == "never" else claim_checks.chunks(len(payload)),
            type=headers[TYPE_HEADER],
            encoding=headers.get(ENCODING_HEADER, ""),
            node=self.node,
            check=check,
        )

    def _lay(self, payload: bytes) -> tuple[str, str]:
        """The payload's name and check; empty when it could not be written."""
        check = xxhash.xxh3_128_hexdigest(payload)
        digest = check if self.upload == "never" else hashlib.sha256(payload).hexdigest()
        name = self.folder / digest
        with contextlib.suppress(FileNotFoundError):
            os.utime(name)  # stored already; its age starts anew, because this record may outlive the first one
            return digest, check
        temporary = self.folder / f".{os.getpid()}-{next(self._numbers)}"
        try:
            disk = os.statvfs(self.folder)
            if disk.f_bavail * disk.f_frsize < len(payload) + RESERVE:
                return "", ""
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400), "wb") as file:
                file.write(payload)
            if self.upload == "after":
                with contextlib.suppress(FileExistsError):
                    os.link(temporary, self.pending / digest)
            os.rename(temporary, name)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            return "", ""
        return digest, check

    async def get(self, ref: BlobRef) -> memoryview | None:
        """The payload, mapped and verified; None when it is not here. A damaged file is removed."""
        if not ref.check or not _NAME.fullmatch(ref.sha256):
            return None
        path = self.folder / ref.sha256
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            payload = await asyncio.to_thread(_mapped, file, ref) if ref.bytes > LARGE else _mapped(file, ref)
            if payload is None:
                await asyncio.to_thread(self._discard_damaged, file, path)
            return payload
        finally:
            os.close(file)

    def _discard_damaged(self, file: int, path: Path) -> None:
        """Remove a file whose content is not what its name says. The reference does not decide that: anyone may have
        written it."""
        with os.fdopen(os.dup(file), "rb") as content:
            if len(path.name) == 64:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
            else:
                digest = hashlib.file_digest(content, xxhash.xxh3_128).hexdigest()
            if digest == path.name:
                return
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), path.lstat()):  # another process may have laid it anew
                    (self.pending / path.name).unlink(missing_ok=True)
                    path.unlink()

    async def upload_for_ever(self, store: claim_checks.Store) -> None:
        """Upload files that are old enough, at intervals."""
        for turn in itertools.count(1):
            await asyncio.sleep(UPLOAD_AFTER_S / 2)
            with contextlib.suppress(BusError):  # the file stays where it is
                await self.send(store, older_s=UPLOAD_AFTER_S)
            if turn % TRIM_EVERY == 0:
                await asyncio.to_thread(self.trim)

    async def send(self, store: claim_checks.Store, *, older_s: float = 0.0) -> int:
        """Upload pending files of at least this age, also those of dead processes; how many. No two processes send the
        same file."""
        sent, now = 0, time.time()
        for path in self._files(self.pending):
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                if now - path.stat().st_mtime < older_s:
                    continue
                with path.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    payload = file.read()
                    if hashlib.sha256(payload).hexdigest() == path.name:
                        await claim_checks.put(store, payload, {TYPE_HEADER: ""}, digest=path.name)
                        sent += 1
                    path.unlink()
        return sent

    def collect(self, before: float) -> int:
        """Remove files older than a moment, whose records are not kept any more; how many."""
        gone = 0
        for path in self._files(self.folder):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < before:
                    (self.pending / path.name).unlink(missing_ok=True)
                    path.unlink()
                    gone += 1
        return gone

    def trim(self, capacity: int = CAPACITY) -> int:
        """Remove uploaded files beyond the capacity, oldest first; how many. Never the only copy."""
        if self.upload == "never":
            return 0
        files: list[tuple[float, int, Path]] = []
        for path in self._files(self.folder):
            with contextlib.suppress(FileNotFoundError):
                about = path.stat()
                files.append((about.st_mtime, about.st_size, path))
        over, gone = sum(size for _, size, _ in files) - capacity, 0
        for _, size, path in sorted(files):
            if over <= 0:
                break
            if not (self.pending / path.name).exists():
                path.unlink(missing_ok=True)
                over, gone = over - size, gone + 1
        return gone

    def _files(self, folder: Path) -> Iterator[Path]:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries]
        return (folder / name for name in names if _NAME.fullmatch(name))


def _mapped(file: int, ref: BlobRef) -> memoryview | None:
    """The content of an open file of the folder; None where it is not what the reference says."""
    status = os.fstat(file)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_size == ref.bytes > 0:
        mapped = mmap.mmap(file, ref.bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ)
        if xxhash.xxh3_128_hexdigest(mapped) == ref.check:
            return memoryview(mapped)
    return None


async def fetch(
    connection: NatsConnection, shared_memory: SharedMemoryStore | None, ref: BlobRef, stored: float
) -> bytes | memoryview:
    """The content of a claim check: from a file of this node, else from the broker. MessageGone, BusError.

    stored: when the reference was stored, in seconds since the epoch. A young reference may arrive before its content.
    """
    payload = await shared_memory.get(ref) if shared_memory is not None else None
    pause = 0.1
    while payload is None:
        try:
            if not ref.chunks:
                raise MessageGone(f"blob {ref.sha256} has no file on this node")
            return await claim_checks.get(connection, ref)
        except MessageGone as error:
            if not ref.node or not ref.chunks or time.time() - stored > UPLOAD_PATIENCE_S:
                where = f"; it was stored on {ref.node} and not uploaded" if ref.node else ""
                raise MessageGone(f"{error}{where}") from None
        await asyncio.sleep(pause)
        pause = min(2 * pause, 2.0)
    return payload
