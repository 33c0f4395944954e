"""Client programs, unmodified, finish a task in their own tools: mini-swe-agent, Codex and Claude Code
(`make test-clients`).

A script decides what is called, so that each program's own loop, tools and parallel calls are what is tested.
"""

import asyncio
import json
import os
from pathlib import Path

import pytest

from headrace.gateway.conversation import ModelRequest
from headrace.messages.product import ClientCall
from tests.support.clients import Script, endpoints
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S

pytestmark = [pytest.mark.anyio, pytest.mark.clients]

PROGRAMS = ROOT / ".cache" / "clients"
MINI = PROGRAMS / "mini" / "bin" / "mini"
CODEX = PROGRAMS / "codex" / "node_modules" / ".bin" / "codex"
CLAUDE = PROGRAMS / "claude" / "node_modules" / ".bin" / "claude"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""The command with which mini-swe-agent's model says that it is done; to Codex it is a command like any other."""


def two_files(request: ModelRequest) -> tuple[str, tuple[ClientCall, ...]]:
    """Two commands at once, then the end, through whatever tool runs commands."""
    turns = sum(message.role == "assistant" for message in request.messages)
    tool = next(tool for tool in request.tools if tool.name in ("bash", "exec_command"))
    key = "command" if tool.name == "bash" else "cmd"
    commands = [["echo one > a.txt", "echo two > b.txt"], [SUBMIT], []][min(turns, 2)]
    calls = tuple(
        ClientCall(id=f"call_{turns}_{index}", name=tool.name, arguments=json.dumps({key: command}))
        for index, command in enumerate(commands)
    )
    return "Both files are written." if turns else "I write both.", calls


async def program(*command: str, folder: Path, **environment: str) -> str:
    """Run a program to its end and return what it said. Its home is empty: no setting of this machine counts."""
    folder.mkdir()
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(folder.parent)} | environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(PATIENCE_S):
        output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


@pytest.mark.skipif(not MINI.exists(), reason="mini-swe-agent is not installed: make test-clients")
async def test_mini_swe_agent(tmp_path: Path) -> None:
    async with endpoints(tmp_path, two_files) as served:
        await program(
            *(str(MINI), "-m", "openai/latest", "-t", "write two files", "-y", "--exit-immediately"),
            *("-o", str(tmp_path / "trajectory.json")),
            folder=tmp_path / "work",
            MSWEA_CONFIGURED="true",
            MSWEA_COST_TRACKING="ignore_errors",
            OPENAI_API_KEY=served.key,
            OPENAI_BASE_URL=f"{served.url}/v1",
        )
        assert len(served.sampler.asked) == 2
    assert (tmp_path / "work" / "a.txt").read_text() + (tmp_path / "work" / "b.txt").read_text() == "one\ntwo\n"
    assert json.loads((tmp_path / "trajectory.json").read_text())["info"]["exit_status"] == "Submitted"


def settings(url: str, model: str) -> str:
    """Codex's configuration. model: empty for the one that it chooses itself."""
    return (
        f'{model}model_provider = "headrace"\napproval_policy = "never"\n'
        'sandbox_mode = "danger-full-access"\n[model_providers.headrace]\nname = "headrace"\n'
        f'base_url = "{url}/v1"\nenv_key = "HEADRACE_KEY"\nwire_api = "responses"\n'
    )


def one_script(request: ModelRequest) -> tuple[str, tuple[ClientCall, ...]]:
    """A program for Codex's own tool, whose argument is a text, then the end."""
    if any(message.role == "tool" for message in request.messages):
        return "Both files are written.", ()
    (tool,) = (tool for tool in request.tools if tool.name == "exec")
    assert list(tool.parameters["properties"]) == ["input"]  # type: ignore[call-overload]
    commands = ("echo one > a.txt", "echo two > b.txt")
    program = "".join(f"text(await tools.exec_command({json.dumps({'cmd': command})}));\n" for command in commands)
    return "", (ClientCall(id="call_0", name="exec", arguments=json.dumps({"input": program})),)


@pytest.mark.skipif(not CODEX.exists(), reason="Codex is not installed: make test-clients")
@pytest.mark.parametrize(("model", "script"), [('model = "latest"\n', two_files), ("", one_script)])
async def test_codex(tmp_path: Path, model: str, script: Script) -> None:
    """With a model that it does not know it runs commands, with its own choice programs."""
    home = tmp_path / "codex"
    home.mkdir()
    async with endpoints(tmp_path, script) as served:
        (home / "config.toml").write_text(settings(served.url, model))
        said = await program(
            *(str(CODEX), "exec", "--skip-git-repo-check", "write two files"),
            folder=tmp_path / "work",
            CODEX_HOME=str(home),
            HEADRACE_KEY=served.key,
        )
        sessions = {caller.name for _, caller in served.sampler.asked}
    assert (tmp_path / "work" / "a.txt").read_text() + (tmp_path / "work" / "b.txt").read_text() == "one\ntwo\n"
    assert "Both files are written." in said
    assert len(sessions) == 1 and "" not in sessions, "Codex names its session in a header"


def two_commands(request: ModelRequest) -> tuple[str, tuple[ClientCall, ...]]:
    """Two commands at once, then the end."""
    if any(message.role == "tool" for message in request.messages):
        return "Both files are written.", ()
    commands = ("echo one > a.txt", "echo two > b.txt")
    return "I write both.", tuple(
        ClientCall(id=f"toolu_{index}", name="Bash", arguments=json.dumps({"command": command, "description": "w"}))
        for index, command in enumerate(commands)
    )


@pytest.mark.skipif(not CLAUDE.exists(), reason="Claude Code is not installed: make test-clients")
async def test_claude_code(tmp_path: Path) -> None:
    async with endpoints(tmp_path, two_commands) as served:
        said = await program(
            *(str(CLAUDE), "-p", "write two files", "--model", "latest", "--allowedTools", "Bash"),
            folder=tmp_path / "work",
            ANTHROPIC_API_KEY=served.key,
            ANTHROPIC_BASE_URL=served.url,
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        )
        asked = [request for request, _ in served.sampler.asked]
        people = {caller.user for _, caller in served.sampler.asked}
        sessions = {caller.name for _, caller in served.sampler.asked}
    assert (tmp_path / "work" / "a.txt").read_text() + (tmp_path / "work" / "b.txt").read_text() == "one\ntwo\n"
    assert "Both files are written." in said
    assert [len(request.tools) > 10 for request in asked] == [True, True], "it asks for a title in JSON, and goes on"
    assert len(people) == 1 and "session" not in people.pop()
    assert len(sessions) == 1 and "" not in sessions, "Claude Code names its session in a header"
