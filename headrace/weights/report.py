"""Reports about the chain of a run, as text: `headrace weights log | show | verify | diff`."""

import tempfile
import time
from pathlib import Path

from headrace.messages import subjects
from headrace.messages.weights import WeightHead, WeightManifest
from headrace.weights import chain, proof, snapshot, state
from headrace.weights.codecs import ulp_delta
from headrace.weights.codecs.codec import CODECS
from headrace.weights.publishing.encoding import Encoding
from headrace.weights.signing import Trust, digest
from headrace.weights.snapshot import Snapshot
from headrace.weights.state import WeightError


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def _ratio(manifest: WeightManifest) -> str:
    return f"{manifest.raw_bytes / manifest.wire_bytes:.1f}x" if manifest.wire_bytes else "empty"


def _base(manifest: WeightManifest) -> str:
    return "full snapshot" if manifest.base_version < 0 else f"{manifest.base_version} +"


def _changed(manifest: WeightManifest) -> str:
    return f"{100 * manifest.changed / max(1, manifest.elements):.3g} %"


async def log(source: chain.StreamSource, run: str) -> str:
    """A line per committed version: time, base, share of changed elements, bytes, compression ratio, state hash."""
    lines = [f"{'version':>7}  {'committed':19}  {'from':>7}  {'changed':>8}  {'wire':>10}  {'ratio':>7}  state"]
    async for stored in source.history(chain.STREAM, subjects.WEIGHT_HEAD.at(run=run)):
        commit: WeightHead = stored.message
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stored.time))
        try:
            manifest = await chain.manifest(source, run, commit.manifest_seq)
        except LookupError:
            lines.append(f"{commit.version:>7}  {when}  {'collected':>7}  {'':49}  {commit.state_hash[:16]}")
            continue
        lines.append(
            f"{manifest.version:>7}  {when}  {_base(manifest):>7}  {_changed(manifest):>8}  "
            f"{_size(manifest.wire_bytes):>10}  {_ratio(manifest):>7}  {manifest.state_hash[:16]}"
        )
    if len(lines) == 1:
        return f"run {run} has published no version"
    return "\n".join(lines)


async def commit_of(source: chain.StreamSource, run: str, version: int) -> WeightHead:
    """The head record of a version; -1 means the newest. WeightError when it was never committed."""
    head: WeightHead | None = None
    async for _, commit in chain.heads(source, run):
        if version in (-1, commit.version):
            head = commit
    if head is None:
        raise WeightError(f"run {run} never committed {'a version' if version < 0 else f'version {version}'}")
    return head


async def show(source: chain.StreamSource, run: str, version: int = -1) -> str:
    """The manifest of a version, and the path along which a node without any file would build it. -1: the newest.
    WeightError for a version that was never committed."""
    commit = await commit_of(source, run, version)
    stored = await chain.manifest(source, run, commit.manifest_seq)
    way = await chain.plan(source, commit)
    gbs = f"{stored.raw_bytes / stored.encode_s / 1e9:.2f} GB/s" if stored.encode_s else "-"
    rows = {
        "version": f"{stored.version} of run {run}",
        "state": stored.state_hash,
        "base": f"version {stored.base_version}, {stored.base_hash}"
        if stored.base_version >= 0
        else "none: a full snapshot",
        "manifest": f"sequence {commit.manifest_seq}, sha256 {digest(stored)[:16]}, parent {stored.parent[:16] or '-'}",
        "signed by": stored.signer or "no publisher",
        "precision": stored.precision or "as trained",
        "learning rate": f"{stored.learning_rate:g}",
        "tensors": f"{len(stored.tensors)}, {stored.elements} elements, {_size(stored.raw_bytes)}",
        "blocks": f"{len(stored.block_hashes) // 16}",
        "changed": f"{stored.changed} elements, {_changed(stored)}",
        "wire": f"{_size(stored.wire_bytes)} in {len(stored.chunks)} chunks, {_ratio(stored)}, encoded at {gbs}"
        f"{', an object at [weights] full_snapshots_url' if stored.detached else ''}",
        "from nothing": f"full snapshot {way.manifests[0].version} and {len(way.manifests) - 1} deltas, "
        f"{_size(way.wire_bytes)}",
    }
    return "\n".join(f"{key:>14}  {value}" for key, value in rows.items())


async def verify(
    source: chain.StreamSource,
    run: str,
    version: int = -1,
    *,
    trust: Trust | None = None,
    fetch: chain.Fetch | None = None,
) -> tuple[bool, str]:
    """Build a version (-1: the newest) from its full snapshot, as a node without any file would, and check every chunk,
    block, parent and the state hash; with `trust` also every signature. fetch: as in `chain.build`.

    Returns True and a sentence when every check passed, otherwise False and the first fault.
    """
    try:
        commit = await commit_of(source, run, version)
        way = await chain.plan(source, commit, trust=trust)
        current = await chain.manifest(source, run, commit.manifest_seq)
        while current.base_version >= 0 and current.version > way.manifests[0].version:
            before = await chain.manifest(source, run, current.base_seq)
            if digest(before) != current.parent:
                return (
                    False,
                    f"version {current.version} has another parent than the manifest of version {before.version}",
                )
            current = before
        with tempfile.TemporaryDirectory(prefix="headrace-verify-") as folder:
            path = Path(folder) / "v.safetensors"
            await chain.build(source, way, path, fetch=fetch)
            state_hash = snapshot.file_hash(path)
    except (WeightError, LookupError) as error:
        return False, str(error)
    if state_hash != commit.state_hash:
        return False, f"version {commit.version} builds to state {state_hash}, not {commit.state_hash}"
    return True, (
        f"version {commit.version} of run {run} holds: state {state_hash}, from full snapshot "
        f"{way.manifests[0].version} through {len(way.manifests) - 1} deltas, {_size(way.wire_bytes)}"
    )


async def verify_all(
    source: chain.StreamSource, run: str, trust: Trust | None = None, fetch: chain.Fetch | None = None
) -> tuple[bool, str]:
    """Build and hash the whole chain from the stream. Returns True and a sentence, or False and every fault, one per
    line. fetch: as in `chain.build`."""
    proven = await proof.prove(source, run, trust, fetch)
    if proven.faults:
        return False, "\n".join(proven.faults)
    if not proven.versions:
        return False, f"run {run} has published no version that is still in the stream"
    text = (
        f"run {run} holds: versions {proven.first} to {proven.newest}, {proven.versions} built and hashed, "
        f"{proven.full_snapshots} full snapshots beside them, {proven.chunks} chunks, "
        f"{_size(proven.wire_bytes)}, "
        f"{'all signed' if proven.signed else 'not all signed'}; state {proven.state_hash}"
    )
    return True, text + (f"; {proven.collected} older versions are collected" if proven.collected else "")


def diff(before: Snapshot, after: Snapshot, *, lines: int = 20) -> str:
    """The differences of two files, as text. lines: largest number of tensors to list.

    Per tensor the share of changed elements and the largest change in units in the last place (of the bit patterns);
    then the bytes of a delta between the files in each codec.
    """
    if before.tensors != after.tensors:
        theirs = {info.name for info in before.tensors} ^ {info.name for info in after.tensors}
        return f"other tensors: {', '.join(sorted(theirs)) or 'the same names with other shapes or dtypes'}"
    rows, total = [], 0
    for info in before.tensors:
        at, old, new = ulp_delta.changes([before.array(info)], [after.array(info)])
        total += at.size
        if at.size:
            zigzagged = ulp_delta.zigzag_difference(old, new)
            rows.append((at.size, info, (int(zigzagged.max()) + 1) // 2))
    elements = sum(map(state.elements, before.tensors))
    out = [f"{total} of {elements} elements differ ({100 * total / max(1, elements):.3g} %), in {len(rows)} tensors"]
    for count, info, most in sorted(rows, key=lambda row: -row[0])[:lines]:
        share = 100 * count / max(1, state.elements(info))
        out.append(f"{share:>9.3g} %  {count:>12}  up to {most:>10} ULP  {info.dtype:8} {info.name}")
    for name in CODECS:
        encoding = Encoding(after, before, name=name)
        wire = sum(map(len, encoding.chunks()))
        out.append(f"{name:>10}: {_size(wire)}, {encoding.raw_bytes / max(1, wire):.1f}x")
    return "\n".join(out)
