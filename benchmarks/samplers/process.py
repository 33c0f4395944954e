"""One process of the simulation: runs some actors of a run under the real supervisor, and reports at its end.

It reads lines of JSON: an `Order` starts actors, a window (begin, end) ends them. Answers are lines of JSON too.
"""

import asyncio
import os
import sys
from pathlib import Path
from typing import Literal

import msgspec
import uvloop

from benchmarks.samplers import recorded
from benchmarks.samplers.sampler import Sampler, Shared, Times
from headrace.bus.runtime import logging
from headrace.bus.runtime.actor import Actor
from headrace.bus.runtime.supervisor import Supervisor
from headrace.config import Config, Curriculum, Evaluation, Production, Run, Tasks

Part = Literal["curriculum", "judge", "trainer", "samplers"]
SUITE = "simulated"


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """The run of an arm, and the actors that a process runs in it."""

    part: Part
    samplers: tuple[int, ...] = ()
    url: str
    credentials: str
    folder: str
    run: str
    seed: int
    bound: int
    on_stale: Literal["wait", "drop"]
    steps: int
    groups: int
    group_size: int
    speed: float

    @property
    def config(self) -> Config:
        """The configuration of the run."""
        return Config(
            run=Run(dir=f"{self.folder}/runs", id=self.run, seed=self.seed),
            production=Production(enabled=False),
            evaluation=Evaluation(before=False, after=False, every=0),
            tasks=Tasks(dir=f"{self.folder}/suites", suite=SUITE, heldout=SUITE, unseen=SUITE, uncertified=True),
            curriculum=Curriculum(
                group_size=self.group_size,
                groups_per_step=self.groups,
                staleness=self.bound,
                on_stale=self.on_stale,
                steps=self.steps,
            ),
        )


def actors_of(order: Order) -> list[tuple[type[Actor], str]]:
    """The actors of a process. Imports only what it runs."""
    match order.part:
        case "curriculum":
            from headrace.actors.curriculum import Curriculum as RealCurriculum

            return [(RealCurriculum, "curriculum")]
        case "judge":
            from headrace.actors.dead_letter import DeadLetter
            from headrace.actors.judge import Judge

            return [(Judge, "judge"), (DeadLetter, "dead-letter")]
        case "trainer":
            from benchmarks.samplers.learner import Stager, StandInTrainer

            StandInTrainer.trace, StandInTrainer.speed = recorded.read(), order.speed
            return [(StandInTrainer, "trainer"), (Stager, "stager")]
        case "samplers":
            Sampler.shared = Shared(recorded.read(), order.speed, len(order.samplers))
            return [(Sampler, f"sampler-{number:03d}") for number in order.samplers]


async def serve() -> None:
    """Run the actors of one order after the other, until standard input ends."""
    running: tuple[Supervisor, asyncio.Task[int]] | None = None
    while line := await asyncio.to_thread(sys.stdin.readline):
        if running is None:
            order = msgspec.json.decode(line, type=Order)
            logging.configure(Path(order.folder) / f"{order.run}-{order.part}-{os.getpid()}.log")
            actors = actors_of(order)
            supervisor = Supervisor(
                order.config,
                order.run,
                url=order.url,
                credentials=order.credentials,
                connect_s=60.0,
                drain_s=2.0,
            )
            running = supervisor, asyncio.create_task(supervisor.run(actors))
            if order.part == "samplers":
                await Sampler.shared.ready.wait()
            print("{}", flush=True)
        else:
            times = Times()
            if order.part == "samplers":
                times = Sampler.shared.times(*msgspec.json.decode(line, type=tuple[float, float]))
            running[0].stop()
            await running[1]
            running = None
            print(msgspec.json.encode(times).decode(), flush=True)


if __name__ == "__main__":
    uvloop.run(serve())
