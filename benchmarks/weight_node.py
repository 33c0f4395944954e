"""Counts the copies of a version on one node, and measures the seconds from the update until servers have it.

    python -m benchmarks.weight_node [--gib 1.0] [--versions 3] [--servers 2] [--python SGLANG]

Real processes over a real broker: `headrace actor weight_sender` and `weight_receiver`, nats-server, and this process,
which writes the trainer's files and loads them as a rollout actor does. With `--python`, an interpreter with SGLang, it
starts that many servers and loads each version into them; without, it links the version for them and computes the
checksums that they must report.

Counted for the last version: inodes with its bits, in memory and on disks, and the memory that no file backs of sender,
receiver and this process above what they had before. A server's own weights do not count: on a GPU they are in its
memory. `large_s` is computed for `LARGE_GIB`: each part's processor seconds here, divided by the threads that it has on
such a node (`THREADS`: the trainer's four processes write, the rest is the other programs'), with `LOAD_S` assumed for
the load from host memory into its GPUs.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import uvloop

from benchmarks.conditions import Figures, arguments, at_most, finish
from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.nats.streams import declare
from headrace.config import Config, Engine, load, versions
from headrace.engines.registry import EngineSetup
from headrace.engines.server.engine import OneServer
from headrace.engines.server.fleet import Fleet
from headrace.engines.server.open import open_engine
from headrace.engines.server.weights.checksums import ONE, expected
from headrace.engines.server.weights.staging import Stage, Verified
from headrace.engines.sglang import cuda_digest
from headrace.engines.sglang.backend import CPU, Sglang
from headrace.engines.sglang.options import SglangOptions
from headrace.launch.closing import cpu_seconds
from headrace.messages.subjects import EVENT
from headrace.messages.training import SnapshotReady
from headrace.messages.weights import WeightsStaged
from headrace.parent_death import ending_with_parent
from headrace.policy.config import PolicyConfig
from headrace.policy.model import Model
from headrace.policy.numerics_probe import probe
from headrace.weights import snapshot, tensor_state

RUN = "rnode"
LARGE_GIB, LOAD_S = 57.0, 4.0
THREADS = {"write": snapshot.THREADS // 2, "encode": 16, "hash": snapshot.THREADS, "checksums": snapshot.THREADS}
SMALL = ("--skip-tokenizer-init", "--dtype", "bfloat16", "--mem-fraction-static", "0.7", "--max-total-tokens", "2048")
"""More arguments of a server: CPU's share of memory holds no weights of a GiB."""
CONFIG = """
[run]
id = "{run}"
dir = "{folder}"
[weights]
memory_dir = "/dev/shm"
shards = {shards}
"""


def model(gib: float) -> PolicyConfig:
    """A mixture of about this size in bfloat16, of Qwen3-30B-A3B's widths from half a GiB on."""
    dim, expert, vocab = (2048, 768, 32768) if gib >= 0.5 else (256, 128, 2048)
    layer = 16 * 3 * dim * expert * 2
    return PolicyConfig(
        dim=dim, layers=max(1, int(gib * 2**30 / layer)), heads=dim // 64, kv_heads=4, head_dim=64, experts=16, top_k=8,
        expert_dim=expert, vocab=vocab, dtype="bfloat16",
    )  # fmt: skip


class Node:
    """The processes of one node, and its trainer's weights."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.folder, self.args, self.policy = folder, args, model(args.gib)
        (folder / "run.toml").write_text(CONFIG.format(run=RUN, folder=folder / "runs", shards=args.shards))
        self.config: Config = load(folder / "run.toml")
        self.memory = versions.folder(self.config, RUN)
        made = Model(self.policy, probe(self.policy, exact=False), seed=1)
        self.weights = {name: tensor.detach() for name, tensor in made.state().items()}
        self.bytes = sum(tensor.nbytes for tensor in self.weights.values())
        self.server = Server(folder / "broker")
        self.children: list[asyncio.subprocess.Process] = []
        self.cpu: dict[str, float] = {}

    async def open(self) -> None:
        """Start broker, sender and receiver."""
        await self.server.start()
        keys = self.server.credentials
        async with await Bus.connect(self.server.url, role="admin", credentials=keys) as admin:
            await declare(admin)
        self.trainer = await Bus.connect(self.server.url, role="trainer", credentials=keys)
        for actor in ("weight_sender", "weight_receiver"):
            words = [sys.executable, "-m", "headrace.cli", "actor", actor, "--config", str(self.folder / "run.toml")]
            words += ["--run", RUN, "--url", self.server.url, "--credentials", str(keys)]
            with (self.folder / f"{actor}.log").open("ab") as log:
                started = await asyncio.create_subprocess_exec(*ending_with_parent(words), stdout=log, stderr=log)
            self.children.append(started)

    async def close(self) -> None:
        """End all processes and give back the memory."""
        for child in self.children:
            child.terminate()
            await child.wait()
        await self.trainer.close()
        await self.server.stop()
        for file in sorted(self.memory.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        self.memory.rmdir()

    def timed(self, name: str, call: Callable[[], object]) -> None:
        """Run a part, and keep its processor seconds per GiB."""
        since = time.process_time()
        call()
        self.cpu[name] = (time.process_time() - since) / (self.bytes / 2**30)

    def write(self, version: int) -> SnapshotReady:
        """The trainer's file: some elements move by one unit in the last place."""
        generator = torch.Generator().manual_seed(version)
        for tensor in self.weights.values() if version else ():
            flat = tensor.reshape(-1).view(torch.int16)
            at = torch.randint(flat.numel(), (max(1, flat.numel() // 100),), generator=generator)
            flat[at] ^= 1
        path = self.memory / "snapshots" / f"v{version:08d}.safetensors"
        digest = ""

        def write() -> None:
            nonlocal digest
            digest = tensor_state.write(path, self.weights)

        self.timed("write", write)
        (self.memory / "snapshots" / f"v{version - 1:08d}.safetensors").unlink(missing_ok=True)
        return SnapshotReady(run=RUN, version=version, path=str(path), state_hash=digest, bytes=path.stat().st_size)

    async def staged(self, ready: SnapshotReady) -> WeightsStaged:
        """Announce a version, and wait until the receiver has it."""
        await self.trainer.publish(EVENT.at(run=RUN, actor="trainer", type=ready.type_name), ready)
        looker = await Bus.connect(self.server.url, role="operator", credentials=self.server.credentials)
        async with looker:
            async for received in looker.follow("HR_EVENT", EVENT.where(run=RUN, type=WeightsStaged.type_name)):
                if received.message.version == ready.version:
                    return received.message  # type: ignore[no-any-return]
        raise AssertionError("the stream ended")

    def private(self) -> int:
        """Bytes of memory that no file backs, of this process, sender and receiver."""
        total = 0
        for pid in (os.getpid(), *(child.pid for child in self.children)):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                total += int(line.split()[1]) << 10 if line.startswith("Pss_Anon:") else 0
        return total

    def files(self, digest: str) -> dict[str, int]:
        """Inodes of at least half a version's bytes: with these bits in memory, others there, and any on the disk."""
        held = {"this": 0, "others": 0, "disk": 0}
        seen = set()
        for root in (self.memory, self.folder / "runs"):
            for file in root.rglob("*"):
                info = file.stat()
                if file.is_file() and info.st_size > self.bytes // 2 and info.st_ino not in seen:
                    seen.add(info.st_ino)
                    if root is not self.memory:
                        held["disk"] += file.suffix == ".safetensors"
                    else:
                        held["this" if snapshot.file_hash(file) == digest else "others"] += 1
        return held


async def measure(args: argparse.Namespace) -> Figures:
    """Publish the versions one by one; the figures are of the last."""
    with tempfile.TemporaryDirectory(prefix="headrace-node-") as name:
        node = Node(Path(name), args)
        await node.open()
        engine = None
        stages = [Stage(node.memory / "servers" / str(number), node.policy) for number in range(args.servers)]
        verified = Verified()
        try:
            if args.python:
                engine = await opened(node)
            seconds: dict[str, float] = {}
            for version in range(args.versions):
                before, spent = node.private(), cpu_seconds(node.children[0].pid)
                began = time.monotonic()
                ready = await asyncio.to_thread(node.write, version)
                seconds["write"] = time.monotonic() - began
                staged = await node.staged(ready)
                seconds["stage"] = time.monotonic() - began - seconds["write"]
                if engine is not None:
                    await engine.load(version, staged.path, staged.state_hash)
                else:
                    for stage in stages:
                        stage.put(version, staged.path, staged.state_hash, verified)
                seconds["serve"] = time.monotonic() - began
                grown = node.private() - before
                node.cpu["encode"] = (cpu_seconds(node.children[0].pid) - spent) / (node.bytes / 2**30)
            held = node.files(ready.state_hash)
            node.timed("hash", lambda: snapshot.file_hash(staged.path))
            node.timed(
                "checksums", lambda: expected(staged.path, node.policy, "bfloat16", cuda_digest.digest, ONE, "cuda")
            )
        finally:
            if engine is not None:
                await engine.stop()
            for stage in stages:
                stage.remove()
            await node.close()
    # The receiver and the engine each hash the file once.
    per_gib = sum(node.cpu[part] * (2 if part == "hash" else 1) / threads for part, threads in THREADS.items())
    return {
        "gib": node.bytes / 2**30,
        "copies": held["this"],
        "private_gib": grown / 2**30,
        "versions_in_memory": held["this"] + held["others"],
        "files_on_disk": held["disk"],
        **{f"{part}_s": value for part, value in seconds.items()},
        **{f"{part}_cpu_s_per_gib": value for part, value in node.cpu.items()},
        "large_s": per_gib * LARGE_GIB + LOAD_S,
    }


async def opened(node: Node) -> OneServer | Fleet:
    """The servers of a rollout actor."""
    options = SglangOptions(
        python=node.args.python, servers=node.args.servers, args=(*CPU, *SMALL), weights="disk"
    )  # fmt: skip
    section = Engine(kind="sglang", exact=False, max_batch=8)

    async def tokenizer() -> Path | None:
        return None

    setup = EngineSetup(section, node.policy, node.folder / "runs" / RUN, node.memory, "r", tokenizer)
    return await open_engine(setup, options, lambda wire, at, most: Sglang(node.policy, options, wire, at, most))


def main() -> None:
    """Measure, print the figures, and exit with 1 when a target is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.weight_node", description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--versions", type=int, default=3)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--python", default="", help="of an environment with SGLang")
    args = arguments(parser, gib=0.01, versions=2)
    figures = uvloop.run(measure(args))
    targets = {
        "copies": at_most(figures["copies"], 1),
        "private_gib": at_most(figures["private_gib"], 0.25),
        "files_on_disk": at_most(figures["files_on_disk"], 0),
        "large_s": at_most(figures["large_s"], 15.0),
    }
    finish(figures, targets, "torch")
    sys.exit(0 if args.smoke or all(target.met for target in targets.values()) else 1)


if __name__ == "__main__":
    main()
