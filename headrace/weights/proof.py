"""Proves a chain from the stream alone: checks every signature, parent, chunk and block, version by version.

The idea: an auditor needs only the stream and the publisher's public key. Versions are built one after the other in one
folder, each from the version before by its delta, and every block of every version is hashed. Full snapshots are built
separately and must have the state hash of their version.
"""

import tempfile
from pathlib import Path

import msgspec

from headrace.messages import subjects
from headrace.messages.weights import WeightHead, WeightManifest
from headrace.weights import chain, heads, signing
from headrace.weights.receiving.staging import BrokenVersion
from headrace.weights.signing import Trust
from headrace.weights.state import WeightError


class Proof(msgspec.Struct, kw_only=True):
    """The counts of a proof. `faults` is empty when every check passed."""

    versions: int = 0
    full_snapshots: int = 0
    chunks: int = 0
    wire_bytes: int = 0
    collected: int = 0
    """Number of versions that are no longer in the stream."""
    first: int = -1
    newest: int = -1
    state_hash: str = ""
    signed: bool = True
    faults: list[str] = []


async def prove(
    source: chain.StreamSource, run: str, trust: Trust | None = None, fetch: chain.Fetch | None = None
) -> Proof:
    """Build and check every version of a run. trust: the publishers whose signatures are required; None checks none.
    fetch: brings full snapshots that are files, as in `chain.build`."""
    proof = Proof(faults=[])
    book = heads.Heads(run, trust)
    with tempfile.TemporaryDirectory(prefix="headrace-verify-") as text:
        folder = Path(text)
        walk = _Walk(source, run, trust, folder, proof, fetch)
        async for stored in source.history(chain.STREAM, subjects.WEIGHT_HEAD.at(run=run)):
            try:
                await walk.version(book.take(stored))
            except LookupError:
                proof.collected += 1
            except WeightError as error:
                proof.faults.append(str(error))
    return proof


class _Walk:
    """The versions of a run in order, each built from the one before."""

    def __init__(
        self,
        source: chain.StreamSource,
        run: str,
        trust: Trust | None,
        folder: Path,
        proof: Proof,
        fetch: chain.Fetch | None,
    ):
        self.fetch = fetch
        self.source, self.run, self.trust, self.folder, self.proof = source, run, trust, folder, proof
        self.before: WeightManifest | None = None
        self.file: Path | None = None
        self.full_snapshots: set[int] = set()

    async def version(self, head: WeightHead) -> None:
        """Check one committed version. LookupError when it is gone, WeightError when a check fails."""
        manifest = await chain.manifest(self.source, self.run, head.manifest_seq, self.trust)
        if (manifest.version, manifest.state_hash) != (head.version, head.state_hash):
            raise BrokenVersion(f"the head of version {head.version} names a manifest of version {manifest.version}")
        path = self.folder / f"{self.proof.versions % 2}.safetensors"
        if manifest.base_version >= 0 and self.before is not None and self.before.state_hash == manifest.base_hash:
            if signing.digest(self.before) != manifest.parent:
                raise BrokenVersion(
                    f"version {manifest.version} names another parent than the manifest of "
                    f"version {self.before.version}"
                )
            await chain.build(self.source, chain.BuildPlan((manifest,), self.file), path)
        else:
            way = await chain.plan(self.source, head, trust=self.trust)
            await chain.build(self.source, way, path, fetch=self.fetch)
        if manifest.base_version < 0:
            self.full_snapshots.add(head.manifest_seq)
        if head.full_seq not in (0, head.manifest_seq, *self.full_snapshots):
            await self._full_snapshot(head)
        proof = self.proof
        proof.versions += 1
        proof.chunks += len(manifest.chunks)
        proof.wire_bytes += manifest.wire_bytes
        proof.signed = proof.signed and bool(manifest.signature) and bool(head.signature)
        proof.first = head.version if proof.first < 0 else proof.first
        proof.newest, proof.state_hash = head.version, head.state_hash
        self.before, self.file = manifest, path

    async def _full_snapshot(self, head: WeightHead) -> None:
        self.full_snapshots.add(head.full_seq)
        try:
            full = await chain.manifest(self.source, self.run, head.full_seq, self.trust)
        except LookupError:
            return
        if full.base_version >= 0 or full.version != head.full_version:
            raise BrokenVersion(f"the head of version {head.version} names a full snapshot that is a delta")
        path = self.folder / "full snapshot.safetensors"
        await chain.build(self.source, chain.BuildPlan((full,), None), path, fetch=self.fetch)
        self.proof.full_snapshots += 1
        self.proof.wire_bytes += full.wire_bytes
