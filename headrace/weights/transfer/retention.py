"""Removes files of detached full snapshots whose manifests were collected: the files follow the stream.

The newest full snapshot and those that no head names yet are never removed. So a version that collection keeps, because
of its chain or because of a pin, keeps the file that it is built from.
"""

import asyncio
from collections.abc import Collection
from pathlib import Path

from headrace.messages.weights import HeldFile
from headrace.weights import chain, snapshot
from headrace.weights.state import WeightError
from headrace.weights.transfer import copies


async def unneeded(source: chain.StreamSource, run: str, held: Collection[HeldFile]) -> list[HeldFile]:
    """Those of the files that no full snapshot in the stream refers to, of versions before the newest full snapshot."""
    versions = {file.version for file in held}
    named: dict[int, set[int]] = {}
    newest = -1
    async for _, head in chain.heads(source, run):
        newest = head.full_version
        if head.full_version in versions:
            named.setdefault(head.full_version, set()).add(head.full_seq)
    out = []
    for file in held:
        if file.version < newest and not await _kept(source, run, file, named.get(file.version, set())):
            out.append(file)
    return out


async def _kept(source: chain.StreamSource, run: str, file: HeldFile, seqs: set[int]) -> bool:
    for seq in seqs:
        try:
            manifest = await chain.manifest(source, run, seq)
        except (LookupError, WeightError):
            continue
        if manifest.detached and manifest.state_hash == file.state_hash:
            return True
    return False


async def sweep_shared(source: chain.StreamSource, run: str, folder: str | Path) -> list[Path]:
    """Remove a run's unneeded files, and copies of senders that have ended, from the folder that all nodes share; their
    paths. OSError."""
    abandoned = await asyncio.to_thread(copies.remove_abandoned, Path(folder) / run)
    held = {}
    for path in sorted((Path(folder) / run).glob("*.safetensors")):
        version, _, state_hash = path.stem.partition("-")
        if version.isascii() and version.isdigit():
            held[HeldFile(int(version), state_hash)] = path
    return abandoned + _removed([held[file] for file in await unneeded(source, run, held)])


async def sweep_store(source: chain.StreamSource, run: str, folder: Path) -> list[Path]:
    """Remove the unneeded full snapshots of a sender's store, whether the sender runs or not; their paths. OSError."""
    held = {}
    for path in sorted(folder.glob("*.safetensors")):
        if path.stem.isascii() and path.stem.isdigit():
            try:
                held[HeldFile(int(path.stem), await asyncio.to_thread(snapshot.file_hash, path))] = path
            except (WeightError, FileNotFoundError):
                continue
    return _removed([held[file] for file in await unneeded(source, run, held)])


def _removed(paths: list[Path]) -> list[Path]:
    for path in paths:
        path.unlink(missing_ok=True)
    return paths
