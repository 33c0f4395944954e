"""`headrace up` with a branch, as real processes: a rating over HTTP leads to a version that passes the gate."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from headrace.bus.connection import Bus
from headrace.launch.product.gateway_key import place
from headrace.messages import subjects as s
from headrace.messages.product import GateVerdict, Promotion
from headrace.messages.tasks import Grading, Oracle, Task, TaskRef, TestPlan
from headrace.messages.training import StepDone
from tests.launch.test_up import Up, command, headrace, up
from tests.support.folder_suites import write_suite
from tests.support.paths import ROOT

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(600)]
GROUPS = [
    ["gateway", "feedback"],
    ["judge", "evaluator"],
    ["rollout:product"],
    ["rollout"],
    ["trainer"],
    ["weight_sender", "weight_receiver"],
]
SETTINGS: dict[str, Any] = {
    "processes.groups": GROUPS,
    "tasks.suite": "sums",
    "tasks.heldout": "sums",
    "tasks.unseen": "sums",
    "tasks.uncertified": True,
    "production.enabled": True,
    "feedback.enabled": True,
    "feedback.batch": 2,
    "feedback.user_cap": 0,
    "gate.tasks": 2,
    "gate.margin": -1.0,
    "gate.canary": [0.5],
    "gate.sessions": 1,
    "dashboard.enabled": False,
}
"""No curriculum: the run lasts until it is interrupted. Tasks without a sandbox, so no machine is needed."""


def suite(folder: Path) -> None:
    """Tasks whose answer is one message."""
    pairs = []
    for id in ("1", "2"):
        ref, plan = TaskRef("sums", id), TestPlan(kind="command", argv=("true",))
        task = Task(ref=ref, family="sums", prompt="1 + 1?", files={}, allowed=(), tests=plan, sandbox=False)
        grading = Grading(kind="checker", checker="number", reference={"answer": "2"})
        pairs.append(
            (task, Oracle(ref=ref, hidden={}, tests=plan, expected=(), solution={}, answer="2", grading=grading))
        )
    write_suite("sums", folder / "suites" / "sums", pairs, "made by a test")


class Client:
    """Users of the product."""

    def __init__(self, started: Up, http: aiohttp.ClientSession) -> None:
        self.started, self.http, self.sessions = started, http, 0

    async def call(self, method: str, path: str, body: dict[str, str] | None = None) -> dict[str, Any]:
        """The answer's JSON; a gateway that is being started again is asked again."""
        while True:
            try:
                url = json.loads((self.started.run / "gateway.json").read_text())["url"]
                headers = {"x-api-key": place(self.started.run).read_text()}
                async with self.http.request(method, f"{url}{path}", json=body, headers=headers) as answer:
                    if answer.status < 500:
                        return dict(await answer.json())
            except (aiohttp.ClientError, OSError, ValueError):
                pass
            assert self.started.process.poll() is None
            await asyncio.sleep(0.1)

    async def rated(self) -> None:
        """One session from its request to its rating."""
        self.sessions += 1
        asked = {"user": f"user{self.sessions}", "suite": "sums", "task": "1"}
        where = f"/v1/sessions/{(await self.call('POST', '/v1/sessions', asked))['session']}"
        while (view := await self.call("GET", f"{where}?wait=30"))["state"] in ("queued", "running"):
            pass
        assert view["state"] == "finished", view
        thumb = "up" if self.sessions % 2 else "down"
        assert (await self.call("POST", f"{where}/feedback", {"thumb": thumb}))["thumb"] == thumb


async def test_ratings_of_a_product_become_a_promoted_version_and_the_books_balance(tmp_path: Path) -> None:
    suite(tmp_path)
    async with up(tmp_path, **SETTINGS) as started, aiohttp.ClientSession() as http:
        await started.line("run r")
        client = Client(started, http)
        await client.call("GET", "/healthz")
        bus, run = await started.operator(), started.run.name
        assert command(tmp_path, "gate", "latest", "--promote", "0").returncode == 0
        for _ in range(2):
            await client.rated()
        async for received in bus.follow("HR_STEP", s.STEP.at(run=f"{run}-feedback")):
            if isinstance(received.message, StepDone):
                break
        gateway = next(process for process in started.family() if "gateway" in process.actors)
        os.kill(gateway.pid, signal.SIGKILL)  # the feedback actor too: it continues from the position in the streams
        verdicts = asyncio.create_task(stages(bus, run))
        while not verdicts.done():
            await client.rated()
        assert verdicts.result()[-1] == "promoted"
        async for received in bus.follow("HR_EVENT", s.EVENT.where(run=run, actor="feedback", type="promotion")):
            if isinstance(received.message, Promotion) and received.message.branch == f"{run}-feedback":
                break
        for _ in range(3):  # requests under way when their user is purged
            await client.call("POST", "/v1/sessions", {"user": "user1", "suite": "sums", "task": "1"})
        purged = await asyncio.to_thread(command, tmp_path, "purge", "latest", "user1", "--output", "purge.json")
        assert purged.returncode == 0, purged.stderr
        report = await asyncio.to_thread(verified, tmp_path / "purge.json", started.run, bus.connection.url)
        assert report["wrong"] == [] and report["checked"]["absorbed_steps"], report
        assert report["checked"]["seconds"] < 60.0, report
        print(report)
        await bus.close()
        started.process.send_signal(signal.SIGINT)
        code, _ = await started.end()
        assert code == 130
    code, ledger = headrace(tmp_path, "audit", "latest")
    assert code == 0 and ledger["feedback"]["balanced"], ledger
    ends = ledger["feedback"]["ends"]
    assert ends["trained"] >= 2 and ledger["feedback"]["received"] == client.sessions == sum(ends.values())
    assert ledger["branches"][f"{run}-feedback"]["trained"] == ends["trained"]


def verified(certificate: Path, run: Path, url: str) -> dict[str, Any]:
    """The report of the reader that shares no code with headrace."""
    script, seed = ROOT / "tests" / "foreign" / "verify_purge.py", run / "broker" / "credentials" / "operator.nk"
    arguments = [sys.executable, str(script), str(certificate), str(run / "purge.pub"), url, str(seed)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


async def stages(bus: Bus, run: str) -> list[str]:
    """The candidate's stages until its verdict."""
    seen = []
    async for received in bus.follow("HR_EVENT", s.EVENT.where(run=run, actor="feedback", type="gate_verdict")):
        assert isinstance(received.message, GateVerdict)
        seen.append(received.message.stage)
        if seen[-1] in ("promoted", "held", "rolled_back"):
            break
    return [str(stage) for stage in seen]
