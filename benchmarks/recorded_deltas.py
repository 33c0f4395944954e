"""Measures the deltas of a recorded run: rebuilds every published version from its stream and encodes it per codec.

`python -m benchmarks.weight_delta --run RUN` calls this. A version whose bytes are those of the one before (a refused
step, a batch without advantage) is counted and left out of the means, because its delta is empty.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.conditions import Figures
from headrace.cli.weights import snapshots_of
from headrace.config import Weights, load
from headrace.launch import runs
from headrace.launch.session import bus_of, looped
from headrace.messages.weights import WeightHead
from headrace.weights import chain
from headrace.weights.codecs import ulp_delta
from headrace.weights.codecs.codec import CODECS
from headrace.weights.signing import Trust
from headrace.weights.snapshot import Snapshot

Measure = Callable[[str, Snapshot, Snapshot, Path, int], Figures]
"""`benchmarks.weight_delta.ours`."""


def measure(run: str, codec: Measure, repeats: int) -> Figures:
    """Figures of every step of a run, by version, and their means."""
    figures: Figures = {}

    async def body() -> int:
        folder = runs.find(run)
        section = load(folder.config).weights if folder.config.is_file() else Weights()
        async with bus_of(folder) as bus:
            trust = Trust.load(bus.credentials, section.publishers, unsigned=section.unsigned)
            heads = [head async for _, head in chain.heads(bus, folder.id)]
            with tempfile.TemporaryDirectory(prefix="headrace-delta-") as text:
                fetch = snapshots_of(folder, section).fetch
                figures.update(await of_versions(bus, heads, trust, Path(text), codec, repeats, fetch))
        return 0

    looped(body())
    return figures


async def of_versions(
    bus: chain.StreamSource,
    heads: list[WeightHead],
    trust: Trust,
    folder: Path,
    codec: Measure,
    repeats: int,
    fetch: chain.Fetch | None = None,
) -> Figures:
    """`measure` over an open stream. heads: of the versions, oldest first; folder: holds two versions at a time.
    fetch: of full snapshots; None where the stream holds them."""
    figures: Figures = {}
    rows: list[Figures] = []
    unchanged = 0
    older: tuple[int, str, Path] | None = None
    for head in heads:
        path = folder / f"{head.version}.safetensors"

        def find(version: int, state_hash: str, known: tuple[int, str, Path] | None = older) -> Path | None:
            return known[2] if known is not None and known[:2] == (version, state_hash) else None

        await chain.obtain(bus, head, path, find, trust=trust, fetch=fetch)
        if older is not None:
            share, single = changed(Snapshot(older[2]), Snapshot(path))
            if share == 0.0:
                unchanged += 1
            else:
                row: Figures = {"changed_pct": round(100 * share, 4), "one_ulp_pct": round(100 * single, 1)}
                for name in CODECS:
                    row[f"{name}_ratio"] = codec(name, Snapshot(older[2]), Snapshot(path), folder, repeats)["ratio"]
                print(f"  version {head.version:4}  " + "  ".join(f"{key} {value}" for key, value in row.items()))
                figures |= {f"v{head.version}_{key}".replace("-", "_"): value for key, value in row.items()}
                rows.append(row)
            older[2].unlink()
        older = (head.version, head.state_hash, path)
    for key in rows[0] if rows else ():
        figures[f"mean_{key}".replace("-", "_")] = round(sum(float(row[key]) for row in rows) / len(rows), 4)
    return {"versions": len(heads), "steps_without_change": unchanged} | figures


def changed(before: Snapshot, after: Snapshot) -> tuple[float, float]:
    """(share of the elements that differ, share of these that differ by one unit in the last place)."""
    total = moved = single = 0
    for array, other in zip(before.arrays(), after.arrays(), strict=True):
        total += array.size
        differ = np.flatnonzero(array != other)
        moved += differ.size
        if differ.size:
            single += int((ulp_delta.zigzag_difference(array[differ], other[differ]) <= 2).sum())
    return moved / max(1, total), single / max(1, moved)
