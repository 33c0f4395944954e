"""A task whose repository lies in a container image, through rollout, environment and judge."""

import asyncio
from pathlib import Path

import pytest

from headrace.actors.environment.actor import Environment
from headrace.actors.judge import Judge
from headrace.actors.rollout.actor import Rollout
from headrace.bus.connection import Bus
from headrace.config import Config, Production, Run, Tasks
from headrace.config import Environment as Section
from headrace.judging.rules import VERSION
from headrace.messages.judging import Score
from headrace.messages.rollout import Limits, PolicyRef, RolloutRequest, Trajectory
from headrace.messages.sandbox import ANY_RUN, Change
from headrace.messages.subjects import FAIL, SCORE, TASK, TRAJ, token
from headrace.messages.tasks import Oracle, Task, TaskRef, TestPlan
from headrace.vmhost.images import base, imported, packages
from headrace.vmhost.qemu import probe
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.archives import Members, docker_save, file, folder, link
from tests.support.folder_suites import write_suite
from tests.support.paths import ROOT

pytestmark = [pytest.mark.anyio, pytest.mark.vm, pytest.mark.timeout(600)]

CACHE = ROOT / ".cache" / "headrace"
SUITE = "in-image"
IMAGE = "registry.example/repository:1"


def suite(folder_: Path) -> None:
    """One task: a shell script of the image must print 3. Its hidden test runs by a command."""
    ref = TaskRef(SUITE, "1")
    plan = TestPlan(kind="command", argv=("sh", "tests/hidden.sh"), timeout_s=120.0)
    task = Task(
        ref=ref,
        family="image",
        prompt="add.sh should print the sum",
        files={},
        allowed=("*.sh",),
        tests=TestPlan(kind="command", argv=("sh", "tests/visible.sh"), timeout_s=120.0),
        image=IMAGE,
        repository="/testbed",
    )
    oracle = Oracle(
        ref=ref,
        hidden={"tests/hidden.sh": b'test "$(sh ./add.sh 1 2)" = 3 && test -e /testbed/kept\n'},
        tests=plan,
        expected=("command",),
        solution={"add.sh": b"echo $(($1 + $2))\n"},
    )
    write_suite(SUITE, folder_ / "suites" / SUITE, [(task, oracle)], "made by a test")


def make_image(folder_: Path) -> None:
    owner = {"uid": 1000, "gid": 100}
    below: Members = [
        folder("bin"),
        file("bin/busybox", probe._busybox(packages.folder(CACHE)), mode=0o755),
        *(link(f"bin/{name}", "busybox") for name in ("sh", "test")),
        file("etc/passwd", b"dev:x:1000:100::/home/dev:/bin/sh\n"),
        folder("testbed", **owner),
        folder("testbed/tests", **owner),
        file("testbed/kept", b"", **owner),
        file("testbed/add.sh", b"echo $(($1 - $2))\n", **owner),
        file("testbed/tests/visible.sh", b"sh ./add.sh 0 0\n", **owner),
    ]
    imported.take(CACHE, docker_save(folder_ / "i.tar", [below], [IMAGE], User="dev"), "repository-1")


async def both_scores(bus: Bus, run: str) -> dict[int, Score]:
    scores: dict[int, Score] = {}
    async for received in bus.follow("HR_SCORE", SCORE.at(run=run, judge=VERSION, group="g")):
        scores[received.message.slot] = received.message
        if len(scores) == 2:
            break
    return scores


async def first_failure(bus: Bus, run: str) -> str:
    """The reason why an attempt was given up; waits for one."""
    async for received in bus.follow("HR_LEDGER", FAIL.at(run=run, group="g")):
        return str(received.message.detail)
    return ""


async def test_a_repository_in_an_image_is_changed_and_judged(connect: Connect, tmp_path: Path) -> None:
    section = Section(backend="qemu", cache_dir=str(CACHE), warm=0, lease_s=120.0)
    await asyncio.to_thread(base.ensure, section)
    make_image(tmp_path)
    suite(tmp_path)
    config = Config(
        run=Run(dir=str(tmp_path)),
        environment=section,
        production=Production(enabled=False),
        tasks=Tasks(dir=str(tmp_path / "suites")),
    )
    bus, run = await connect("admin"), "images"
    trajectories: dict[int, Trajectory] = {}
    async with (
        living(Environment, config, await connect("environment", node="n1"), ANY_RUN),
        living(Judge, config, await connect("judge"), run),
        living(Rollout, config, await connect("rollout"), run),
    ):
        for slot, policy in enumerate(("oracle", "idle")):
            request = RolloutRequest(
                run=run,
                lane="train",
                group="g",
                slot=slot,
                attempt=0,
                task=TaskRef(SUITE, "1"),
                seed=slot,
                policy=PolicyRef(kind="scripted", name=policy),
                limits=Limits(max_turns=6, max_tokens=20_000, context_tokens=20_000, wall_s=600.0),
            )
            await bus.publish(TASK.at(run=run, lane="train", suite=token(SUITE)), request)
        failing = asyncio.create_task(first_failure(bus, run))
        scoring = asyncio.create_task(both_scores(bus, run))
        await asyncio.wait({failing, scoring}, return_when=asyncio.FIRST_COMPLETED)
        assert not failing.done(), failing.result()
        failing.cancel()
        scores = scoring.result()
        async for received in bus.follow("HR_TRAJ", TRAJ.at(run=run, group="g")):
            trajectories[received.message.slot] = received.message
            if len(trajectories) == 2:
                break
    assert trajectories[0].changes == (Change("add.sh", "file", 0o644),)
    assert trajectories[0].diff == {"add.sh": b"echo $(($1 + $2))\n"}
    assert trajectories[0].originals == {"add.sh": b"echo $(($1 - $2))\n"}
    assert trajectories[1].changes == () and trajectories[1].diff == {}
    assert (scores[0].verdict, scores[0].suspicions, scores[1].verdict) == ("passed", (), "failed")
