"""Removes the objects of full snapshots whose manifests were collected: objects follow the stream.

The newest full snapshot and those that no head names yet are never removed. So a version that collection keeps, because
of its chain or because of a pin, keeps the object that it is built from.
"""

import asyncio

from headrace.weights import chain
from headrace.weights.full.location import Location
from headrace.weights.full.snapshots import name_of
from headrace.weights.state import WeightError


async def sweep(source: chain.StreamSource, run: str, location: Location) -> list[str]:
    """Remove the objects before the newest full snapshot that no manifest in the stream names; their names.
    NoSnapshot when the location does not answer."""
    held = await asyncio.to_thread(location.versions)
    newest, seqs = -1, set()
    async for _, head in chain.heads(source, run):
        newest = head.full_version
        if head.full_version in held.values():
            seqs.add(head.full_seq)
    named = set()
    for seq in seqs:
        try:
            manifest = await chain.manifest(source, run, seq)
        except (LookupError, WeightError):
            continue
        named.add(name_of(manifest.version, manifest.chunks))
    gone = [name for name, version in held.items() if version < newest and name not in named]
    for name in gone:
        await asyncio.to_thread(location.remove, name)
    return gone
