"""Backs up every stream and bucket of a run's broker into a folder, and restores them into a fresh broker.

A folder holds a copy per stream and `backup.json`, which is written last, with sizes and hashes. Presence is left out,
because it names the actors that are alive now.
"""

import hashlib
import shutil
import time
from pathlib import Path
from typing import Any

import msgspec

import headrace
from headrace.bus.broker import credentials
from headrace.bus.broker.permissions import NAMES
from headrace.bus.connection import Bus
from headrace.bus.errors import BusError
from headrace.bus.nats import snapshots, streams

MANIFEST = "backup.json"
_PRESENCE = "HR_PRESENCE"


class Copy(msgspec.Struct, kw_only=True):
    """One stream of a backup."""

    stream: str
    bytes: int
    sha256: str
    messages: int
    about: dict[str, Any]
    """The broker's configuration and state of the stream."""


class Backup(msgspec.Struct, kw_only=True):
    """A finished backup."""

    run: str
    headrace: str
    made: float
    copies: list[Copy]

    @property
    def messages(self) -> int:
        """Messages in all of its streams."""
        return sum(copy.messages for copy in self.copies)


async def back_up(bus: Bus, run: str, folder: Path, *, live: bool = False) -> Backup:
    """Copy all streams and buckets. BusError while actors are alive, unless `live`. With `live` the copies are of
    different moments, so the ledger of a restored run may not balance."""
    alive = len(await (await bus.kv(_PRESENCE)).items())
    if alive and not live:
        raise BusError(
            f"{alive} actors are alive, so streams would be copied at different moments: stop the run (headrace down, "
            f"systemctl stop headrace.target) and wait {streams.PRESENCE_S:g} s, or pass --live"
        )
    if folder.exists() and any(folder.iterdir()):
        raise BusError(f"{folder} is not empty; name a new folder")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    copies = []
    for name in NAMES:
        if name == f"KV_{_PRESENCE}":
            continue
        file = folder / name
        about = await snapshots.save(bus.connection, name, file)
        copies.append(
            Copy(
                stream=name,
                bytes=file.stat().st_size,
                sha256=_hash(file),
                messages=about["state"]["messages"],
                about=about,
            )
        )
    writers = _writers(bus)
    if writers is not None and writers.exists():
        shutil.copyfile(writers, folder / credentials.WRITERS)
    backup = Backup(run=run, headrace=headrace.__version__, made=time.time(), copies=copies)
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(backup)))
    return backup


async def restore(bus: Bus, folder: Path) -> Backup:
    """Restore a backup into a broker without streams, then declare what it lacks. All hashes are checked first. The
    public keys of the backup's writers go into the connection's folder of credentials."""
    try:
        backup = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Backup)
    except FileNotFoundError:
        raise BusError(f"{folder} has no {MANIFEST}: it is not a finished backup; name another folder") from None
    except msgspec.DecodeError as error:
        raise BusError(f"{folder / MANIFEST} cannot be read: {error}") from None
    for copy in backup.copies:
        if copy.stream not in NAMES:
            raise BusError(f"{folder / MANIFEST} names the stream {copy.stream!a:.80}, which headrace does not have")
        if not (folder / copy.stream).is_file() or _hash(folder / copy.stream) != copy.sha256:
            raise BusError(f"{folder / copy.stream} is missing or damaged, so nothing was restored; use another backup")
    for copy in backup.copies:
        await snapshots.load(bus.connection, copy.stream, copy.about, folder / copy.stream)
        restored = msgspec.json.decode(await bus.connection.api(f"STREAM.INFO.{copy.stream}"))["state"]["messages"]
        if restored != copy.messages:
            raise BusError(
                f"{copy.stream} has {restored} messages after the restore, expected {copy.messages}; restore again"
            )
    await streams.declare(bus)
    if (writers := _writers(bus)) is not None and (folder / credentials.WRITERS).exists():
        credentials.trust(writers.parent, folder / credentials.WRITERS)
    return backup


def _writers(bus: Bus) -> Path | None:
    """The file of public keys beside the seeds of a connection; None for one without credentials."""
    if bus.credentials is None:
        return None
    return (bus.credentials if bus.credentials.is_dir() else bus.credentials.parent) / credentials.WRITERS


def _hash(file: Path) -> str:
    with file.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()
