"""headrace's side of `python -m benchmarks.bus`: actors in processes of their own, controlled by lines.

python -m benchmarks.bus_workers URL CREDENTIALS RUN BLOB_DIR UPLOAD (server | sink | producer) ID
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from typing import Any

import msgspec
import uvloop

from headrace.bus.connection import Bus
from headrace.bus.nats.received import Received
from headrace.bus.payloads.shared_memory import SharedMemoryStore
from headrace.bus.runtime.actor import Actor
from headrace.config import Bus as Section
from headrace.config import Config
from headrace.messages import subjects as s
from headrace.messages.base import Array
from headrace.messages.operations import Ack, Ping
from headrace.messages.rollout import PolicyRef, Sampling, Span, Trajectory, Turn
from headrace.messages.tasks import TaskRef
from headrace.parent_death import ending_with_parent

WINDOW = 16
ECHO = "hr.rpc.environment.rollout.ping"
HEARD = s.METRIC.at(actor="judge")
END_S = 10.0
"""Seconds in which a process must end once its input is closed."""


def trajectory(run: str, name: str) -> Trajectory:
    """About 1 MB that hardly compresses, in the fields that carry it in a real run. Readers compare run and name with
    the subject."""
    routed = Array.of(os.urandom(720_000), "|u1", (30_000, 4, 6))
    floats = Array("<f4", (60_000,), os.urandom(240_000))
    ids = Array("<i4", (10_000,), os.urandom(40_000))
    turn = Turn(index=0, segment=0, prompt_ids=ids, ids=ids, logprobs=floats, routed=routed, spans=(Span(0, 1, 1),))
    return Trajectory(
        run=run, lane="train", group=name, slot=0, attempt=0, id=name, task=TaskRef("s", "1"), family="f", seed=0,
        policy=PolicyRef(), sampling=Sampling(), outcome="finished", turns=(turn,), diff={},
    )  # fmt: skip


async def publish(bus: Bus, message: Trajectory) -> int:
    """Store it on its own subject, once."""
    where = s.TRAJ.at(run=message.run, group=message.group)
    return await bus.publish(where, message, msg_id=f"{message.run}-{message.group}")


class Sink(Actor):
    """The consuming side: decodes, and counts what is acknowledged."""

    role = "judge"

    async def start(self) -> None:
        """Consume the trajectories."""
        self.seen, self.wanted, self.full = 0, -1, asyncio.Event()
        await self.consume(s.TRAJ, self.handle, durable=f"sink-{self.run}", credit=WINDOW)

    async def handle(self, received: Received[Trajectory]) -> None:
        """Count one trajectory; answer when a single one is awaited."""
        assert len(received.message.turns[0].logprobs.data) == 240_000
        self.seen += 1
        if received.message.group.startswith("one-"):
            await self.metric(seen=self.seen)
        if self.seen == self.wanted:
            self.full.set()

    async def answer(self, count: int) -> dict[str, float]:
        """Wait until `count` trajectories have arrived since the start."""
        self.wanted = count
        if self.seen < count:
            await self.full.wait()
        self.full.clear()
        return {"seen": self.seen}


class Server(Actor):
    """Answers small calls."""

    role = "environment"

    async def start(self) -> None:
        """Serve."""
        await self.serve(ECHO, self.echo)

    async def echo(self, _: Ping) -> Ack:
        """The smallest possible answer."""
        return Ack()

    async def answer(self, _: int) -> dict[str, float]:
        """The reply needs no fields."""
        return {}


class Producer(Actor):
    """The sending side: sends a number of trajectories, `WINDOW` in flight. No two have the same bytes."""

    role = "rollout"

    async def start(self) -> None:
        """Make the trajectory from which all others are derived."""
        self.sent, self.message = 0, trajectory(self.run, self.id)

    async def answer(self, count: int) -> dict[str, float]:
        """Send them."""
        gate = asyncio.Semaphore(WINDOW)

        async def one(n: int) -> None:
            async with gate:
                await publish(self.bus, msgspec.structs.replace(self.message, group=f"{self.id}-{n}"))

        await asyncio.gather(*(one(n) for n in range(self.sent, self.sent + count)))
        self.sent += count
        return {"sent": count}


KINDS: dict[str, type[Sink] | type[Server] | type[Producer]] = {"sink": Sink, "server": Server, "producer": Producer}


async def connected(url: str, credentials: str, role: str, run: str, folder: str, upload: str) -> Bus:
    """An actor's bus, with the node's folder where one is named."""
    bus = await Bus.connect(url, role=role, credentials=credentials)
    bus.use_shared_memory(
        SharedMemoryStore.from_config(
            msgspec.convert({"blob_dir": folder, "blob_upload": upload}, Section), run, bus.node
        )
    )
    return bus


async def main(url: str, credentials: str, run: str, folder: str, upload: str, kind: str, id: str) -> None:
    """Run one actor. A line of standard input is a count; the process answers it when that count is reached."""
    bus = await connected(url, credentials, KINDS[kind].role, run, folder, upload)
    actor = KINDS[kind](Config(), bus, run, id)
    await actor.start()
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    print("{}", flush=True)
    while line := await reader.readline():
        print(json.dumps(await actor.answer(int(line))), flush=True)
    await actor.shut(5)
    await bus.close()


class Child:
    """A child process that answers each line with a line."""

    def __init__(self, process: asyncio.subprocess.Process, hello: Any) -> None:
        self.process, self.hello = process, hello

    @classmethod
    async def start(cls, *argv: str, env: dict[str, str] | None = None) -> "Child":
        """Start the process and wait for its first line."""
        pipe = asyncio.subprocess.PIPE
        # A session of its own, as Ray's processes have: Linux shares a busy machine out by session (autogroup).
        process = await asyncio.create_subprocess_exec(
            *ending_with_parent(argv), stdin=pipe, stdout=pipe, env=env, limit=1 << 24, start_new_session=True
        )
        child = cls(process, None)
        try:
            child.hello = await child._line()
        except BaseException:
            await child.stop()
            raise
        return child

    async def ask(self, line: str) -> Any:
        """Send one line and return the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        await self.process.stdin.drain()
        return await self._line()

    async def _line(self) -> Any:
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            await self.ended()
        return json.loads(line)

    async def ended(self) -> None:
        """Wait for an end that nobody asked for. RuntimeError."""
        code = await self.process.wait()
        raise RuntimeError(f"process {self.process.pid} of the benchmark ended with {code}")

    async def stop(self) -> None:
        """Close its input and wait for its end; kill it, and what it started, when it does not end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            async with asyncio.timeout(END_S):
                await self.process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            await self.process.wait()


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
