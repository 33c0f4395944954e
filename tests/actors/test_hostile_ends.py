"""Attempts that leave their sandboxes in hostile states, through rollout, environment and judge: each gets its Score at
the first attempt."""

import shlex
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from headrace.actors.environment.actor import Environment
from headrace.actors.judge import Judge
from headrace.actors.rollout.actor import Rollout
from headrace.config import Environment as Section
from headrace.messages.rollout import Limits, PolicyRef, RolloutRequest
from headrace.messages.sandbox import ANY_RUN
from headrace.messages.subjects import TASK as REQUESTS
from headrace.messages.subjects import token
from headrace.messages.tasks import Oracle, Task, TaskRef
from tests.actors.test_harbor_tasks import config, scored, trajectories
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.folder_suites import write_suite
from tests.support.hostile_ends import FOLDER, program, states
from tests.support.hosts import CACHE
from tests.support.judging import ORACLE, TASK

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(3600)]
SUITE = "hostile"
ENDED = {"a killed agent"}
OVER = {"sparse files", "many long names", "no workspace", "a workspace that is a file"}
READ = {"names of control characters", "a file where the tests lie", "pipes and sockets"}
"""States by what can be known of the attempt's changes: nothing without its sandbox, nothing, all."""


def attempts(programs: dict[str, str]) -> list[tuple[Task, Oracle]]:
    """A task for every program, which the scripted oracle runs in place of its solution."""
    pairs = []
    for number, code in enumerate(programs.values()):
        ref = TaskRef(SUITE, f"t{number}")
        task = msgspec.structs.replace(TASK, ref=ref, allowed=("**",), tools=("terminal", "run_tests", "finish"))
        script = f"timeout 20 python3 -c {shlex.quote(code)}"
        pairs.append((task, msgspec.structs.replace(ORACLE, ref=ref, solution={}, script=script)))
    return pairs


async def outcomes(
    connect: Connect, place: Path, backend: Literal["process", "qemu"], programs: dict[str, str]
) -> dict[str, tuple[str, str, bool]]:
    """Of each program: the outcome of its attempt, the verdict, and whether any change was read."""
    write_suite(SUITE, place / "suites" / SUITE, attempts(programs), "a test")
    settings = config(place, Section(backend=backend, cache_dir=CACHE))
    bus, run = await connect("admin"), f"hostile-{backend}"
    async with (
        living(Environment, settings, await connect("environment", node=f"n-{backend}"), ANY_RUN),
        living(Judge, settings, await connect("judge"), run),
        living(Rollout, settings, await connect("rollout"), run),
    ):
        for slot in range(len(programs)):
            request = RolloutRequest(
                run=run,
                lane="train",
                group="g",
                slot=slot,
                attempt=0,
                task=TaskRef(SUITE, f"t{slot}"),
                seed=slot,
                policy=PolicyRef(kind="scripted", name="oracle"),
                limits=Limits(max_turns=12, max_tokens=50_000, context_tokens=50_000, wall_s=600.0),
            )
            await bus.publish(REQUESTS.at(run=run, lane="train", suite=token(SUITE)), request)
        scores, ends = await scored(bus, run, len(programs)), await trajectories(bus, run, len(programs))
    assert {score.attempt for score in scores.values()} == {0}
    return {
        name: (ends[slot].outcome, scores[slot].verdict, bool(ends[slot].diff or ends[slot].touched))
        for slot, name in enumerate(programs)
    }


async def test_hostile_ends_are_scored_at_the_first_attempt(connect: Connect, tmp_path: Path) -> None:
    found = await outcomes(
        connect, tmp_path, "process", {name: program(FOLDER[name]) for name in sorted(ENDED | OVER | READ)}
    )
    assert {verdict for _, verdict, _ in found.values()} == {"failed"}
    assert {name for name, (outcome, _, _) in found.items() if outcome == "sandbox_limit"} == ENDED | OVER
    assert {name for name, (_, _, changed) in found.items() if changed} == READ - {"pipes and sockets"}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["process", pytest.param("qemu", marks=pytest.mark.vm)])
async def test_a_sample_of_hostile_ends_is_scored(
    connect: Connect, tmp_path: Path, backend: Literal["process", "qemu"]
) -> None:
    everything = list(states(500, backend != "process"))
    found = await outcomes(connect, tmp_path, backend, dict(everything[::17]))
    assert {verdict for _, verdict, _ in found.values()} <= {"failed", "cheating"}
