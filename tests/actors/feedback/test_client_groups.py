"""Loops outside: groups of clients' sessions train the run itself, by the lines that docs/clients.md shows."""

import asyncio
import json
import os
import re
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from benchmarks.feedback.world import RUN, Product, Taught, Users, configuration, product
from headrace.actors.feedback.actor import Feedback as FeedbackActor
from headrace.config import Feedback, Gate, Tasks
from headrace.messages.ledger import GroupClosed, GroupDropped
from headrace.messages.product import PurgeCertificate, PurgeStatement
from headrace.messages.rollout import Trajectory
from headrace.messages.subjects import CLOSE, STEP, TRAJ
from headrace.messages.training import StepDone, StepFailed
from headrace.replay.audit import prove
from tests.support.paths import ROOT

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(300)]

DOCS, PROGRAMS = ROOT / "docs" / "clients.md", ROOT / "tests" / "gateway" / "programs"
SIZE, PER_STEP = 4, 2


@asynccontextmanager
async def world(folder: Path, steps: int, taught: Taught) -> AsyncIterator[tuple[Product, Users]]:
    """A run that trains on clients' sessions, and its clients."""
    config = configuration(folder, 1, Feedback(), Gate(), taught)
    curriculum = replace(config.curriculum, steps=steps, group_size=SIZE, groups_per_step=PER_STEP, staleness=2)
    config = replace(
        config,
        tasks=Tasks(suite="client"),
        curriculum=curriculum,
        evaluation=replace(config.evaluation, before=False, after=False),
    )
    async with product(folder, config, taught) as running, Users.of(running) as users:
        yield running, users


def loop_of_the_docs(users: Users) -> dict[str, Any]:
    """The names that the block of docs/clients.md defines, for this run."""
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(DOCS), "exec"), names)
    names |= {"URL": users.product.url, "KEY": users.http.headers["x-api-key"], "GROUP_SIZE": SIZE}
    return names


async def step_of(running: Product, number: int) -> StepDone:
    async for received in running.bus.follow("HR_STEP", STEP.at(run=RUN)):
        running.check()
        if isinstance(done := received.message, StepDone | StepFailed) and done.step == number:
            assert isinstance(done, StepDone), done
            return done
    raise AssertionError


async def test_the_loop_of_the_docs_trains_the_run(tmp_path: Path) -> None:
    async with world(tmp_path, 2, Taught(tests=0.0, trigger=0.5, tokens=40_000)) as (running, users):
        loop = loop_of_the_docs(users)
        assert len(DOCS.read_text().split("```python")[1].split("```")[0].strip().splitlines()) <= 30
        await asyncio.to_thread(loop["train"], 2)
        steps = [await step_of(running, number) for number in range(2)]
        report, wrong = await prove(running.bus, RUN)
        closings = [each.message async for each in running.bus.history("HR_SCORE", CLOSE.where(run=RUN))]
    for step in steps:
        assert step.exact and step.max_abs_dlp == 0.0 and step.trained_slots == SIZE * PER_STEP
    closed = [each for each in closings if isinstance(each, GroupClosed)]
    assert {each.task.task for each in closed} == set(loop["TASKS"]) and len(closed) == 2 * PER_STEP
    assert {slot.reward for each in closed for slot in each.slots} == {0.0, 1.0}
    assert not wrong and report.trained == 2 * SIZE * PER_STEP and report.in_flight == 0
    assert report.feedback is not None and report.feedback.ends["trained"] == 2 * SIZE * PER_STEP


async def turn(users: Users, session: str, *said: str) -> None:
    """One turn of a session whose history is `said` and answers."""
    messages = [{"role": "user", "content": each} for each in said]
    body = {"model": "latest", "messages": messages}
    where = f"{users.product.url}/v1/chat/completions"
    async with users.http.post(where, json=body, headers={"X-Headrace-Session": session}) as answer:
        assert answer.status == 200, await answer.text()


async def rewarded(users: Users, group: str, reward: float) -> str:
    """A session with a sub-agent of its own: its id."""
    url = f"{users.product.url}/v1/sessions"
    async with users.http.post(url, json={"task": "t", "group": group, "user": "ada"}) as answer:
        session = str((await answer.json())["session"])
    await turn(users, session, "fix 1")
    await turn(users, session, "fix 2")  # another history under the same id: a branch
    async with users.http.post(f"{url}/{session}/reward", json={"reward": reward}) as answer:
        assert answer.status == 200, await answer.text()
    return session


async def test_an_attempt_is_a_tree_and_leaves_with_its_user(tmp_path: Path) -> None:
    async with world(tmp_path, 1, Taught(tests=0.0, trigger=0.5, tokens=20_000)) as (running, users):
        sessions = [await rewarded(users, f"g{number // SIZE}", number % 3 / 2) for number in range(SIZE * PER_STEP)]
        user = sessions[0].partition(".")[0]
        step = await step_of(running, 0)
        made = [each.message async for each in running.bus.history("HR_TRAJ", TRAJ.where(run=RUN, group="*.*"))]
        attempts = [each for each in made if isinstance(each, Trajectory) and each.lane == "train"]
        own = [each for each in made if isinstance(each, Trajectory) and each.lane == "production"]
        report, wrong = await prove(running.bus, RUN)
        assert not wrong and step.max_abs_dlp == 0.0 and step.trained_slots == len(sessions) == len(attempts)
        for attempt in attempts:
            assert [each.segment for each in attempt.turns] == [0, 1]
            assert [each.index for each in attempt.turns] == [0, 1]
        sampled = [sorted(sum(len(t.ids) for t in each.turns) for each in part) for part in (attempts, own)]
        assert sum(sampled[0]) == sum(sampled[1]) and report.feedback is not None
        assert report.feedback.ends["trained"] == len(own) == 2 * len(sessions), "each branch has a rating"
        feedback = running.actors[f"{RUN}/feedback"]
        assert isinstance(feedback, FeedbackActor)
        certificate = await feedback.purges.purge(user)
        assert isinstance(certificate, PurgeCertificate)
        statement = msgspec.json.decode(certificate.statement, type=PurgeStatement)
        assert (statement.branch, statement.absorbed_steps, statement.pending_groups) == (RUN, (0,), ())
        left = [each.message async for each in running.bus.history("HR_TRAJ", TRAJ.where(run=RUN, group="*.*"))]
        report, wrong = await prove(running.bus, RUN)
    assert (
        not left and not wrong and report.feedback is not None and report.feedback.ends["trained"] == 2 * len(sessions)
    )


async def test_what_is_too_old_for_its_batch_is_late(tmp_path: Path) -> None:
    """Sessions of version 0 that are rewarded when the run is two steps further, with a bound of two."""
    async with world(tmp_path, 4, Taught(tests=0.0, trigger=0.5, tokens=20_000)) as (running, users):
        loop = loop_of_the_docs(users)
        opened = {"task": "t", "group": "old"}
        kept = [(await asyncio.to_thread(loop["call"], "/v1/sessions", opened))["session"] for _ in range(SIZE)]
        for session in kept:
            await turn(users, session, "fix 3")
        await asyncio.to_thread(loop["train"], 3)
        await step_of(running, 2)
        for number, session in enumerate(kept):
            await asyncio.to_thread(loop["call"], f"/v1/sessions/{session}/reward", {"reward": number % 2})
        async for received in running.bus.follow("HR_SCORE", CLOSE.where(run=RUN)):
            if isinstance(received.message, GroupDropped):
                assert received.message.reason == "stale"
                break
        report, wrong = await prove(running.bus, RUN)
    assert not wrong and report.feedback is not None and report.feedback.ends["late"] == SIZE
    assert report.dropped == {"stale": SIZE} and report.trained == 3 * SIZE * PER_STEP


@pytest.mark.clients
@pytest.mark.parametrize("package", ["verifiers", "openenv"])
async def test_a_loop_of_another_package_trains_the_run(tmp_path: Path, package: str) -> None:
    """The package runs the attempts, one step trains on them, and the ids that the loop read are the record's."""
    python = ROOT / ".cache" / "clients" / package / "bin" / "python"
    assert python.exists(), f"{python} is missing: make test-clients"
    taught = Taught(tests=0.0 if package == "verifiers" else 0.5, trigger=0.5, tokens=40_000)
    async with world(tmp_path, 1, taught) as (running, users):
        words = [str(PROGRAMS / f"{package}_loop.py"), running.url, users.http.headers["x-api-key"], f"{SIZE}", "2"]
        loop = await asyncio.create_subprocess_exec(
            python, *words, stdout=PIPE, stderr=PIPE, env=os.environ | {"PATH": f"{python.parent}:{os.environ['PATH']}"}
        )
        out, err = await loop.communicate()
        assert loop.returncode == 0, err.decode()[-3000:]
        attempts = [json.loads(line) for line in out.splitlines() if line.startswith(b"{")]
        step = await step_of(running, 0)
        report, wrong = await prove(running.bus, RUN)
        made = [each.message async for each in running.bus.history("HR_TRAJ", TRAJ.where(run=RUN, group="*.*"))]
    assert step.exact and step.max_abs_dlp == 0.0 and step.trained_slots == len(attempts) == SIZE * PER_STEP
    assert not wrong and report.trained == len(attempts) and {each["reward"] for each in attempts} == {0.0, 1.0}
    sessions = {each.group: each for each in made if isinstance(each, Trajectory)}
    for each in attempts:
        turns = sessions[each["session"]].turns
        if "ids" in each:
            assert each["ids"] == [id for turn in turns for id in turn.ids.tolist()]
            assert each["logprobs"] == [value for turn in turns for value in turn.logprobs.tolist()]
