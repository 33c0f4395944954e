"""Kills or stops sender, receiver and broker in the middle of a version, and checks every version that is visible.

    python -m benchmarks.weight_chaos [--rounds 200] [--seed 1]

Real processes over a real broker: `headrace actor weight_sender`, `headrace actor weight_receiver`, nats-server. In
each round the trainer (this process) announces one version, and at one stage of it, as the streams show it (announced,
first chunk stored, manifest stored, head stored, staged), one of the three gets SIGKILL or SIGSTOP. A killed process
is started again. A stopped sender is replaced by another one and continues when that one has committed; a stopped
receiver or broker continues after a while. Every combination is used in turn, in an order drawn by the seed.

Checked all the time: every head record, every WeightsStaged and every file with a version's name on the receiver's
store must be the trainer's bits for that version. A round ends when the receiver has announced the version.
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvloop

from benchmarks.conditions import Figures, arguments, at_most, finish
from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.nats.streams import declare
from headrace.messages.subjects import EVENT, WEIGHT_CHUNK, WEIGHT_HEAD, WEIGHT_MANIFEST
from headrace.messages.training import SnapshotReady
from headrace.messages.weights import WeightHead, WeightsStaged
from headrace.parent_death import die_with, ending_with_parent
from headrace.weights import proof, snapshot, tensor_state
from headrace.weights.full.location import FOLDER, Location
from headrace.weights.full.snapshots import FullSnapshots
from headrace.weights.signing import Trust
from headrace.weights.state import WeightError

VICTIMS = ("sender", "receiver", "broker")
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
STAGES = ("announced", "chunk", "manifest", "head", "staged")
RUN, NODE = "rchaos", "n1"
ASLEEP_S = 0.5
"""Seconds for which a stopped receiver or broker stays stopped."""
PATIENCE_S = 240.0
"""A round that takes longer has failed. Far above every timeout of the bus, also on a busy machine."""
ELEMENTS = 3_000_000
CONFIG = """
[run]
id = "{run}"
dir = "{folder}"
[weights]
anchor_every = 7
keep = 3
"""


class Arena:
    """The processes of one run, the trainer, and all observations."""

    def __init__(self, folder: Path, seed: int):
        self.folder, self.rng = folder, random.Random(seed)
        self.server = Server(folder / "broker")
        self.children: dict[str, asyncio.subprocess.Process] = {}
        self.hashes: dict[int, str] = {}
        self.wrong: list[str] = []
        self.counts: Counter[str] = Counter()
        self.recovery_s: list[float] = []
        self._weights = np.random.default_rng(seed).standard_normal(ELEMENTS).astype(np.float32)

    async def open(self) -> None:
        """Broker, streams, connections, sender and receiver."""
        await self.server.start()
        async with await Bus.connect(self.server.url, role="admin", credentials=self.server.credentials) as admin:
            await declare(admin)
        self.trainer = await Bus.connect(self.server.url, role="trainer", credentials=self.server.credentials)
        self.looker = await Bus.connect(self.server.url, role="operator", credentials=self.server.credentials)
        (self.folder / "config.toml").write_text(CONFIG.format(run=RUN, folder=self.folder / "runs"))
        for name in ("sender", "receiver"):
            await self.start(name)
        self._watching = asyncio.gather(self._watch_heads(), self._watch_staged())

    async def close(self) -> None:
        """End all of it."""
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        for child in self.children.values():
            await _end(child)
        await self.trainer.close()
        await self.looker.close()
        await self.server.stop()

    async def start(self, name: str) -> asyncio.subprocess.Process:
        """A new process of that name."""
        parent = os.getpid()
        log = os.open(self.folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            words = [sys.executable, "-m", "headrace.cli", "actor", f"weight_{name}"]
            words += ["--config", str(self.folder / "config.toml"), "--run", RUN, "--url", self.server.url]
            words += ["--credentials", str(self.server.credentials)]
            child = await asyncio.create_subprocess_exec(
                *ending_with_parent(words),
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=log,
                preexec_fn=lambda: die_with(parent, signal.SIGKILL),
            )
        finally:
            os.close(log)
        self.children[name] = child
        return child

    def write(self, version: int) -> SnapshotReady:
        """Write the trainer's file of the next version: a few weights change, in some versions most of them."""
        rng = np.random.default_rng(version)
        hit = rng.random(ELEMENTS) < (0.5 if version % 6 == 5 else 0.02)
        self._weights[hit] *= 1 + 2.0**-7 * rng.choice([-1, 1], int(hit.sum())).astype(np.float32)
        path = self.folder / "runs" / "trainer" / f"{version}.safetensors"
        tensors = {"layer.weight": torch.from_numpy(self._weights).bfloat16(), "norm.weight": torch.ones(64)}
        self.hashes[version] = tensor_state.write(path, tensors)
        (self.folder / "runs" / "trainer" / f"{version - 3}.safetensors").unlink(missing_ok=True)
        return SnapshotReady(
            run=RUN, version=version, path=str(path), state_hash=self.hashes[version], bytes=path.stat().st_size
        )

    async def reached(self, stage: str, version: int, after: int) -> None:
        """Wait until a version's stage shows in the streams."""
        if stage == "announced":
            return
        if stage == "staged":
            await self.staged(version, after)
            return
        where = {
            # A full snapshot's chunks are no records.
            "chunk": WEIGHT_CHUNK.where(run=RUN, version=version, shard=0),
            "manifest": WEIGHT_MANIFEST.where(run=RUN, version=version),
            "head": WEIGHT_HEAD.at(run=RUN),
        }
        wanted = [where["manifest"], where["chunk"]] if stage == "chunk" else [where[stage]]
        async for received in self.looker.follow("HR_WEIGHTS", *wanted):
            if stage != "head" or received.message.version == version:
                return

    async def staged(self, version: int, after: int) -> None:
        """Wait until the receiver has announced a version."""
        where = EVENT.where(run=RUN, type=WeightsStaged.type_name)
        async for received in self.looker.follow("HR_EVENT", where, start=after + 1):
            if received.message.version == version:
                return

    async def _watch_heads(self) -> None:
        async for received in self.looker.follow("HR_WEIGHTS", WEIGHT_HEAD.at(run=RUN)):
            head = received.message
            self.counts["heads"] += 1
            if not isinstance(head, WeightHead) or head.state_hash != self.hashes.get(head.version):
                self.wrong.append(f"a head of version {head.version} has state {head.state_hash}")

    async def _watch_staged(self) -> None:
        where = EVENT.where(run=RUN, type=WeightsStaged.type_name)
        async for received in self.looker.follow("HR_EVENT", where):
            staged = received.message
            self.counts["announcements"] += 1
            if staged.state_hash != self.hashes.get(staged.version):
                self.wrong.append(f"version {staged.version} was announced with state {staged.state_hash}")

    def explain(self) -> None:
        """The last log lines of the processes and their state, for a round that does not end."""
        for name, child in self.children.items():
            end = "lives" if child.returncode is None else f"ended with {child.returncode}"
            log = (self.folder / f"{name}.log").read_text(errors="replace")
            print(f"{name} {end}; it said last:\n{log[-2000:]}", file=sys.stderr)

    def look(self) -> None:
        """Every file that has a version's name is that version, whole."""
        for file in (self.folder / "runs" / RUN / "nodes").glob("*/weights/*.safetensors"):
            try:
                state_hash = snapshot.file_hash(file)
            except FileNotFoundError:
                continue  # the receiver has just removed the file
            except WeightError as error:
                self.wrong.append(f"{file.name} cannot be read: {error}")
                continue
            self.counts["files"] += 1
            if state_hash != self.hashes.get(int(file.stem)):
                self.wrong.append(f"{file.name} has state {state_hash}")

    async def round(self, version: int, victim: str, fault: signal.Signals, stage: str) -> None:
        """Publish one version and inject its fault."""
        after = await self.looker.last_seq("HR_EVENT")
        ready = self.write(version)
        watch = asyncio.create_task(self.reached(stage, version, after))
        await self.trainer.publish(EVENT.at(run=RUN, actor="trainer", type=ready.type_name), ready)
        await watch
        since = time.monotonic()
        if victim == "broker":
            await self._fault_broker(fault)
        elif fault is signal.SIGKILL:
            self.children[victim].kill()
            await self.children[victim].wait()
            self.look()
            await self.start(victim)
        else:
            await self._stop(victim, version)
        await self.staged(version, after)
        self.recovery_s.append(time.monotonic() - since)
        self.look()
        self.counts[f"{victim}_{fault.name.lower()}"] += 1
        self.counts[stage] += 1

    async def _fault_broker(self, fault: signal.Signals) -> None:
        if fault is signal.SIGSTOP:
            os.kill(self.server.pid, signal.SIGSTOP)
            self.look()
            await asyncio.sleep(ASLEEP_S)
            os.kill(self.server.pid, signal.SIGCONT)
            return
        port = self.server.port
        await self.server.kill()
        self.look()
        self.server = Server(self.folder / "broker", port=port)
        await self.server.start()

    async def _stop(self, victim: str, version: int) -> None:
        sleeper = self.children[victim]
        sleeper.send_signal(signal.SIGSTOP)
        self.look()
        if victim == "receiver":
            await asyncio.sleep(ASLEEP_S)
            sleeper.send_signal(signal.SIGCONT)
            return
        await self.start("sender")
        await self.reached("head", version, 0)
        sleeper.send_signal(signal.SIGCONT)
        # The continued sender tries to publish a version that its successor has published: wait for the attempt, then
        # end it.
        await asyncio.sleep(ASLEEP_S)
        await _end(sleeper)


async def _end(child: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.kill()
    await child.wait()


async def within(what: Awaitable[Any], name: str) -> Any:
    """Wait with a time limit."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await what
    except TimeoutError:
        raise AssertionError(f"{name} did not end within {PATIENCE_S:g} s") from None


async def tell(text: str) -> None:
    """Nothing goes wrong between an object and its proof."""
    raise AssertionError(text)


async def chaos(folder: Path, rounds: int, seed: int) -> Figures:
    """Run the rounds; the observations. AssertionError when a round does not end."""
    arena = Arena(folder, seed)
    await arena.open()
    try:
        ways = list(itertools.product(VICTIMS, SIGNALS, STAGES))
        order: list[tuple[str, signal.Signals, str]] = []
        for version in range(rounds):
            if not order:
                order = arena.rng.sample(ways, len(ways))
            victim, fault, stage = order.pop()
            name = f"round {version}: {fault.name} for the {victim} at stage {stage}"
            try:
                await within(arena.round(version, victim, fault, stage), name)
            except BaseException:
                arena.explain()
                raise
            print(name, f"{arena.recovery_s[-1]:.1f} s", flush=True)
        trust = Trust.load(arena.server.credentials)
        location = Location(str(folder / "runs" / RUN / FOLDER))
        chain_proof = await proof.prove(arena.looker, RUN, trust, FullSnapshots(location, None, tell).fetch)
    finally:
        await arena.close()
    ordered = sorted(arena.recovery_s)
    return {
        "rounds": rounds,
        "heads": arena.counts["heads"],
        "announcements": arena.counts["announcements"],
        "files_hashed": arena.counts["files"],
        "partial_or_wrong": len(arena.wrong),
        "wrong": arena.wrong[:5],
        "chain_faults": len(chain_proof.faults),
        "chain_versions": chain_proof.versions,
        "equal_to_trainer": chain_proof.state_hash == arena.hashes[rounds - 1],
        "recovery_p50_s": round(ordered[len(ordered) // 2], 3),
        "recovery_max_s": round(ordered[-1], 3),
        **{name: arena.counts[name] for name in sorted(arena.counts) if "_sig" in name},
        **{f"at_{stage}": arena.counts[stage] for stage in STAGES},
    }


def main() -> None:
    """Inject faults, check, end with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    args = arguments(parser, rounds=1)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="headrace-chaos-") as folder:
        figures = uvloop.run(chaos(Path(folder), args.rounds, args.seed))
    targets = {
        "partial_or_wrong": at_most(figures["partial_or_wrong"], 0),
        "chain_faults": at_most(figures["chain_faults"], 0),
        "not_equal_to_trainer": at_most(int(not figures["equal_to_trainer"]), 0),
    }
    finish(figures, targets, "nats-py", "torch")


if __name__ == "__main__":
    main()
