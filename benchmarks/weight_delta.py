"""Measures size and speed of the delta of one optimizer step, with headrace's codecs and their peers.

    python -m benchmarks.weight_delta [--size 60m] [--pretrain 30] [--steps 6] [--rates 1e-7,3e-7,1e-6,3e-6,1e-5]
    python -m benchmarks.weight_delta --run RUN     # the real steps of a recorded run, in our codecs

One model, real optimizer steps (`weight_steps`), our codecs and their peers on the same tensors in the same run. Speeds
are GB of the model's raw bytes per second of one core's processor time, best of `--repeats`: encode compares, codes
and hashes the new state; decode opens, applies in place and verifies every block's hash; stage covers everything from
chunks to a verified file (processor time). For two densities at which others publish figures, 0.94 % and 2.6 %, the
benchmark searches for the learning rate. Peers do not hash, except that Fireworks' codec computes a checksum; it is
compared where it is installed (pip install -e '.[peers]', possibly in a separate environment).
"""

import argparse
import importlib.util
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import recorded_deltas
from benchmarks.conditions import Figures, arguments, at_least, finish
from benchmarks.weight_peers import Peer, peers
from benchmarks.weight_steps import SIZES, Trained, Weights, density, mxfp8, rate_for
from headrace.messages.weights import WeightManifest
from headrace.weights import snapshot, state, tensor_state
from headrace.weights.codecs import codec, ulp_delta
from headrace.weights.codecs.chunks import frames
from headrace.weights.codecs.codec import CODECS
from headrace.weights.publishing.encoding import Encoding, describe
from headrace.weights.receiving.staging import StagedFile
from headrace.weights.snapshot import Snapshot
from headrace.weights.state import HASH_BYTES

XOR, AHEAD = "xor_zstd", 1.5
"""The peer of every row, and the least speed of our codecs as a multiple of its speed."""


def best(repeats: int, work: Callable[[], Any]) -> float:
    """The shortest processor time that `work` took in this process, which runs one thread."""
    times = []
    for _ in range(repeats):
        since = time.process_time()
        work()
        times.append(time.process_time() - since)
    return min(times)


def ours(name: str, base: Snapshot, target: Snapshot, folder: Path, repeats: int) -> Figures:
    """Ratio and speeds of one of headrace's codecs; AssertionError when a bit is lost."""
    hashes = base.hashes()
    chunks: list[bytes] = []
    seconds = []
    for _ in range(repeats):
        encoding = Encoding(target, base, name=name, base_hashes=hashes)
        chunks = list(encoding.chunks())
        seconds.append(encoding.seconds)
    manifest = encoding.manifest(
        "bench", 1, [describe(data, 0, at, at) for at, data in enumerate(chunks)], base=_manifest_of(base, hashes)
    )
    units = state.units(base.tensors)

    def restore() -> list[state.Bits]:
        arrays = base.arrays()
        return [np.concatenate([arrays[p.tensor][p.start : p.start + p.items] for p in unit]) for unit in units]

    def decode(arrays: list[state.Bits]) -> None:
        for data in chunks:
            for frame in frames(data):
                array = arrays[frame.unit]
                codec.apply(frame, array, array, base.tensors[units[frame.unit][0].tensor].dtype)
                if frame.start + frame.count == array.size:
                    verify(frame.unit, array)

    def verify(index: int, array: state.Bits) -> None:
        at = 0
        for part in units[index]:
            wanted = encoding.block_hashes[part.block * HASH_BYTES : (part.block + 1) * HASH_BYTES]
            assert state.block_hash(array[at : at + part.items]) == wanted
            at += part.items

    times = []
    for _ in range(repeats):
        arrays = restore()
        times.append(best(1, lambda arrays=arrays: decode(arrays)))  # type: ignore[misc]

    def stage() -> None:
        with StagedFile(folder / "staged", manifest, base) as staged:
            for info, data in zip(manifest.chunks, chunks, strict=True):
                staged.add(info, data)
            staged.finish()

    staged = best(repeats, stage)
    assert snapshot.file_hash(folder / "staged") == manifest.state_hash
    size = encoding.raw_bytes / 1e9
    return {
        "ratio": round(encoding.raw_bytes / encoding.wire_bytes, 2),
        "wire_bytes": encoding.wire_bytes,
        "encode_gb_s": round(size / min(seconds), 2),
        "decode_gb_s": round(size / min(times), 2),
        "stage_gb_s": round(size / staged, 2),
    }


def _manifest_of(base: Snapshot, hashes: bytes) -> WeightManifest:
    return WeightManifest(
        run="bench", version=0, base_version=-1, step=0, tensors=base.tensors, chunks=(), block_hashes=hashes,
        state_hash=state.root(base.tensors, hashes), base_hash="", raw_bytes=0, wire_bytes=0, changed=0, elements=0,
    )  # fmt: skip


def theirs(peer: Peer, before: Weights, after: Weights, repeats: int = 1) -> Figures:
    """Ratio and speeds of a peer, over tensors of two dimensions and more (some peers refuse tiny ones)."""
    compress_s, decompress_s = [], []
    for _ in range(repeats):
        raw = wire = 0
        compress_s.append(0.0)
        decompress_s.append(0.0)
        for name, tensor in before.items():
            if tensor.dim() < 2:
                continue
            base = tensor_state.bits(tensor).view(np.uint8)
            new = tensor_state.bits(after[name]).view(np.uint8)
            since = time.process_time()
            blob = peer.compress(base, new)
            middle = time.process_time()
            back = peer.decompress(base, blob)
            decompress_s[-1] += time.process_time() - middle
            compress_s[-1] += middle - since
            assert np.array_equal(back, new), f"{peer.name} lost bits of {name}"
            raw, wire = raw + new.size, wire + peer.size(blob)
            if peer.slice_bytes and raw > peer.slice_bytes:
                break
    return {
        "ratio": round(raw / wire, 2),
        "encode_gb_s": round(raw / 1e9 / min(compress_s), 3),
        "decode_gb_s": round(raw / 1e9 / min(decompress_s), 3),
    }


def entropy_bound(before: Weights, after: Weights) -> float:
    """Ratio of an ideal coder that knows each element's tensor and exponent: their conditional entropy."""
    total = raw = 0.0
    for name, tensor in before.items():
        old, new = tensor_state.bits(tensor), tensor_state.bits(after[name])
        raw += old.size * 16
        exponents = (old >> 7) & 0xFF
        zigzagged = ulp_delta.zigzag_difference(old, new)
        for exponent in np.unique(exponents):
            _, counts = np.unique(zigzagged[exponents == exponent], return_counts=True)
            chances = counts / counts.sum()
            total -= float((counts * np.log2(chances)).sum())
    return raw / max(total, 1.0)


def main() -> None:
    """Measure, print a table, end with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SIZES), default="60m")
    parser.add_argument("--pretrain", type=int, default=30)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rates", default="1e-7,3e-7,1e-6,3e-6,1e-5")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--run", help="a recorded run, such as latest: measure its published versions instead")
    args = arguments(parser, size="1m", pretrain=1, steps=1, rates="1e-6", repeats=1)
    torch.set_num_threads(1)
    if args.run:
        finish({"run": args.run} | recorded_deltas.measure(args.run, ours, args.repeats), {}, "numpy", "zstandard")
        return
    trained = Trained(args.size, pretrain=args.pretrain, steps=args.steps)
    cases = {f"lr_{rate}": (float(rate), trained.step(float(rate))) for rate in args.rates.split(",") if rate}
    cases |= {"at_0p94_pct": rate_for(trained, 0.0094), "at_2p6_pct": rate_for(trained, 0.026)}
    figures: Figures = {"parameters": trained.count, "raw_bytes": 2 * trained.count}
    compare, others = {"at_0p94_pct", "at_2p6_pct"}, peers()
    with tempfile.TemporaryDirectory(prefix="headrace-delta-") as text:
        folder = Path(text)
        tensor_state.write(folder / "base", trained.before)
        base = Snapshot(folder / "base")
        for case, (rate, after) in cases.items():
            share = density(trained.before, after)
            print(f"\n{case}: learning rate {rate:.3g}, {100 * share:.3g} % of the elements changed")
            figures |= {f"{case}_learning_rate": rate, f"{case}_changed_pct": round(100 * share, 4)}
            tensor_state.write(folder / "target", after)
            rows = {
                peer.name: theirs(peer, trained.before, after, args.repeats if peer.name == XOR else 1)
                for peer in others
                if case in compare or peer.name == XOR
            }
            for name in CODECS:
                rows[name.replace("-", "_")] = ours(name, base, Snapshot(folder / "target"), folder, args.repeats)
            if case in compare:
                figures[f"{case}_entropy_bound_ratio"] = round(entropy_bound(trained.before, after), 1)
            for name, row in rows.items():
                print(f"  {name:18} " + "  ".join(f"{key} {value}" for key, value in row.items()))
                figures |= {f"{case}_{name}_{key}": value for key, value in row.items()}
        served, later = mxfp8(trained.before), mxfp8(trained.step(1e-6))
        tensor_state.write(folder / "base8", served)
        tensor_state.write(folder / "target8", later)
        print("\nMXFP8, learning rate 1e-6")
        rows = {peer.name: theirs(peer, served, later, args.repeats) for peer in others if peer.name == XOR}
        rows["d8_zstd"] = ours(
            "d8-zstd", Snapshot(folder / "base8"), Snapshot(folder / "target8"), folder, args.repeats
        )
        for name, row in rows.items():
            print(f"  {name:18} {row}")
            figures |= {f"mxfp8_lr_1e-6_{name}_{key}": value for key, value in row.items()}
    if importlib.util.find_spec("fireworks_delta_compression") is None:
        print("\nfireworks-delta-compression is not installed: not compared")
    one, two = "at_0p94_pct_d8_zstd", "at_2p6_pct_d8_zstd"
    targets = {
        "ratio_at_0p94_pct": at_least(figures[f"{one}_ratio"], 150),
        "ratio_at_2p6_pct": at_least(figures[f"{two}_ratio"], 60),
        "d10_ratio_at_0p94_pct": at_least(figures["at_0p94_pct_d10_zstd_ratio"], 200),
        "d10_ratio_at_2p6_pct": at_least(figures["at_2p6_pct_d10_zstd_ratio"], 85),
        "encode_gb_s_at_2p6_pct": at_least(figures[f"{two}_encode_gb_s"], 1.5),
        "decode_gb_s_at_2p6_pct": at_least(figures[f"{two}_decode_gb_s"], 5),
        "mxfp8_ratio": at_least(figures["mxfp8_lr_1e-6_d8_zstd_ratio"], 200),
    }
    # full_lz4 is not a delta: bf16 weights do not compress, so its time is little more than that of a copy.
    for peer in ("full_zstd", "zstd_patch_from", "fireworks_arc_v2", "fireworks_arc_v3"):
        for key in ("ratio", "encode_gb_s", "decode_gb_s"):
            if f"at_0p94_pct_{peer}_{key}" in figures:
                targets[f"ahead_of_{peer}_{key}"] = at_least(
                    figures[f"{one}_{key}"], figures[f"at_0p94_pct_{peer}_{key}"]
                )
    for name in tuple(figures):
        if name.endswith(("_d8_zstd_ratio", "_d10_zstd_ratio")):
            ours_, peer = name.removesuffix("_ratio"), re.sub(r"d\d+_zstd_ratio$", XOR, name)
            for key in ("encode_gb_s", "decode_gb_s"):
                times = round(figures[f"{ours_}_{key}"] / figures[f"{peer}_{key}"], 2)
                targets[f"{ours_}_{key}_over_xor_zstd"] = at_least(times, AHEAD)
    print()
    finish(figures, targets, "torch", "numpy", "zstandard", "lz4", "xxhash", "fireworks-delta-compression")


if __name__ == "__main__":
    main()
