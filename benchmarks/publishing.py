"""Publishing a large mixture over two ranks: time, added memory and hash of three ways, and the pause of the trainer.

    python -m benchmarks.publishing [--layers 9] [--rounds 3] [--steps 4] [--actor-layers 5]
    python -m benchmarks.publishing --part batch [--steps 7] [--batch-layers 48]

First the library: two gloo processes publish the same weights as commit 195c96d did (whole tensors gathered in every
process), as commit 3d9a1d7 did (each process hashes its rows, then writes them) and as this tree does (hashed while
they are copied). Each counts from the call to the durable file, fsync included; the earlier ways run the code of their
commits (`git archive`). Added memory is the sum over both processes of the largest anonymous memory above the one
before.

Then the trainer actor with two ranks, a broker and batches that are all closed before they are needed: the time from an
update to the next forward pass, and the time until a version is durable. Its batches have drawn tokens and routes: it
measures time, not learning. Nine layers are 1.03 GiB in bfloat16. The five layers of the actor's policy, which has an
output head of its own, are 0.99 GiB.

At last the same actor, alone and with two ranks, with a tiny policy and batches of 64k tokens with routes of 48 layers
and eight experts each, as those of Qwen3-30B-A3B: 64 attempts of 16 turns in 32 groups. One group has an advantage, so
a step computes little, and its batch is whole.
"""

import argparse
import asyncio
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.conditions import Figures, at_least, at_most, cannot_run, finish
from benchmarks.publishing_ranks import SHAPE
from headrace.actors.trainer.actor import Trainer
from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.nats.streams import declare
from headrace.config import Algorithm, Config, Curriculum, Engine, MidTraining, Policy, Run
from headrace.config import Trainer as TrainerSection
from headrace.messages.base import Array
from headrace.messages.judging import Score
from headrace.messages.ledger import ClosedSlot, GroupClosed
from headrace.messages.rollout import PolicyRef, Sampling, Span, Trajectory, Turn
from headrace.messages.subjects import CLOSE, EVENT, SCORE, STEP, TRAJ
from headrace.messages.tasks import TaskRef
from headrace.messages.training import SnapshotReady, StepDone, StepFailed
from headrace.rendering.tokenizer import Tokenizer
from tests.support.keys import as_writers

ROOT = Path(__file__).resolve().parent.parent
WAYS = {"gathered": "195c96d", "rows": "3d9a1d7", "behind": ""}
"""Way to the commit whose code it runs; this tree's where it is empty."""


class Load(NamedTuple):
    """A policy and the shape of its batches."""

    policy: Policy
    ranks: int = 2
    groups: int = 1
    """Groups of a step; the first one has an advantage."""
    slots: int = 2
    turns: int = 1
    inputs: int = 64
    """New positions of a turn."""
    drawn: int = 16
    """Sampled tokens of a turn."""


def large(layers: int) -> Load:
    """A policy of 0.99 GiB at five layers, and batches of two short attempts."""
    return Load(Policy(layers=layers, **{key: value for key, value in SHAPE.items() if key != "tied"}))


def long(layers: int, ranks: int) -> Load:
    """A tiny policy, and batches of 65,536 tokens."""
    policy = Policy(
        dim=32, layers=layers, heads=2, kv_heads=1, head_dim=16, experts=16, top_k=8, expert_dim=16, vocab=340
    )
    return Load(policy, ranks, groups=32, slots=2, turns=16, inputs=64, drawn=16)


def archive(commit: str, folder: Path) -> Path:
    """The tree of a commit of this repository."""
    made = subprocess.run(["git", "-C", str(ROOT), "archive", commit, "headrace"], capture_output=True)
    if made.returncode:
        cannot_run(f"this needs a checkout whose history has commit {commit}: {made.stderr.decode().strip()}")
    with tarfile.open(fileobj=BytesIO(made.stdout)) as tar:
        tar.extractall(folder / commit, filter="data")
    return folder / commit


def published(way: str, tree: Path, folder: Path, layers: int) -> Figures:
    """Publish once over two processes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "benchmarks" / "publishing_ranks.py"), way, str(folder), str(layers)]
    ranks = [
        subprocess.Popen(
            command,
            env=os.environ | shared | {"RANK": str(rank), "PYTHONPATH": str(tree)},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [rank.communicate() for rank in ranks]
    for rank, (_, errors) in zip(ranks, told, strict=True):
        if rank.returncode:
            raise RuntimeError(f"{way} ended with code {rank.returncode}: {errors[-2000:]}")
    parts = [json.loads(text.splitlines()[-1]) for text, _ in told]
    size = max(file.stat().st_size for file in folder.glob("v*.safetensors"))
    for file in folder.glob("v*.safetensors"):
        file.unlink()
    return {
        "seconds": max(part["seconds"] for part in parts),
        "added_bytes": sum(part["added_bytes"] for part in parts),
        "hash": parts[0]["hash"],
        "bytes": size,
    }


def compared(folder: Path, layers: int, rounds: int) -> Figures:
    """All ways, in turn, `rounds` times: the median of each."""
    trees = {way: archive(commit, folder) if commit else ROOT for way, commit in WAYS.items()}
    seen: dict[str, list[Figures]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, tree in trees.items():
            seen[way].append(published(way, tree, folder, layers))
            print(way, seen[way][-1], file=sys.stderr, flush=True)
    out: Figures = {"published_bytes": seen["behind"][0]["bytes"], "rounds": rounds}
    for way, runs in seen.items():
        out[f"{way}_s"] = statistics.median(run["seconds"] for run in runs)
        out[f"{way}_added_bytes"] = statistics.median(run["added_bytes"] for run in runs)
    out["hashes"] = len({run["hash"] for runs in seen.values() for run in runs})
    for way in ("gathered", "rows"):
        out[f"time_less_than_{way}_x"] = out[f"{way}_s"] / out["behind_s"]
        out[f"memory_of_{way}_share"] = out["behind_added_bytes"] / out[f"{way}_added_bytes"]
    return out


def trajectory(run: str, group: str, slot: int, load: Load) -> Trajectory:
    """Turns with drawn tokens and routes, by version 0."""
    draw = np.random.default_rng([*group.encode(), slot])
    policy, turns, forwarded = load.policy, [], 0
    for index in range(load.turns):
        prompt = load.inputs - load.drawn + (not index)  # the last drawn token of a turn is forwarded in the next
        rows = load.inputs
        first = draw.integers(policy.experts, size=(rows, policy.layers, 1), dtype=np.uint8)
        routes = (first + np.arange(policy.top_k, dtype=np.uint8)) % np.uint8(policy.experts)
        turns.append(
            Turn(
                index=index,
                segment=0,
                prompt_ids=Array.of(draw.integers(300, size=prompt).tolist(), "<i4"),
                ids=Array.of(draw.integers(300, size=load.drawn).tolist(), "<i4"),
                logprobs=Array.of([-float(np.log(policy.vocab))] * load.drawn, "<f4"),
                routed=Array("|u1", routes.shape, routes.tobytes()),
                spans=(Span(forwarded, forwarded + rows, 0),),
            )
        )
        forwarded += rows
    return Trajectory(
        run=run,
        lane="train",
        group=group,
        slot=slot,
        attempt=0,
        id=f"{group}-{slot}-0",
        task=TaskRef("drawn", group),
        family="drawn",
        seed=slot,
        policy=PolicyRef(),
        sampling=Sampling(),
        outcome="finished",
        turns=tuple(turns),
        diff={},
        fingerprint="drawn",
    )


async def close(bus: Bus, run: str, number: int, load: Load) -> None:
    """Publish the trajectories of a group, their scores and the closing."""
    group, slots = f"g{number:06d}", []
    for slot in range(load.slots):
        made = trajectory(run, group, slot, load)
        passed = bool(slot % 2) and number % load.groups == 0
        seq = await bus.publish(TRAJ.at(run=run, group=group), made)
        score = Score(
            run=run,
            lane="train",
            group=group,
            slot=slot,
            attempt=0,
            trajectory_seq=seq,
            task=made.task,
            family="drawn",
            judge_version="drawn",
            verdict="passed" if passed else "failed",
            reward=float(passed),
            passed=passed,
        )
        score_seq = await bus.publish(SCORE.at(run=run, judge="drawn", group=group), score)
        slots.append(
            ClosedSlot(
                slot=slot, attempt=0, trajectory_seq=seq, score_seq=score_seq, reward=score.reward, oldest_version=0
            )
        )
    closed = GroupClosed(
        run=run, group=group, task=made.task, group_size=load.slots, slots=tuple(slots), oldest_version=0
    )
    await bus.publish(CLOSE.at(run=run, group=group), closed)


def setting(folder: Path, load: Load, steps: int) -> Config:
    """Tokens up to `steps` versions old, no checkpoint after a step."""
    return Config(
        run=Run(dir=str(folder / "runs")),
        policy=load.policy,
        engine=Engine(exact=False),
        algorithm=Algorithm(learning_rate=1e-6, warmup_steps=1),
        mid_training=MidTraining(tokens=0),
        curriculum=Curriculum(group_size=load.slots, groups_per_step=load.groups, staleness=steps, steps=1000),
        trainer=TrainerSection(threads=1, ranks=load.ranks, checkpoint_every=1000, rescore=0),
    )


async def trained(folder: Path, load: Load, steps: int) -> Figures:
    """Steps of the trainer actor, back to back."""
    run = f"r{token_hex(4)}"
    home = folder / "runs" / run
    home.mkdir(parents=True)
    (home / "tokenizer.json").write_text(Tokenizer.train(["some text to learn from"], 340).dump())
    async with Server(folder / "broker") as server:
        async with (
            await as_writers(server.url, server.credentials) as admin,
            await Bus.connect(server.url, role="trainer", credentials=server.credentials) as bus,
        ):
            await declare(admin)
            for number in range(steps * load.groups):
                await close(admin, run, number, load)
            actor = Trainer(setting(folder, load, steps), bus, run, "trainer")
            await actor.start()
            actor.started = True
            watching = asyncio.create_task(versions(admin, run, steps))
            try:
                await asyncio.wait({watching, actor.failed}, return_when=asyncio.FIRST_COMPLETED)
                if actor.failed.done():
                    raise actor.failed.result()
                ready = watching.result()
            finally:
                await actor.shut(30.0, 60.0)
            records = [received.message async for received in admin.history("HR_STEP", STEP.at(run=run))]
    if failed := [record.detail for record in records if isinstance(record, StepFailed)]:
        raise RuntimeError(f"a step failed: {failed[0]}")
    done = [record for record in records if isinstance(record, StepDone)]
    spent = [record.efficiency for record in done if record.efficiency is not None]
    for one in spent:
        print({"wall_s": one.wall_s, "between_s": one.between_s, **one.seconds}, file=sys.stderr, flush=True)
    return {
        "steps": len(done),
        "published_bytes": ready[-1].bytes,
        "batch_tokens": load.groups * load.slots * load.turns * load.inputs,
        "between_ms": [round(one.between_s * 1e3, 1) for one in spent[1:]],
        "between_p50_ms": statistics.median(one.between_s for one in spent[1:]) * 1e3,
        "step_wall_p50_s": statistics.median(one.wall_s for one in spent[1:]),
        "step_publish_p50_s": statistics.median(one.seconds["publish"] for one in spent[1:]),
        "step_to_durable_p50_s": statistics.median(one.written_s for one in ready[1:]),
        "causes_over_wall": max(abs(sum(one.seconds.values()) / one.wall_s - 1.0) for one in spent),
    }


def named(part: str, figures: Figures) -> Figures:
    """Figures with the name of their part before their own."""
    return {f"{part}_{name}": value for name, value in figures.items()}


async def versions(bus: Bus, run: str, last: int) -> list[SnapshotReady]:
    """All versions, when the last one is announced."""
    out: list[SnapshotReady] = []
    async for received in bus.follow("HR_EVENT", EVENT.where(run=run, actor="trainer", type="snapshot_ready")):
        out.append(received.message)
        if out[-1].version == last:
            break
    return out


def main() -> None:
    """Measure, and print the last line."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--part", choices=("library", "actor", "batch"), help="one part; default: all three")
    options.add_argument("--layers", type=int, default=9)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--steps", type=int, default=4)
    options.add_argument("--actor-layers", type=int, default=5)
    options.add_argument("--batch-layers", type=int, default=48)
    args = options.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="headrace-publishing-") as name:
        folder = Path(name)
        needed = 2 if args.part == "batch" else 20
        if shutil.disk_usage(folder).free < needed << 30:
            cannot_run(f"expected {needed} GiB of free disk under {folder}; set TMPDIR to a folder with as much")
        figures: Figures = {}
        if args.part in (None, "library"):
            figures |= compared(folder, args.layers, args.rounds)
        if args.part in (None, "actor"):
            figures |= named("actor", asyncio.run(trained(folder, large(args.actor_layers), args.steps)))
        if args.part in (None, "batch"):
            for ranks in (1, 2):
                steps = asyncio.run(trained(folder, long(args.batch_layers, ranks), args.steps))
                figures |= named(f"batch_{ranks}_ranks", steps)
    shown: dict[str, Any] = {
        key: round(value, 4) if isinstance(value, float) else value for key, value in figures.items()
    }
    limits = {
        "time_less_than_gathered_x": (at_least, 3.0),
        "memory_of_gathered_share": (at_most, 0.4),
        "hashes": (at_most, 1),
        **{key: (at_most, 50.0) for key in shown if key.endswith("between_p50_ms")},
    }
    targets = {key: holds(shown[key], limit) for key, (holds, limit) in limits.items() if key in shown}
    finish(shown, targets, "torch")


if __name__ == "__main__":
    main()
