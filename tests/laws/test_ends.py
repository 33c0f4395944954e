"""Every request has an end: good ones, bad ones and those whose rollout actor is killed; afterwards nothing is left.

Gateway, environment (process backend) and dead-letter actor run in the test's process, rollout actors as processes that
are killed with SIGKILL. The policy is the scripted oracle.
"""

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp
import msgspec
import pytest

from headrace.actors.dead_letter import DeadLetter
from headrace.actors.environment.actor import Environment
from headrace.actors.gateway import Gateway
from headrace.actors.rollout.actor import LANES
from headrace.bus.broker.server import Server
from headrace.bus.connection import Bus
from headrace.config import Config, Limits, Production, Run
from headrace.config import Environment as EnvironmentSection
from headrace.gateway.split import Split
from headrace.messages.rollout import PolicyRef, RolloutRequest
from headrace.messages.subjects import DLQ, STREAMS, TASK, token
from headrace.messages.tasks import TaskRef
from headrace.vmhost.backends.process import ProcessBackend
from headrace.vmhost.node import host
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.api_keys import made

pytestmark = pytest.mark.anyio
JSON = {"Content-Type": "application/json"}
ROLLOUT = (
    "import msgspec, sys, uvloop\n"
    "from headrace.bus.runtime import ack_waits\n"
    "from headrace.actors.rollout import actor as rollout\n"
    "from headrace.bus.runtime.supervisor import run_actors\n"
    "from headrace.config import Config\n"
    "ack_waits.WORK_S = 1.0\n"
    "config = msgspec.json.decode(sys.argv[1], type=Config)\n"
    "uvloop.run(run_actors([rollout.Rollout], config, sys.argv[2], url=sys.argv[3], credentials=sys.argv[4]))\n"
)


def children() -> set[int]:
    """The processes below this one."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            parents[int(stat.parent.name)] = int(fields[1])
    below = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    return below - {os.getpid()}


async def consumers(admin: Bus) -> dict[bool, set[str]]:
    """The names of all consumers of all streams: durable ones and ephemeral ones."""
    names: dict[bool, set[str]] = {True: set(), False: set()}
    for stream in STREAMS:
        reply = msgspec.json.decode(await admin.connection.api(f"CONSUMER.LIST.{stream.name}", {"offset": 0}))
        assert reply["total"] == len(reply["consumers"]), "one page holds all of them"
        for consumer in reply["consumers"]:
            names[bool(consumer["config"].get("durable_name"))].add(f"{stream.name} {consumer['name']}")
    return names


def files(environment: Environment) -> tuple[int, int]:
    """Open files of this process, and folders of sandboxes."""
    backend = environment._host._backend
    assert isinstance(backend, ProcessBackend)
    return len(os.listdir("/proc/self/fd")), len(os.listdir(backend._scratch.path))


class Product:
    """The actors of a product lane, and users who ask for anything."""

    def __init__(self, server: Server, config: Config, run: str, gateway: Gateway, operator: Bus) -> None:
        self.server, self.config, self.run, self.gateway, self.operator = server, config, run, gateway, operator
        self.url = json.loads((Path(config.run.dir) / run / "gateway.json").read_text())["url"]
        self.ends: Counter[str] = Counter()
        self.done = 0
        self.headers: dict[str, str] = {}
        self.own: dict[str, str] = {}

    async def make_keys(self) -> None:
        for tenant, headers in (("acme", self.headers), ("default", self.own)):
            headers["x-api-key"] = await made(self.operator, tenant, self.gateway, requests_per_minute=1_000_000)

    async def start_rollout(self) -> asyncio.subprocess.Process:
        config = msgspec.json.encode(self.config).decode()
        argv = (sys.executable, "-c", ROLLOUT, config, self.run, self.server.url, str(self.server.credentials))
        return await asyncio.create_subprocess_exec(
            *argv, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )

    async def ask(self, http: aiohttp.ClientSession, number: int) -> None:
        """Send one request and wait for its end."""
        kind = number % 12
        good = {"user": f"user{number % 5}", "suite": "generated/heldout", "task": str(number % 40)}
        if kind == 5:
            await self.unanswerable(number)
        elif kind == 6:
            bad = good | {"task": "no such task"}
            async with http.post(self.url + "/v1/sessions", json=bad, headers=self.own) as answer:
                self.ends[str(answer.status)] += 1
        elif kind in (8, 9, 10):
            await self.use_agent(http, number)
        elif kind == 11:
            async with http.post(self.url + "/v1/agents", json={"prompt": ""}, headers=self.headers) as answer:
                self.ends[f"agents {answer.status}"] += 1
        elif kind == 7:
            async with http.post(self.url + "/v1/sessions", data=b"{", headers=self.own | JSON) as answer:
                self.ends[str(answer.status)] += 1
        else:
            async with http.post(self.url + "/v1/sessions", json=good, headers=self.own) as answer:
                assert answer.status == 202, await answer.text()
                session = (await answer.json())["session"]
            view = {"state": "queued"}
            while view["state"] not in ("finished", "failed"):
                async with http.get(f"{self.url}/v1/sessions/{session}?wait=20", headers=self.own) as answer:
                    view = await answer.json()
            self.ends[view["state"]] += 1
        self.done += 1

    async def use_agent(self, http: aiohttp.ClientSession, number: int) -> None:
        """A run of an agent: to its end with a follow-up in the same workspace; cancelled; or read as a stream."""
        made = await self.agent_call(http, "POST", "", {"prompt": "fix it", "workspace": {"files": {"a.py": "1\n"}}})
        where, first = f"/{made['agent']['id']}", made["run"]["id"]
        if number % 12 == 9:
            await self.agent_call(http, "POST", f"{where}/runs/{first}/cancel")  # or it ended before
        if number % 12 == 10:
            async with http.get(f"{self.url}/v1/agents{where}/runs/{first}/stream", headers=self.headers) as answer:
                assert (await answer.read()).endswith(b"event: done\ndata: {}\n\n")
        ended = await self.agent_run(http, where, first)
        self.ends[f"agent {ended}"] += 1
        if number % 12 == 8:
            second = await self.agent_call(http, "POST", f"{where}/runs", {"prompt": "again"})
            self.ends[f"follow-up {await self.agent_run(http, where, second['id'])}"] += 1
        while (await self.agent_call(http, "POST", f"{where}/archive")).get("status") != "ARCHIVED":
            await asyncio.sleep(0.05)

    async def agent_run(self, http: aiohttp.ClientSession, where: str, run: str) -> str:
        """The state with which a run ends."""
        while (view := await self.agent_call(http, "GET", f"{where}/runs/{run}"))["status"] == "RUNNING":
            await asyncio.sleep(0.3)
        return str(view["status"])

    async def agent_call(self, http: aiohttp.ClientSession, method: str, path: str, body: Any = None) -> Any:
        async with http.request(method, f"{self.url}/v1/agents{path}", json=body, headers=self.headers) as answer:
            assert answer.status in (200, 201, 202, 409), await answer.text()
            return await answer.json()

    async def unanswerable(self, number: int) -> None:
        """A request that no rollout actor can handle: it ends as a dead letter."""
        request = RolloutRequest(
            run=self.run,
            lane="production",
            group=f"stray.{number}",
            slot=0,
            attempt=0,
            task=TaskRef("generated/none", "1"),
            seed=1,
            policy=PolicyRef("scripted", name="oracle"),
        )
        await self.operator.publish(TASK.at(run=self.run, lane="production", suite=token("none")), request)
        self.ends["stray"] += 1

    async def kill(self, kills: int, total: int) -> None:
        """Keep two rollout actors running, and kill one of them `kills` times while the requests run."""
        running = [await self.start_rollout(), await self.start_rollout()]
        try:
            for number in range(kills):
                while self.done < total * (number + 1) // (kills + 2):
                    await asyncio.sleep(0.02)
                dying = running.pop(0)
                dying.send_signal(signal.SIGKILL)
                await dying.wait()
                running.append(await self.start_rollout())
            while self.done < total:
                await asyncio.sleep(0.02)
        finally:
            for rollout in running:
                rollout.terminate()
            await asyncio.gather(*(rollout.wait() for rollout in running))


@pytest.mark.parametrize(
    ("total", "kills"), [(12, 1), pytest.param(1000, 50, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
async def test_every_request_ends_and_nothing_is_left(
    server: Server, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int, kills: int
) -> None:
    # Users' sandboxes need an isolating backend; machines would make this test minutes longer.
    monkeypatch.setattr(host, "demands", lambda request: set(request.requires))
    run = f"r{uuid4().hex[:8]}"
    config = Config(
        run=Run(dir=str(tmp_path)),
        environment=EnvironmentSection(backend="process", lease_s=6.0),
        production=Production(rollouts=()),
        limits=Limits(max_turns=6, max_tokens=20_000, context_tokens=20_000),
    )
    (tmp_path / run).mkdir()
    admin, operator = await connect("admin"), await connect("operator")
    before = children()
    async with (
        living(DeadLetter, config, await connect("dead_letter"), run),
        living(Environment, config, await connect("environment", node="n1"), run) as environment,
        living(Gateway, config, await connect("gateway"), run) as gateway,
    ):
        gateway.split.promoted = PolicyRef("scripted", name="oracle")
        gateway.agents._agents._split = Split()
        # Users' tasks have no solution.
        gateway.agents._agents._split.promoted = PolicyRef("scripted", name="edit-tests")
        product = Product(server, config, run, gateway, operator)
        await product.make_keys()
        durable = (await consumers(admin))[True] | {f"HR_TASK rollout-{run}-{lane}" for lane in LANES}
        ephemeral = (await consumers(admin))[False]
        open_files, folders = files(environment)
        async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as group:
            group.create_task(product.kill(kills, total))
            limit = asyncio.Semaphore(16)

            async def ask(number: int) -> None:
                async with limit:
                    await product.ask(http, number)

            for number in range(total):
                group.create_task(ask(number))
        asked = Counter(number % 12 for number in range(total))
        ends = product.ends
        assert [ends[end] for end in ("stray", "404", "400", "agents 400")] == [asked[kind] for kind in (5, 6, 7, 11)]
        assert ends["finished"] + ends["failed"] == sum(asked[kind] for kind in range(5))
        runs = {end: count for end, count in ends.items() if end.startswith("agent ")}
        more = {end: count for end, count in ends.items() if end.startswith("follow-up ")}
        assert sum(runs.values()) == asked[8] + asked[9] + asked[10] and sum(more.values()) == asked[8]
        assert ends["agent CANCELLED"] <= asked[9]
        assert ends["failed"] + ends["agent ERROR"] + ends["follow-up ERROR"] <= kills, ends
        assert (gateway._count("queued"), gateway._count("running")) == (0, 0)
        while await admin.last("HR_TASK", TASK.where(run=run)) is not None:
            await asyncio.sleep(0.05)  # dead letters free the queue
        while len(environment._leases):
            await asyncio.sleep(0.05)  # the last leases of killed actors lapse
        while files(environment)[1] > folders:
            await asyncio.sleep(0.05)
        assert files(environment)[0] <= open_files, "a file stays open"
        sessions = await admin.kv("HR_SESSION")
        assert await sessions.keys(f"{run}.session.*.*") == [], "an open session is left"
        agents = len(await sessions.keys(f"{run}.session.agent.*.*"))
        assert agents == asked[8] + asked[9] + asked[10], "agents stay until their users are purged"
    letters = [received.message async for received in operator.history("HR_DLQ", DLQ.where())]
    tasks = [letter.subject for letter in letters if letter.subject.startswith(f"hr.task.{run}.")]
    ours = Counter(subject.endswith(".none") for subject in tasks)
    failed = ends["failed"] + ends["agent ERROR"] + ends["follow-up ERROR"]
    assert ours[True] == asked[5] and ours[False] <= failed, "a dead letter is an answer to its user"
    assert children() <= before, "a process is left"
    left = await consumers(admin)
    assert left[True] <= durable, "one durable consumer per actor and lane, however many rollout actors came and went"
    if kills > 1:  # the broker ends the ephemeral consumers of a killed process after a minute
        while {name for name in (await consumers(admin))[False] if name not in ephemeral}:
            await asyncio.sleep(1.0)
