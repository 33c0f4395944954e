"""Proving a chain from the stream alone: every signature, parent, chunk and slab, version by version.

The idea: who doubts a run needs nothing but its stream and the publisher's public key. Versions are built one after the
other in one folder, each from the one before as its delta says, and every slab of every version is hashed on the way;
anchors are built apart and have to give the state of the version that they stand beside.
"""

import tempfile
from pathlib import Path

import msgspec

from headrace.messages import subjects
from headrace.messages.weights import WeightHead, WeightManifest
from headrace.weights import chain, heads, signing
from headrace.weights.shadow import Refused, check_chunk
from headrace.weights.signing import Trust
from headrace.weights.state import WeightError


class Proof(msgspec.Struct, kw_only=True):
    """What was found. `faults` is empty when all of it holds."""

    versions: int = 0
    anchors: int = 0
    folds: int = 0
    chunks: int = 0
    wire_bytes: int = 0
    collected: int = 0
    """Versions that are no longer in the stream."""
    first: int = -1
    newest: int = -1
    state_hash: str = ""
    signed: bool = True
    faults: list[str] = []


async def prove(source: chain.Source, run: str, trust: Trust | None = None) -> Proof:
    """Build every version of a run and check all that can be checked."""
    proof = Proof(faults=[])
    book = heads.Heads(run, trust)
    with tempfile.TemporaryDirectory(prefix="headrace-verify-") as text:
        folder = Path(text)
        walk = _Walk(source, run, trust, folder, proof)
        async for stored in source.history(chain.STREAM, subjects.WEIGHT_HEAD.at(run=run)):
            try:
                await walk.version(book.take(stored))
            except LookupError:
                proof.collected += 1
            except WeightError as error:
                proof.faults.append(str(error))
        async for fold in chain.folds(source, run, trust):
            try:
                manifest = await chain.manifest(source, run, fold.manifest_seq, trust)
                await walk.chunks(manifest)
                proof.folds += 1
            except LookupError:
                continue
            except WeightError as error:
                proof.faults.append(f"fold to version {fold.version}: {error}")
    return proof


class _Walk:
    """The versions of a run in order, each built beside the one before."""

    def __init__(self, source: chain.Source, run: str, trust: Trust | None, folder: Path, proof: Proof):
        self.source, self.run, self.trust, self.folder, self.proof = source, run, trust, folder, proof
        self.before: WeightManifest | None = None
        self.file: Path | None = None
        self.anchors: set[int] = set()

    async def version(self, head: WeightHead) -> None:
        """Check one committed version. LookupError when it is gone, WeightError says what does not hold."""
        found = await chain.manifest(self.source, self.run, head.manifest_seq, self.trust)
        if (found.version, found.state_hash) != (head.version, head.state_hash):
            raise Refused(f"the head of version {head.version} names a manifest of version {found.version}")
        path = self.folder / f"{self.proof.versions % 2}.safetensors"
        if found.base_version >= 0 and self.before is not None and self.before.state_hash == found.base_hash:
            if signing.digest(self.before) != found.parent:
                raise Refused(
                    f"version {found.version} names another parent than the manifest of {self.before.version}"
                )
            await chain.build(self.source, chain.Plan((found,), self.file), path)
        else:
            way = await chain.plan(self.source, head, trust=self.trust, folded=False)
            await chain.build(self.source, way, path)
        if found.base_version < 0:
            self.anchors.add(head.manifest_seq)
        if head.anchor_seq not in (0, head.manifest_seq, *self.anchors):
            await self._anchor(head)
        proof = self.proof
        proof.versions += 1
        proof.chunks += len(found.chunks)
        proof.wire_bytes += found.wire_bytes
        proof.signed = proof.signed and bool(found.signature) and bool(head.signature)
        proof.first = head.version if proof.first < 0 else proof.first
        proof.newest, proof.state_hash = head.version, head.state_hash
        self.before, self.file = found, path

    async def _anchor(self, head: WeightHead) -> None:
        self.anchors.add(head.anchor_seq)
        try:
            anchor = await chain.manifest(self.source, self.run, head.anchor_seq, self.trust)
        except LookupError:
            return
        if anchor.base_version >= 0 or anchor.version != head.anchor_version:
            raise Refused(f"the head of version {head.version} names an anchor that is none")
        await chain.build(self.source, chain.Plan((anchor,), None), self.folder / "anchor.safetensors")
        self.proof.anchors += 1
        self.proof.wire_bytes += anchor.wire_bytes

    async def chunks(self, manifest: WeightManifest) -> None:
        """Check the chunks of a manifest alone."""
        for info in manifest.chunks:
            check_chunk(manifest, info, await chain.chunk(self.source, manifest, info))
