"""An episode whose task offers the tools of an external MCP server, over a real broker and with a real server."""

import asyncio
import importlib.util
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from headrace.actors.environment.actor import Environment
from headrace.actors.rollout import policies
from headrace.actors.rollout.actor import Rollout
from headrace.bus.connection import Bus
from headrace.config import Config, Production, Run, Tasks
from headrace.config import Environment as Section
from headrace.config.episodes import McpServer
from headrace.harness.mcp.connection import Connection, McpError
from headrace.harness.tools.registry import TOOLS
from headrace.messages.rollout import Limits, PolicyRef, RolloutRequest, Trajectory
from headrace.messages.sandbox import ANY_RUN
from headrace.messages.subjects import FAIL, TASK, TRAJ, token
from headrace.messages.tasks import TaskRef
from headrace.rendering.base import Call
from headrace.tasks import open_suite
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.judging import first
from tests.support.paths import ROOT
from tests.support.region_brokers import free_port

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(importlib.util.find_spec("mcp") is None, reason="the package mcp is not installed"),
]
SERVER = str(ROOT / "tests" / "support" / "mcp_server.py")
SCRIPT: list[list[Call]] = [
    [("docs_repeat", {"text": "ab", "times": "30"}), ("docs_repeat", {"text": "ab", "times": "many"})],
    [("docs_die", {})],
    [("docs_secret", {})],
    [("docs_hang", {})],
    [("docs_repeat", {"text": "ab"})],
    [("finish", {})],
]


async def test_a_trajectory_holds_the_answers_and_the_failures_of_a_server(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MCP_SECRET", "s3")
    server = McpServer(command=(sys.executable, SERVER), env=("MCP_SECRET",), start_s=100.0, call_s=3.0)
    server = msgspec.structs.replace(server, calls=5, result_bytes=20)
    offered = tuple(f"docs/{name}" for name in ("repeat", "secret", "hang", "die"))
    config = Config(
        run=Run(dir=str(tmp_path)),
        environment=Section(backend="process", lease_s=20.0, cache_dir=str(tmp_path / "cache")),
        production=Production(enabled=False),
        tasks=Tasks(dir=str(tmp_path / "suites"), tools=offered, mcp={"docs": server}),
    )
    monkeypatch.setattr(policies, "script", lambda name, task, oracle: SCRIPT)
    run, observer = "r-mcp", await connect("admin")
    request = RolloutRequest(
        run=run,
        lane="train",
        group="g1",
        slot=0,
        attempt=0,
        task=TaskRef("generated/train", open_suite("generated/train").ids()[0]),
        seed=7,
        policy=PolicyRef(kind="scripted", name="script"),
        limits=Limits(max_turns=8, max_tokens=20_000, context_tokens=20_000),
    )
    await observer.publish(TASK.at(run=run, lane="train", suite=token("generated/train")), request)

    async with living(Environment, config, await connect("environment", node="n1"), ANY_RUN):
        async with living(Rollout, config, await connect("rollout"), run, "roll-1"):
            made = await _made(observer, run)
    (repeat, wrong), (died,), (again,), (slow,), (over,), _ = ([*turn.results] for turn in made.turns)
    assert (repeat.ok, repeat.output) == (True, "ab" * 10 + "\n[40 bytes cut]")
    assert (wrong.ok, wrong.output) == (False, "times: expected integer, got 'many'")
    assert not died.ok and died.output.startswith("MCP server docs: ")
    assert (again.ok, again.output) == (True, "s3")
    assert (slow.ok, slow.output) == (False, "MCP server docs did not answer in 3 s")
    assert (over.ok, over.output) == (False, "the episode has used all 5 calls of docs")
    assert made.outcome == "finished" and not TOOLS.external("docs/repeat")


async def _made(observer: Bus, run: str) -> Trajectory:
    """The attempt's trajectory; its failure, if it has none, because nobody issues it again here."""
    trajectory = asyncio.ensure_future(first(observer, "HR_TRAJ", TRAJ.at(run=run, group="g1"), _any))
    failure = asyncio.ensure_future(first(observer, "HR_LEDGER", FAIL.at(run=run, group="g1"), _any))
    ends = {trajectory, failure}
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        assert not failure.done(), failure.result()
        made = trajectory.result()
        assert isinstance(made, Trajectory)
        return made
    finally:
        for task in ends:
            task.cancel()
        await asyncio.gather(*ends, return_exceptions=True)


def _any(_: object) -> bool:
    return True


async def test_a_server_at_an_address_answers_and_one_that_is_not_there_is_named(tmp_path: Path) -> None:
    port = free_port()
    address = f"http://127.0.0.1:{port}/mcp"
    absent = Connection("docs", McpServer(url=address, start_s=100.0))
    with pytest.raises(McpError, match=r"^MCP server docs does not start: "):
        await absent.listing()
    await absent.close()
    keyless = Connection("docs", McpServer(url=address, key_file=str(tmp_path / "key")))
    with pytest.raises(McpError, match=r"^MCP server docs: \[tasks.mcp.docs\] key_file: .*/key cannot be read"):
        await keyless.listing()
    await keyless.close()
    (tmp_path / "key").write_text("a-token\n")
    process = await asyncio.create_subprocess_exec(sys.executable, SERVER, str(port), stderr=subprocess.PIPE)
    connection = Connection("docs", McpServer(url=address, key_file=str(tmp_path / "key"), start_s=100.0))
    try:
        assert process.stderr is not None
        while b"running on" not in (line := await process.stderr.readline()):
            assert line, "the server ended"
        assert [tool.name for tool in (await connection.listing()).tools] == ["repeat", "secret", "hang", "die"]
        assert await connection.call("repeat", {"text": "ab", "times": 3}) == ("ababab", True)
    finally:
        await connection.close()
        process.kill()
        await process.communicate()
