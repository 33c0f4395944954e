"""Requests a burst of sandboxes from hundreds of nodes: real environment actors and broker, simulated machines.

    python -m benchmarks.burst [--nodes 300] [--burst 100000] [--rates 250,500,1000]

THIS IS A SIMULATION of machines. Real: nats-server, the environment actor of every node (its leases, its pool,
its queue group, its heartbeats), the client (`headrace.sandboxes`), every message. Simulated: QEMU. The start time of a
simulated machine is log-normally distributed with the p50 and p99 of measured clones; a node has at most `--starts`
starts at once on a node. Its private memory lies between that of a parked clone and that of a clone after a pytest run;
a node refuses when its memory is full. The defaults were measured on two cores under TCG (`python -m
benchmarks.vm_clone` measures again).

First some seconds at each rate, arrivals evenly spaced, all released; then the whole burst at once, all of it held.
Times are from a request's arrival to its sandbox, the client process's own queue included. Many nodes share a process,
and all share this machine, so its processors saturate first: the CPU time per acquire is given for each process.
"""

import argparse
import asyncio
import json
import math
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import uvloop

from benchmarks.conditions import Figures, at_least, at_most, finish
from headrace import process_stat
from headrace.actors.environment import actor as environment
from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.nats.streams import declare
from headrace.config import Config, Environment
from headrace.config import Sandboxes as Defaults
from headrace.messages.sandbox import Acquire, NoCapacity, SandboxLost
from headrace.messages.tasks import SandboxLimits
from headrace.sandboxes.client import RemoteSandbox, Sandboxes
from headrace.vmhost.backend import Capabilities, OnEvent
from headrace.vmhost.node.host import Host

RUN = "burst"
PROCESSES = 2
"""Number of processes that run nodes, and of processes that run clients."""


class Answers:
    """A channel on which everything succeeds."""

    busy = False

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[str] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()

    async def call(self, header: dict[str, Any], bodies: Sequence[bytes] = (), timeout: float = 30.0) -> Any:
        """Answer as a healthy guest."""
        return {}, []

    def close(self, reason: str) -> None:
        """Close it; idempotent."""
        if not self.lost.done():
            self.lost.set_result(reason)
            self.ended.set_result(None)


class SimulatedMachine:
    """A machine whose start takes the drawn time and that holds the drawn memory until it is killed."""

    slots = 1
    limit_bytes = 1 << 24

    def __init__(self, backend: "SimulatedBackend", mib: float) -> None:
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._backend, self._mib = backend, mib
        self._channel = Answers()

    async def open(self, slot: int) -> Any:
        """Open the machine's only slot."""
        return self._channel

    async def ready(self) -> None:
        """It is."""

    async def check_integrity(self, thorough: bool) -> tuple[str, ...]:
        """No file changes in a simulated machine."""
        return ()

    def leave(self, channel: Any) -> None:
        """Do nothing, because the slot ends with its machine."""

    def kill(self) -> None:
        """Free its memory."""
        self._channel.close("released")
        if not self.lost.done():
            self.lost.set_result("released")
            self._backend.used -= self._mib


class SimulatedBackend:
    """One node's machines."""

    name, slots = "simulated", 1
    capabilities = Capabilities()

    def __init__(
        self, seed: int, p50_ms: float, p99_ms: float, least: float, most: float, capacity: float, starts: int
    ):
        self._rng = random.Random(seed)
        self._mu, self._sigma = math.log(p50_ms / 1e3), math.log(p99_ms / p50_ms) / 2.326
        self._least, self._most, self._capacity = least, most, capacity
        self._starts = asyncio.Semaphore(starts)
        self.used = 0.0

    def slots_of(self, template: str) -> int:
        """One slot per machine."""
        return 1

    async def machine(self, template: str, limits: SandboxLimits) -> SimulatedMachine:
        """Start a machine; returns after the drawn time."""
        mib = self._rng.uniform(self._least, self._most)
        self.used += mib
        async with self._starts:
            await asyncio.sleep(self._rng.lognormvariate(self._mu, self._sigma))
        return SimulatedMachine(self, mib)

    def busy(self) -> str:
        """Simulated machines use no processor."""
        return ""

    def reserve(self, template: str, limits: SandboxLimits) -> None:
        """`machine` counts its memory at once."""

    def free_idle(self, template: str, limits: SandboxLimits) -> None:
        """There are no idle machines."""

    def shortage(self, template: str, limits: SandboxLimits) -> str:
        """Memory, when the largest machine does not fit any more."""
        return "" if self.used + self._most <= self._capacity else "too little memory is free"

    def facts(self) -> dict[str, Any]:
        """The value of this variable."""
        return {"backend": "simulated"}

    def cpu_ms(self) -> float:
        """None."""
        return 0.0

    async def settle(self) -> None:
        """No ended machine is left to wait for."""

    async def close(self) -> None:
        """There is nothing to release."""


async def nodes(url: str, credentials: str, first: int, count: int, draws: Sequence[float]) -> None:
    """Run many nodes in this process until its standard input ends."""
    p50, p99, least, most, capacity, starts = draws

    class SimulatedHost(Host):
        @classmethod
        async def open(
            cls, section: Environment, *, on_event: OnEvent | None = None, limits: Defaults | None = None
        ) -> "Host":
            seed = first + len(actors)
            backend: Any = SimulatedBackend(seed, p50, p99, least, most, capacity, int(starts))
            return cls(section, backend, on_event or (lambda *event: None), limits)

    vars(environment)["Host"] = SimulatedHost
    config = Config(environment=Environment(max_vms=1 << 20, judge_share=0))
    actors: list[environment.Environment] = []
    for number in range(first, first + count):
        bus = await Bus.connect(url, role="environment", credentials=credentials, node=f"n{number:04d}")
        actor = environment.Environment(config, bus, RUN, f"environment-{number}")
        await actor.start()
        actors.append(actor)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    os._exit(0)


class Asker:
    """Requests sandboxes and records the results."""

    def __init__(self, sandboxes: Sandboxes, name: str) -> None:
        self._sandboxes, self._name = sandboxes, name
        self.times: list[float] = []
        self.failed: Counter[str] = Counter()
        self.where: Counter[str] = Counter()
        self.held: list[RemoteSandbox] = []

    async def one(self, number: int) -> None:
        """Acquire one sandbox; the time counts from now."""
        arrived = time.perf_counter()
        request = Acquire(
            run=RUN,
            lane="train",
            role="rollout",
            group=f"{self._name}-{number}",
            slot=0,
            attempt=0,
            isolation="episode",
            lease_s=3600.0,
        )
        try:
            sandbox = await self._sandboxes.acquire(request, patience_s=600.0)
        except (NoCapacity, SandboxLost) as error:
            self.failed[type(error).__name__] += 1
            return
        self.times.append(time.perf_counter() - arrived)
        self.where[sandbox.node] += 1
        self.held.append(sandbox)

    async def all(self, count: int, rate: float) -> None:
        """Acquire `count` sandboxes, evenly spaced at a rate per second; 0 is at once."""
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number in range(count):
                if rate and (ahead := began + number / rate - time.perf_counter()) > 0:
                    await asyncio.sleep(ahead)
                group.create_task(self.one(number))

    async def give_back(self) -> None:
        """Release all of them."""
        for at in range(0, len(self.held), 256):
            await asyncio.gather(*map(self._sandboxes.release, self.held[at : at + 256]))


async def askers(url: str, credentials: str, name: str) -> None:
    """Read ``count rate hold`` lines; request sandboxes and answer each line with the results."""
    bus = await Bus.connect(url, role="rollout", credentials=credentials)
    sandboxes = Sandboxes(bus, 3600.0)
    rounds = 0
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        count, rate, hold = (float(word) for word in line.split())
        asker = Asker(sandboxes, f"{name}-{rounds}")
        rounds += 1
        spent, began = _cpu(), time.perf_counter()
        await asker.all(int(count), rate)
        wall, cpu = time.perf_counter() - began, _cpu() - spent
        if not hold:
            await asker.give_back()
        times = [round(t, 5) for t in asker.times]
        _say({"times": times, "failed": asker.failed, "where": asker.where, "wall_s": wall, "cpu_s": cpu})


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _cpu_of(pid: int) -> float:
    stat = process_stat.read(pid)
    assert stat is not None, f"process {pid} has ended"
    return stat.cpu_s


class Child:
    """A child process with a protocol of lines."""

    alive: ClassVar[list["Child"]] = []

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.alive.append(self)

    @classmethod
    async def start(cls, *words: object) -> "Child":
        """Return once it is ready."""
        pipe = asyncio.subprocess.PIPE
        line = (sys.executable, "-m", "benchmarks.burst", *map(str, words))
        child = cls(await asyncio.create_subprocess_exec(*line, stdin=pipe, stdout=pipe, limit=1 << 26))
        while (text := await child.line()) != "ready":
            assert text, "a process of the benchmark ended"
        return child

    async def line(self) -> str:
        """The next line of its output."""
        assert self.process.stdout is not None
        return (await self.process.stdout.readline()).decode().strip()

    async def ask(self, text: str) -> dict[str, Any]:
        """Write one line, and return the next line of output as JSON."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{text}\n".encode())
        while not (answer := await self.line()).startswith("{"):
            assert answer, "a process of the benchmark ended"
        reply: dict[str, Any] = json.loads(answer)
        return reply


async def measure(args: argparse.Namespace) -> tuple[Figures, Figures]:
    """All rates, then the burst."""
    draws = (args.p50, args.p99, args.parked, args.used, args.memory_gib * 1024, args.starts)
    with tempfile.TemporaryDirectory() as folder:
        async with Server(Path(folder)) as broker:
            async with await Bus.connect(broker.url, role="admin", credentials=broker.credentials) as admin:
                await declare(admin)
            place = (broker.url, broker.credentials)
            share = args.nodes // PROCESSES
            homes = [await Child.start("nodes", *place, number * share, share, *draws) for number in range(PROCESSES)]
            clients = [await Child.start("askers", *place, f"a{number}") for number in range(PROCESSES)]
            pids = [home.process.pid for home in homes]
            assert broker.pid is not None
            figures: Figures = {"simulated": True, "nodes": share * PROCESSES, "burst": args.burst}
            whole: Figures = {}
            for rate in [*map(float, args.rates.split(",")), 0.0]:
                count = int(rate * args.seconds) if rate else args.burst
                before = sum(map(_cpu_of, pids)), _cpu_of(broker.pid)
                line = f"{count / PROCESSES} {rate / PROCESSES} {0 if rate else 1}"
                replies = await asyncio.gather(*(client.ask(line) for client in clients))
                after = sum(map(_cpu_of, pids)), _cpu_of(broker.pid)
                name = f"rate_{rate:g}" if rate else "burst"
                whole = seen(replies, count)
                whole["nodes_cpu_ms_per_acquire"] = round(1e3 * (after[0] - before[0]) / count, 3)
                whole["broker_cpu_ms_per_acquire"] = round(1e3 * (after[1] - before[1]) / count, 3)
                figures |= {f"{name}_{key}": value for key, value in whole.items()}
                print(name, whole, flush=True)
    return figures, whole


async def guarded(args: argparse.Namespace) -> tuple[Figures, Figures]:
    """End all child processes, however the measurement ends."""
    try:
        return await measure(args)
    finally:
        for child in Child.alive:
            with suppress(ProcessLookupError):
                child.process.kill()
            await child.process.wait()


def seen(found: Sequence[dict[str, Any]], count: int) -> Figures:
    """The results of all clients together."""
    times = sorted(t for one in found for t in one["times"])
    where = sum((Counter(one["where"]) for one in found), Counter[str]())
    wall = max(one["wall_s"] for one in found)
    return {
        "acquired": len(times),
        "failed": count - len(times),
        "p50_s": round(statistics.median(times), 4),
        "p99_s": round(times[int(0.99 * (len(times) - 1))], 4),
        "per_s": round(len(times) / wall, 1),
        "nodes_used": len(where),
        "fullest_over_mean": round(max(where.values()) * len(where) / len(times), 3),
        "emptiest_over_mean": round(min(where.values()) * len(where) / len(times), 3),
        "askers_cpu_ms_per_acquire": round(1e3 * sum(one["cpu_s"] for one in found) / count, 3),
    }


def main() -> None:
    """Run one process of the benchmark, or all of it."""
    if sys.argv[1:2] == ["nodes"]:
        url, credentials, first, count, *draws = sys.argv[2:]
        uvloop.run(nodes(url, credentials, int(first), int(count), [float(word) for word in draws]))
        return
    if sys.argv[1:2] == ["askers"]:
        uvloop.run(askers(*sys.argv[2:5]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=300)
    parser.add_argument("--burst", type=int, default=100_000)
    parser.add_argument("--rates", default="250,500,1000", help="acquires a second, before the burst")
    parser.add_argument("--seconds", type=float, default=5.0, help="at each rate")
    parser.add_argument("--p50", type=float, default=139.0, help="ms until a clone answers")
    parser.add_argument("--p99", type=float, default=304.0)
    parser.add_argument("--parked", type=float, default=24.6, help="private memory of a parked clone, MiB")
    parser.add_argument("--used", type=float, default=64.5, help="private MiB after a pytest run")
    parser.add_argument("--memory-gib", type=float, default=16.0, help="of a node, for sandboxes")
    parser.add_argument("--starts", type=int, default=32, help="machines that a node starts at once")
    figures, burst = uvloop.run(guarded(parser.parse_args()))
    targets = {
        "failed": at_most(burst["failed"], 0),
        "nodes_used": at_least(burst["nodes_used"], figures["nodes"]),
        "fullest_over_mean": at_most(burst["fullest_over_mean"], 1.25),
    }
    finish(figures, targets, "nats-py")


if __name__ == "__main__":
    main()
