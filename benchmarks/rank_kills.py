"""Kills a random rank (SIGKILL) of a trainer of four processes in each of its steps, each rank equally often.

Rank 0 is the actor itself. The trainer is the process that `headrace up` starts, restarted within the same limits, over
a real broker. Trajectories are sampled with the published versions, and the ledger has every slot, so that `headrace
audit` can prove the run. A kill comes at a random moment of a step or between two. The default limits allow five
failures a minute, so two kills are at least `APART_S` apart. The time to go on is that from the kill to the event
`prepared`: the group is whole again, and has repeated nothing yet. Afterwards the state hashes must be those of an
undisturbed run of four ranks.

One JSON line at the end; exit code 1 unless all targets are met.

    python -m benchmarks.rank_kills --trials 20
"""

import argparse
import asyncio
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.conditions import arguments, at_least, at_most, finish
from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.nats.streams import declare
from headrace.config import Config, Mesh
from headrace.launch.supervision.children import Child, actor_command, keep_alive
from headrace.messages.rollout import Trajectory
from headrace.messages.subjects import EVENT, LEDGER
from headrace.messages.training import StepDone
from headrace.replay.audit import audit
from tests.support.keys import as_writers
from tests.support.rank_processes import ranks_of
from tests.support.recorded_run import PER_STEP, RunFeeder, config, new_run
from tests.support.records import issued

RANKS = 4
APART_S = 13.0
"""Seconds between two kills."""
START_S = 120.0
"""Longest wait for a trainer's processes."""


class Feeder(RunFeeder):
    """Also issues the slots of each group in the ledger, as the curriculum does."""

    async def close(self, name: str, sampled: Sequence[Trajectory], oldest: int) -> None:
        """As `RunFeeder`."""
        for slot, made in enumerate(sampled):
            record = issued(
                name, slot, size=len(sampled), index=int(name[1:]), oldest=oldest, run=self.run, task=made.task
            )
            await self.bus.publish(LEDGER.at(run=self.run, group=name), record)
        await super().close(name, sampled, oldest)


def setting(folder: Path, steps: int) -> Config:
    """Small micro-batches, of which every rank has several."""
    trainer = {"checkpoint_every": 2, "micro_tokens": 20, "mesh": Mesh(shard=RANKS)}
    curriculum = {"group_size": 2, "groups_per_step": PER_STEP, "steps": steps}
    return config(folder, trainer=trainer, curriculum=curriculum, algorithm={"grad_clip": 0.05})


@asynccontextmanager
async def trainer(server: Server, made: Config, feeder: Feeder) -> AsyncIterator[tuple[Child, list[str]]]:
    """The process of a trainer's actor as `headrace up` starts it, and the causes of its restarts."""
    file = feeder.folder / "config.json"
    file.write_bytes(msgspec.json.encode(made))
    argv = actor_command(["trainer"], config=file, run=feeder.run, url=server.url, credentials=str(server.credentials))
    path = os.pathsep.join(part for part in sys.path if part)
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    (feeder.folder / "logs").mkdir()
    child = Child("trainer", argv, feeder.folder / "logs" / "trainer.log", env)
    causes: list[str] = []
    await child.start()
    watching = asyncio.create_task(keep_alive(child, lambda _, why: causes.append(why)))
    try:
        yield child, causes
        if watching.done():
            watching.result()
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await child.stop(30.0)


async def running(child: Child, lost: set[int]) -> list[int]:
    """The processes of a trainer by rank, as soon as all run. lost: those that were killed."""
    async with asyncio.timeout(START_S):
        while True:
            process = child.process
            if process is not None and process.pid not in lost:
                found = [process.pid, *ranks_of(process.pid)]
                if len(found) == RANKS and not lost & set(found):
                    return found
            await asyncio.sleep(0.02)


async def prepared(feeder: Feeder, lives: int) -> None:
    """Wait until so many lives of the trainer were prepared."""
    count = 0
    where = EVENT.where(run=feeder.run, actor="trainer", type="event")
    async with asyncio.timeout(START_S):
        async for received in feeder.bus.follow("HR_EVENT", where):
            count += received.message.kind == "prepared"
            if count == lives:
                return


async def run(server: Server, bus: Bus, folder: Path, trials: int, seed: int | None) -> dict[str, Any]:
    """The figures of one run. seed: of the kills; None for an undisturbed run."""
    feeder, draw = Feeder(bus, new_run(), folder), random.Random(seed)
    order = [number % RANKS for number in range(trials)]
    draw.shuffle(order)
    victims: list[int] = []
    seconds: list[float] = []
    lost: set[int] = set()
    killed_at = 0.0
    async with trainer(server, setting(folder, trials + 1), feeder) as (child, causes):
        for number in range(trials):
            await feeder.version(number)
            if seed is not None:
                await asyncio.sleep(max(0.0, killed_at + APART_S - time.monotonic()))
            filling = asyncio.create_task(feeder.batch(number))
            if seed is not None:
                await asyncio.sleep(draw.random())  # the moment is random
                alive = await running(child, lost)
                victim = order[number]
                os.kill(alive[victim], signal.SIGKILL)
                killed_at = time.monotonic()
                lost.add(alive[victim])
                victims.append(victim)
                await prepared(feeder, number + 2)
                seconds.append(time.monotonic() - killed_at)
                print(f"kill {number + 1}: rank {victims[-1]}, {seconds[-1]:.1f} s", file=sys.stderr)
            await filling
            await feeder.version(number + 1)
    report = await audit(bus, feeder.run)
    done = [record for record in await feeder.steps() if isinstance(record, StepDone)]
    return {
        "hashes": [feeder.hashes[number] for number in range(trials + 1)],
        "victims": victims,
        "seconds": seconds,
        "process_restarts": len(causes),
        "report": report,
        "done": len(done),
        "inexact": sum(record.max_abs_dlp != 0.0 for record in done),
    }


async def measure(trials: int, seed: int) -> dict[str, Any]:
    """Both runs, on one broker."""
    with tempfile.TemporaryDirectory() as root:
        places = [Path(root) / name for name in ("broker", "undisturbed", "killed")]
        for place in places:
            place.mkdir()
        async with Server(places[0]) as server:
            async with await as_writers(server.url, server.credentials) as admin:
                await declare(admin)
                want = await run(server, admin, places[1], trials, None)
                got = await run(server, admin, places[2], trials, seed)
    report = got["report"]
    return {
        "ranks": RANKS,
        "trials": trials,
        "seed": seed,
        "victims": got["victims"],
        "kills_by_rank": {str(rank): count for rank, count in sorted(Counter(got["victims"]).items())},
        "hashes_equal": sum(a == b for a, b in zip(got["hashes"], want["hashes"], strict=True)),
        "versions": trials + 1,
        "balanced": report.balanced and want["report"].balanced,
        "issued": report.issued,
        "trained": report.trained,
        "duplicates": report.duplicates,
        "steps_recorded": got["done"],
        "steps_inexact": got["inexact"],
        "staleness_max": report.staleness_max,
        "staleness_bound": report.staleness_bound,
        "process_restarts": got["process_restarts"],
        "go_on_median_s": round(statistics.median(got["seconds"]), 2),
        "go_on_max_s": round(max(got["seconds"]), 2),
    }


def main() -> int:
    """Run the kills and print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=18)
    args = arguments(parser, trials=1)
    torch.set_num_threads(1)
    figures = asyncio.run(measure(args.trials, args.seed))
    targets = {
        "hashes_equal": at_least(figures["hashes_equal"], args.trials + 1),
        "unbalanced": at_most(int(not figures["balanced"]), 0),
        "duplicates": at_most(figures["duplicates"], 0),
        "untrained_slots": at_most(figures["issued"] - figures["trained"], 0),
        "steps_inexact": at_most(figures["steps_inexact"], 0),
        "staleness_max": at_most(figures["staleness_max"], figures["staleness_bound"]),
        "kills_of_rank_0": at_least(figures["kills_by_rank"].get("0", 0), args.trials // RANKS),
    }
    finish(figures, targets, "nats-py", "torch")
    return 0 if all(target.met for target in targets.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
