"""`headrace gate --rollback` as a process of its own, against gateways and rollout actors that serve clients meanwhile.

A small product with real parts: three gateways and two rollout actors. Two ratings make version 1 of the branch, and
`headrace gate --promote` promotes it. Clients then hold sessions of up to two turns, each at its own gateway, without a
second try. A gateway is reached when no session that begins there later gets the version that was rolled back; a
session that began before keeps its version.
"""

import asyncio
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
import pytest

from benchmarks.feedback.world import PASSED, RUN, TOOL, Product, Taught, Users, ask, configuration, product
from headrace.bus.connection import Bus
from headrace.config import Bus as BusSection
from headrace.config import Config, Feedback, Gate
from headrace.gateway.tenants.store import add
from headrace.messages.rollout import Trajectory
from headrace.messages.subjects import EVENT, TRAJ

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(600)]

GATEWAYS = ("gateway", "gateway-2", "gateway-3")
ROLLOUTS = ("product", "second")
FUNCTION = {"type": "function", "function": {"name": TOOL.name, "parameters": TOOL.parameters}}


class Began(NamedTuple):
    """One session: its group, its gateway, and the second at which its first request was sent."""

    group: str
    gateway: str
    at: float


class Clients:
    """Users whose requests are sent once: an answer other than 200 is a failed request."""

    def __init__(self, http: aiohttp.ClientSession, urls: dict[str, str]) -> None:
        self._http, self._urls = http, urls
        self.sessions: list[Began] = []
        self.failed = Counter[str]()
        self.sent = 0
        self.ended = asyncio.Event()

    async def hold(self, number: int) -> None:
        """Hold one session after another at one gateway until `ended`."""
        gateway = GATEWAYS[number % len(GATEWAYS)]
        turn = 0
        while not self.ended.is_set():
            turn += 1
            await self._session(gateway, f"client{number}", turn)

    async def _session(self, gateway: str, user: str, number: int) -> None:
        url, began, group = self._urls[gateway], time.monotonic(), ""
        messages: list[dict[str, Any]] = [{"role": "user", "content": ask(number)}]
        for _ in range(2):
            body = {"model": "latest", "messages": messages, "tools": [FUNCTION], "user": user}
            headers = {"x-headrace-session": f"{user}-{number}"}
            reply, session = await self._send("POST", f"{url}/v1/chat/completions", body, headers)
            if reply is None:
                return
            if not group:
                group = session
                self.sessions.append(Began(group, gateway, began))
            said = reply["choices"][0]["message"]
            calls = said.get("tool_calls") or []
            messages.append({"role": "assistant", "content": said["content"] or "", "tool_calls": calls})
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": PASSED} for call in calls]
            if not calls:
                messages[-1].pop("tool_calls")
                messages.append({"role": "user", "content": ask(number + 1)})
        await self._send("DELETE", f"{url}/v1/sessions/{group}", None, {})

    async def _send(
        self, method: str, url: str, body: dict[str, Any] | None, headers: dict[str, str]
    ) -> tuple[dict[str, Any] | None, str]:
        self.sent += 1
        try:
            async with self._http.request(method, url, json=body, headers=headers) as answer:
                text = await answer.text()
        except aiohttp.ClientError as error:
            self.failed[type(error).__name__] += 1
            return None, ""
        if answer.status != 200:
            self.failed[f"{answer.status} {text[:200]}"] += 1
            return None, ""
        return json.loads(text), answer.headers.get("X-Headrace-Session", "")


async def command(folder: Path, *words: str) -> None:
    """Run a headrace command. RuntimeError unless it ends with 0."""
    argv = (sys.executable, "-m", "headrace.cli", *words)
    process = await asyncio.create_subprocess_exec(*argv, cwd=folder, stderr=asyncio.subprocess.PIPE)
    _, said = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"headrace {' '.join(words)} ended with {process.returncode}: {said.decode()}")


async def replicas(running: Product) -> dict[str, str]:
    """Start the other gateways and the other rollout actor; each gateway's address."""
    address = Path(running.config.run.dir) / RUN / "gateway.json"
    urls = {GATEWAYS[0]: running.url}
    for name in GATEWAYS[1:]:
        await running.start("gateway", RUN, running.config, name)
        urls[name] = str(json.loads(address.read_text())["url"])
    await running.start("rollout", RUN, running.config, ROLLOUTS[1])
    return urls


async def branch_version(running: Product, users: Users) -> None:
    """Rate sessions until version 1 of the branch is staged."""
    for number in range(running.config.feedback.batch):
        session, _, _ = await users.session(f"user{number}", number)
        await users.rate(session, number % 2 == 0)
    async for received in running.bus.follow("HR_EVENT", EVENT.where(run=running.branch, type="weights_staged")):
        if received.message.version == 1:
            return


async def served(running: Product, sessions: list[Began]) -> dict[str, Trajectory]:
    """The trajectories of the sessions that were closed, by group."""
    groups = {session.group for session in sessions}
    by_group: dict[str, Trajectory] = {}
    async for received in running.bus.history("HR_TRAJ", TRAJ.where(run=RUN, group="*.*")):
        if isinstance(received.message, Trajectory) and received.message.group in groups:
            by_group[received.message.group] = received.message
    return by_group


async def measure(folder: Path, clients: int, before_s: float, after_s: float) -> dict[str, Any]:
    """One rollback under traffic."""
    taught = Taught(tests=0.5, tokens=8000)
    feedback = Feedback(enabled=True, batch=2, staleness=2, user_cap=0)
    config = configuration(folder, 1, feedback, Gate(canary=(0.25,), sessions=1000), taught)
    production = msgspec.structs.replace(config.production, rollouts=ROLLOUTS)
    config = msgspec.structs.replace(config, production=production)
    async with product(folder, config, taught) as running, Users.of(running) as users:
        broker = BusSection(url=running.server.url, credentials=str(running.server.credentials))
        recorded: Config = msgspec.structs.replace(config, bus=broker)
        (folder / RUN / "config.json").write_bytes(msgspec.json.encode(recorded))
        urls = await replicas(running)
        await branch_version(running, users)
        await command(folder, "gate", str(folder / RUN), "--promote", "1", "--branch")
        operator = await Bus.connect(running.server.url, role="operator", credentials=running.server.credentials)
        async with operator:
            key = await add(operator, "acme", requests_per_minute=10**6)
        async with aiohttp.ClientSession(headers={"x-api-key": key}) as http:
            traffic = Clients(http, urls)
            tasks = [asyncio.create_task(traffic.hold(number)) for number in range(clients)]
            await asyncio.sleep(before_s)
            asked = time.monotonic()
            await command(folder, "gate", str(folder / RUN), "--rollback")
            await asyncio.sleep(after_s)
            traffic.ended.set()
            await asyncio.gather(*tasks)
        running.check()
        trajectories = await served(running, traffic.sessions)
    assert traffic.failed == {} and traffic.sent > 0
    return reached(traffic.sessions, trajectories, asked, running.branch)


def reached(sessions: list[Began], trajectories: dict[str, Trajectory], asked: float, branch: str) -> dict[str, Any]:
    """dict[str, Any] of the sessions: when the last replica left the version that was rolled back."""
    ended = [(session, trajectories[session.group]) for session in sessions if session.group in trajectories]
    old = [(session, each) for session, each in ended if each.policy.run == branch]
    new = [(session, each) for session, each in ended if each.policy.run != branch and session.at > asked]
    wrong = sum(
        {span.version for turn in each.turns for span in turn.spans} != {each.policy.version} for _, each in ended
    )
    return {
        "sessions_before": sum(session.at <= asked for session, _ in old),
        "sessions_after": len(new),
        "sessions_of_mixed_versions": wrong,
        "gateways_reached": len({session.gateway for session, _ in new}),
        "rollouts_reached": len({each.rollout for _, each in new}),
        "reached_s": round(max((session.at - asked for session, _ in old if session.at > asked), default=0.0), 3),
        "first_served_s": round(
            max(
                min((session.at - asked for session, _ in new if session.gateway == name), default=1e9)
                for name in GATEWAYS
            ),
            3,
        ),
    }


async def test_a_rollback_by_command_reaches_every_replica_and_no_request_fails(tmp_path: Path) -> None:
    figures = await measure(tmp_path, clients=6, before_s=3.0, after_s=6.0)
    assert figures["sessions_before"] > 0 and figures["sessions_after"] > 0
    assert figures["gateways_reached"] == len(GATEWAYS) and figures["rollouts_reached"] == len(ROLLOUTS)
    assert figures["sessions_of_mixed_versions"] == 0
    assert max(figures["reached_s"], figures["first_served_s"]) <= 30.0
