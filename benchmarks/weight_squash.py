"""Measures the bytes that a squashed delta saves for a receiver that lags by eight versions.

    python -m benchmarks.weight_squash [--size 8m] [--count 8] [--rates 1e-6,3e-6]

A model takes consecutive optimizer steps (`weight_steps`); each is published as a delta (d8, zstd). Then the last
`--count` deltas are squashed, once by composing their frames without any weights, once by comparing the two ends, and
the composed one is applied to the oldest version and has to give the newest, bit for bit.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import torch

from benchmarks.conditions import Figures, at_most, finish
from benchmarks.weight_steps import SIZES, Trained, density
from headrace.messages.weights import WeightChunk, WeightManifest
from headrace.weights import tensor_state
from headrace.weights.publishing import squash
from headrace.weights.publishing.encoding import Encoding, describe
from headrace.weights.receiving.staging import StagedFile
from headrace.weights.snapshot import Snapshot


class Stored(msgspec.Struct):
    """A message of the in-memory stream."""

    message: WeightChunk
    seq: int
    time: float = 0.0


class Held:
    """A stream in memory: chunks by sequence."""

    def __init__(self) -> None:
        self.chunks: dict[int, Stored] = {}

    def put(self, version: int, data: bytes) -> int:
        """Store a chunk; its sequence."""
        seq = len(self.chunks) + 1
        message = WeightChunk(run="bench", version=version, shard=0, seq=seq, data=data)
        self.chunks[seq] = Stored(message, seq)
        return seq

    async def get(self, stream: str, seq: int) -> Stored:
        """One chunk."""
        return self.chunks[seq]

    async def last(self, stream: str, subject: str) -> Stored | None:
        """Nothing but chunks lies here."""
        return None

    async def history(self, stream: str, *filters: str, start: int = 1) -> AsyncIterator[Stored]:
        """Nothing but chunks lies here."""
        nothing: tuple[Stored, ...] = ()
        for stored in nothing:
            yield stored


def published(held: Held, version: int, path: Path, before: WeightManifest, base: Path) -> WeightManifest:
    """The delta from `base` to the file at `path`; its chunks are added to `held`."""
    encoding = Encoding(Snapshot(path), Snapshot(base), base_hashes=before.block_hashes)
    infos = [describe(data, 0, at, held.put(version, data)) for at, data in enumerate(encoding.chunks())]
    return encoding.manifest("bench", version, infos, base=before)


def measure(trained: Trained, rate: float, count: int, folder: Path) -> Figures:
    """Bytes of single and squashed deltas at a learning rate."""
    first = trained.published()
    tensor_state.write(folder / "0", first)
    start = Encoding(Snapshot(folder / "0"), None)
    infos = [describe(data, 0, at, 0) for at, data in enumerate(start.chunks())]
    held, manifests = Held(), [start.manifest("bench", 0, infos, base=None)]
    after = first
    for version, after in enumerate(trained.walk(rate, count), 1):
        tensor_state.write(folder / str(version), after)
        path, base = folder / str(version), folder / str(version - 1)
        manifests.append(published(held, version, path, manifests[-1], base))
    since = time.process_time()
    pieces, (_, wire) = asyncio.run(squash.compose(held, manifests[1:], manifests[0]))
    seconds = time.process_time() - since
    single = sum(manifest.wire_bytes for manifest in manifests[1:])
    direct = {}
    for name in ("d8-zstd", "d10-zstd"):
        encoding = Encoding(Snapshot(folder / str(count)), Snapshot(folder / "0"), name=name)
        direct[name] = sum(map(len, encoding.chunks()))
    last = manifests[-1]
    straight = msgspec.structs.replace(
        last,
        base_version=0,
        base_hash=manifests[0].state_hash,
        chunks=tuple(describe(data, 0, at, 0) for at, (_, data) in enumerate(pieces)),
    )
    with StagedFile(folder / "squashed", straight, Snapshot(folder / "0")) as staged:
        for info, (_, data) in zip(straight.chunks, pieces, strict=True):
            staged.add(info, data)
        assert staged.finish() == last.state_hash
    return {
        "changed_by_one_pct": round(100 * manifests[1].changed / last.elements, 3),
        "changed_by_all_pct": round(100 * density(first, after), 3),
        "single_bytes": single,
        "squashed_bytes": wire,
        "squashed_share": round(wire / single, 4),
        "direct_d8_share": round(direct["d8-zstd"] / single, 4),
        "direct_d10_share": round(direct["d10-zstd"] / single, 4),
        "compose_ns_per_change": round(1e9 * seconds / max(1, sum(m.changed for m in manifests[1:])), 1),
    }


def main() -> None:
    """Measure, end with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SIZES), default="8m")
    parser.add_argument("--pretrain", type=int, default=30)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--rates", default="1e-6,3e-6")
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures: Figures = {"versions_behind": args.count}
    targets = {}
    for rate in args.rates.split(","):
        trained = Trained(args.size, pretrain=args.pretrain, steps=args.steps)
        figures["parameters"] = trained.count
        with tempfile.TemporaryDirectory(prefix="headrace-squash-") as folder:
            row = measure(trained, float(rate), args.count, Path(folder))
        print(f"learning rate {rate}: {row}")
        figures |= {f"lr_{rate}_{key}": value for key, value in row.items()}
        targets[f"lr_{rate}_squashed_share"] = at_most(row["squashed_share"], 0.5)
    finish(figures, targets, "torch", "numpy", "zstandard")


if __name__ == "__main__":
    main()
