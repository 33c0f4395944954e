"""A trajectory of a bundled task, a judge's configuration, and waiting for a score."""

from pathlib import Path
from typing import Any

import msgspec

from headrace.bus.connection import Bus
from headrace.config import Config, Run, Tasks
from headrace.config import Environment as Section
from headrace.judging.rules import VERSION
from headrace.messages.base import Array
from headrace.messages.judging import Score
from headrace.messages.rollout import ToolCall, Trajectory, Turn
from headrace.messages.subjects import SCORE, TRAJ
from headrace.tasks import open_suite
from tests.support.paths import ROOT
from tests.support.records import of

CACHE = str(ROOT / ".cache" / "headrace")
SUITE = open_suite("generated/train")
TASK = SUITE.task(SUITE.ids()[0])
ORACLE = SUITE.oracle(SUITE.ids()[0])
(PATH, FIXED), *_ = ORACLE.solution.items()
KILLS_ITS_KEEPER = b"import os\nos.kill(os.getppid(), 9)\n"
"""Under QEMU such code takes the machine down; under the process backend it ends the agent of the slot."""


def config(folder: Path, **changes: Any) -> Config:
    base = Config(
        run=Run(dir=str(folder)),
        environment=Section(backend="process", lease_s=20.0),
        tasks=Tasks(dir=str(folder / "suites")),
    )
    return msgspec.structs.replace(base, **changes)


def trajectory(run: str, group: str, diff: dict[str, bytes], *, slot: int = 0, **changes: Any) -> Trajectory:
    turn = of(
        Turn,
        prompt_ids=Array.of([1, 2], "<i4"),
        ids=Array.of([3, 4, 5], "<i4"),
        logprobs=Array.of([-0.5, -0.5, -0.5], "<f4"),
        calls=(ToolCall(id="0.0", name="finish"),),
    )
    made = of(
        Trajectory,
        run=run,
        group=group,
        slot=slot,
        id=f"{group}-{slot}-0",
        task=TASK.ref,
        family=TASK.family,
        turns=(turn,),
        diff=diff,
    )
    return msgspec.structs.replace(made, **changes)


async def first(bus: Bus, stream: str, subject: str, wanted: Any) -> Any:
    """The first message that `wanted` accepts, waiting for it."""
    async for received in bus.follow(stream, subject):
        if wanted(received.message):
            return received.message


async def judged(bus: Bus, made: Trajectory) -> Score:
    """Publish a trajectory and wait for its score."""
    seq = await bus.publish(TRAJ.at(run=made.run, group=made.group), made)
    where = SCORE.at(run=made.run, judge=VERSION, group=made.group)
    score = await first(bus, "HR_SCORE", where, lambda message: message.trajectory_seq == seq)
    assert isinstance(score, Score)
    return score
