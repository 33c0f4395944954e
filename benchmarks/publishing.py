"""Publishing a large mixture over two ranks: time, added memory and hash of three ways, and the pause of the trainer.

    python -m benchmarks.publishing [--layers 9] [--rounds 3] [--steps 4] [--actor-layers 6]

First the library: two gloo processes publish the same weights as commit 195c96d did (whole tensors gathered in every
process), as commit 3d9a1d7 did (each process hashes its rows, then writes them) and as this tree does (hashed while
they are copied). Each counts from the call to the durable file, fsync included; the earlier ways run the code of their
commits (`git archive`). Added memory is the sum over both processes of the largest anonymous memory above the one
before.

Then the trainer actor with two ranks, a broker and batches that are all closed before they are needed: the time from an
update to the next forward pass, and the time until a version is durable. Its batches have drawn tokens and routes: it
measures time, not learning. Nine layers are 1.03 GiB in bfloat16; so are the six layers of the actor's policy, which
has an output head of its own.
"""

import argparse
import asyncio
import json
import os
import random
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
from typing import Any

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

ROOT = Path(__file__).resolve().parent.parent
WAYS = {"gathered": "195c96d", "rows": "3d9a1d7", "behind": ""}
"""Way to the commit whose code it runs; this tree's where it is empty."""
PROMPT, DRAWN = 48, 16


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


def trajectory(run: str, group: str, slot: int, layers: int) -> Trajectory:
    """One turn with drawn tokens and routes, by version 0."""
    draw = random.Random(f"{group}-{slot}")
    rows = PROMPT + DRAWN - 1
    experts = [draw.sample(range(SHAPE["experts"]), SHAPE["top_k"]) for _ in range(rows * layers)]
    turn = Turn(
        index=0,
        segment=0,
        prompt_ids=Array.of([draw.randrange(300) for _ in range(PROMPT)], "<i4"),
        ids=Array.of([draw.randrange(300) for _ in range(DRAWN)], "<i4"),
        logprobs=Array.of([-11.0] * DRAWN, "<f4"),
        routed=Array("|u1", (rows, layers, SHAPE["top_k"]), bytes(one for pair in experts for one in pair)),
        spans=(Span(0, rows, 0),),
    )
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
        turns=(turn,),
        diff={},
        fingerprint="drawn",
    )


async def close(bus: Bus, run: str, group: str, layers: int) -> None:
    """Publish the two trajectories of a group, their scores 0 and 1, and the closing."""
    slots = []
    for slot in range(2):
        made = trajectory(run, group, slot, layers)
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
            verdict="passed",
            reward=float(slot),
            passed=bool(slot),
        )
        score_seq = await bus.publish(SCORE.at(run=run, judge="drawn", group=group), score)
        slots.append(
            ClosedSlot(
                slot=slot, attempt=0, trajectory_seq=seq, score_seq=score_seq, reward=float(slot), oldest_version=0
            )
        )
    closed = GroupClosed(run=run, group=group, task=made.task, group_size=2, slots=tuple(slots), oldest_version=0)
    await bus.publish(CLOSE.at(run=run, group=group), closed)


def setting(folder: Path, layers: int, steps: int) -> Config:
    """Two ranks, batches of one group, tokens up to `steps` versions old, no checkpoint after a step."""
    return Config(
        run=Run(dir=str(folder / "runs")),
        policy=Policy(layers=layers, **{key: value for key, value in SHAPE.items() if key != "tied"}),
        engine=Engine(exact=False),
        algorithm=Algorithm(learning_rate=1e-6, warmup_steps=1),
        mid_training=MidTraining(tokens=0),
        curriculum=Curriculum(group_size=2, groups_per_step=1, staleness=steps, steps=1000),
        trainer=TrainerSection(threads=1, ranks=2, checkpoint_every=1000, rescore=0),
    )


async def trained(folder: Path, layers: int, steps: int) -> Figures:
    """Steps of the trainer actor, back to back."""
    run = f"r{token_hex(4)}"
    home = folder / "runs" / run
    home.mkdir(parents=True)
    (home / "tokenizer.json").write_text(Tokenizer.train(["some text to learn from"], 340).dump())
    async with Server(folder / "broker") as server:
        async with (
            await Bus.connect(server.url, role="admin", credentials=server.credentials) as admin,
            await Bus.connect(server.url, role="trainer", credentials=server.credentials) as bus,
        ):
            await declare(admin)
            for step in range(steps):
                await close(admin, run, f"g{step:06d}", layers)
            actor = Trainer(setting(folder, layers, steps), bus, run, "trainer")
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
        "actor_published_bytes": ready[-1].bytes,
        "between_ms": [round(one.between_s * 1e3, 1) for one in spent[1:]],
        "between_p50_ms": statistics.median(one.between_s for one in spent[1:]) * 1e3,
        "step_wall_p50_s": statistics.median(one.wall_s for one in spent[1:]),
        "step_publish_p50_s": statistics.median(one.seconds["publish"] for one in spent[1:]),
        "step_to_durable_p50_s": statistics.median(one.written_s for one in ready[1:]),
        "causes_over_wall": max(abs(sum(one.seconds.values()) / one.wall_s - 1.0) for one in spent),
    }


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
    options.add_argument("--layers", type=int, default=9)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--steps", type=int, default=4)
    options.add_argument("--actor-layers", type=int, default=6)
    args = options.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="headrace-publishing-") as name:
        folder = Path(name)
        if shutil.disk_usage(folder).free < 20 << 30:
            cannot_run(f"expected 20 GiB of free disk under {folder}; set TMPDIR to a folder with as much")
        figures = compared(folder, args.layers, args.rounds)
        figures |= asyncio.run(trained(folder, args.actor_layers, args.steps))
    shown: dict[str, Any] = {
        key: round(value, 4) if isinstance(value, float) else value for key, value in figures.items()
    }
    targets = {
        "time_less_than_gathered_x": at_least(shown["time_less_than_gathered_x"], 3.0),
        "memory_of_gathered_share": at_most(shown["memory_of_gathered_share"], 0.4),
        "hashes": at_most(shown["hashes"], 1),
        "between_p50_ms": at_most(shown["between_p50_ms"], 50.0),
    }
    finish(shown, targets, "torch")


if __name__ == "__main__":
    main()
