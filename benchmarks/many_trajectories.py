"""Compares hundreds of trajectories at once in one rollout actor with few at once: the same work, another credit.

    python -m benchmarks.many_trajectories [--count 256] [--few 32] [--turns 8] [--tokens 32] [--rounds 3]

Real: nats-server, the rollout actor in a process of its own, its embedded engine with an untrained policy so small that
the actor's own work shows, sandboxes of the process backend in another process, the turn log, the trajectories. A
run executes `--count` trajectories; its credit is `--few` or `--count`. Runs alternate, figures are medians, and ratios
are of the same round. The first trajectories of a run warm up and do not count.

loop_cpu_ms is processor time of the event loop's thread for each trajectory, cpu_ms that of the whole process with the
engine. lag_ms is the longest time for which the loop computed before it ran another task. memory_kib is the growth of
the process's peak of resident memory for each trajectory that runs at once, its keys and values included.
"""

import argparse
import asyncio
import gc
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from benchmarks.conditions import Figures, at_least, at_most, finish
from headrace.actors.environment.actor import Environment
from headrace.actors.rollout.actor import Rollout
from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.nats.streams import declare
from headrace.config import Config, Engine
from headrace.config import Environment as Machines
from headrace.config import Rollout as RolloutSection
from headrace.messages.rollout import RolloutRequest, Trajectory
from headrace.messages.sandbox import ANY_RUN
from headrace.messages.subjects import TASK, TRAJ, token
from tests.support import staged
from tests.support.actors import living
from tests.support.keys import as_writers
from tests.support.many_requests import SLOTS, requests

RUN, NODE, WARM = "many", "here", 16
"""WARM: trajectories that do not count."""


def settings(folder: Path, count: int, credit: int) -> Config:
    """The configuration of both processes."""
    machines = Machines(backend="process", lease_s=120.0, max_vms=count // SLOTS + 8, judge_share=0, max_busy=0.0)
    return msgspec.structs.replace(
        staged.config(folder),
        environment=machines,
        rollout=RolloutSection(credit=credit),
        engine=Engine(max_batch=count),
    )


def _memory(key: str) -> int:
    """Bytes of a key of /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


async def _lags(seconds: list[float]) -> None:
    while True:
        before = time.thread_time()
        await asyncio.sleep(0.002)
        seconds.append(time.thread_time() - before)


async def rollout(url: str, credentials: str, folder: str, count: int, credit: int) -> None:
    """The process of the rollout actor: `ready`, then `warm`, and after a line of input the figures of `count`
    trajectories."""
    bus = await Bus.connect(url, role="rollout", credentials=credentials, node=NODE)
    async with living(Rollout, settings(Path(folder), count, credit), bus, RUN, "wide") as actor:
        print("ready", flush=True)
        while actor._episodes < WARM:
            await asyncio.sleep(0.01)
        print("warm", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        lags: list[float] = []
        watching = asyncio.create_task(_lags(lags))
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the kernel's VmHWM starts again
        before = _memory("VmRSS")
        wall, cpu, loop, tokens = time.perf_counter(), time.process_time(), time.thread_time(), actor._tokens
        while actor._episodes < WARM + count:
            await asyncio.sleep(0.005)
        wall_s = time.perf_counter() - wall
        figures = {
            "tokens_per_s": (actor._tokens - tokens) / wall_s,
            "wall_s": wall_s,
            "cpu_ms": 1e3 * (time.process_time() - cpu) / count,
            "loop_cpu_ms": 1e3 * (time.thread_time() - loop) / count,
            "lag_ms": 1e3 * max(lags),
            "memory_kib": (_memory("VmHWM") - before) / credit / 1024,
        }
        watching.cancel()
        print(json.dumps(figures), flush=True)
    await bus.close()


async def one(folder: Path, args: argparse.Namespace, credit: int) -> Figures:
    """A run with this credit: its figures."""

    async with Server(folder / "broker") as broker:

        async def connect(role: str, **options: Any) -> Bus:
            return await Bus.connect(broker.url, role=role, credentials=broker.credentials, **options)

        admin = await as_writers(broker.url, broker.credentials)
        await declare(admin)
        await staged.prepare(connect, RUN)
        config = settings(folder, args.count, credit)
        words = ("rollout", broker.url, broker.credentials, folder, args.count, credit)
        async with living(Environment, config, await connect("environment", node="machines"), ANY_RUN):
            pipe = asyncio.subprocess.PIPE
            line = (sys.executable, "-m", "benchmarks.many_trajectories", *map(str, words))
            child = await asyncio.create_subprocess_exec(*line, stdin=pipe, stdout=pipe)
            output = child.stdout
            assert child.stdin is not None and output is not None
            try:

                async def until(start: str) -> str:
                    while not (text := (await output.readline()).decode()).startswith(start):
                        assert text, "the process of the rollout actor ended"
                    return text

                async def issue(wanted: list[RolloutRequest]) -> None:
                    subject = TASK.at(run=RUN, lane="train", suite=token(wanted[0].task.suite))
                    await asyncio.gather(*(admin.publish(subject, request) for request in wanted))

                await until("ready")
                await staged.stage(admin, RUN, NODE, 0, *staged.made(folder)[0])
                await issue(requests(RUN, range(WARM), turns=args.turns, tokens=args.tokens))
                await until("warm")
                child.stdin.write(b"\n")
                numbers = range(WARM, WARM + args.count)
                await issue(requests(RUN, numbers, turns=args.turns, tokens=args.tokens))
                figures: Figures = json.loads(await until("{"))
                made = [r.message async for r in admin.history("HR_TRAJ", TRAJ.where(run=RUN))]
                stored = [message for message in made if isinstance(message, Trajectory)]
                assert len({message.id for message in stored}) == len(stored) == WARM + args.count
                turns = sum(len(message.turns) for message in stored[WARM:])
                figures["turns_per_s"] = turns / figures.pop("wall_s")
            finally:
                if child.returncode is None:
                    child.kill()
                await child.wait()
        await admin.close()
    return figures


async def measure(args: argparse.Namespace) -> Figures:
    """All rounds: the medians of each credit, and the ratios of a round."""
    runs: dict[int, list[Figures]] = {args.few: [], args.count: []}
    for number in range(args.rounds):
        for credit in (args.few, args.count) if number % 2 == 0 else (args.count, args.few):
            with tempfile.TemporaryDirectory() as folder:
                runs[credit].append(await one(Path(folder), args, credit))
            print(credit, runs[credit][-1], flush=True)
    figures: Figures = {"count": args.count, "few": args.few, "turns": args.turns, "tokens": args.tokens}
    for credit, each in runs.items():
        for name in each[0]:
            figures[f"at_once_{credit}_{name}"] = round(statistics.median(run[name] for run in each), 3)
    pairs = list(zip(runs[args.few], runs[args.count], strict=True))
    for name in runs[args.few][0]:
        figures[f"ratio_{name}"] = round(statistics.median(many[name] / few[name] for few, many in pairs), 3)
    figures["rounds"] = args.rounds
    return figures


def main() -> None:
    """Run the process of the rollout actor, or all of the benchmark; end with one line of JSON."""
    if sys.argv[1:2] == ["rollout"]:
        url, credentials, folder, count, credit = sys.argv[2:]
        gc.freeze()  # as a process of actors does, see headrace/garbage.py
        uvloop.run(rollout(url, credentials, folder, int(count), int(credit)))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=256)
    parser.add_argument("--few", type=int, default=32)
    parser.add_argument("--turns", type=int, default=8, help="of a trajectory, at most")
    parser.add_argument("--tokens", type=int, default=32, help="of a turn, at most")
    parser.add_argument("--rounds", type=int, default=3)
    figures = uvloop.run(measure(parser.parse_args()))
    targets = {
        "ratio_turns_per_s": at_least(figures["ratio_turns_per_s"], 1.0),
        "ratio_loop_cpu_ms": at_most(figures["ratio_loop_cpu_ms"], 1.25),
        "ratio_cpu_ms": at_most(figures["ratio_cpu_ms"], 1.25),
    }
    finish(figures, targets, "torch", "nats-py")


if __name__ == "__main__":
    main()
