"""Client programs, unmodified, over the whole path: real broker, gateway, rollout actor and feedback actor, and a
scripted policy in place of the engine (`make test-clients`).

Every program does the same. It loses the connection in the middle of its first turn, which ends at the engine, and asks
again by itself. It writes two files with parallel calls, and goes on until the policy is done. Then its session is
rated, and its user is purged.
"""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
import pytest

from headrace.actors.feedback.actor import Feedback
from headrace.actors.gateway import Gateway
from headrace.actors.rollout.actor import Rollout
from headrace.bus.connection import Bus
from headrace.bus.payloads import renderer_bundles
from headrace.config import AgentLimits, Config, Engine, Production, Run
from headrace.gateway.endpoints import Begun
from headrace.gateway.sessions import Caller, root_of, user_of
from headrace.messages.product import SCOPES
from headrace.messages.rollout import Trajectory, TurnSampled
from headrace.messages.subjects import TRAJ, TURN
from headrace.registry import admit
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.api_keys import made
from tests.support.chat_formats import CHATML, bundle_of_run
from tests.support.client_engine import PLAYS, Play, Said, Script
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S
from tests.support.staged import SHAPE, stage

pytestmark = [pytest.mark.anyio, pytest.mark.clients]

CLIENTS = ROOT / ".cache" / "clients"
SCRIPTS = Path(__file__).parent / "programs"
ENGINE = "tests.support.client_engine:open_engine"
TOOLS = """\
{%- if tools and messages[0].role != 'system' %}{{ '<|im_start|>system\\n' }}
{%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}"""
"""Shows the tools of a conversation without a system message."""
FILES = {"a.txt": "one\n", "b.txt": "two\n"}
COMMANDS = ("echo one > a.txt", "echo two > b.txt")
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""The command with which mini-swe-agent's model says that it is done."""
DONE = "Both files are written."
ASKED = "write two files"


class Client(NamedTuple):
    """A client program that writes two files."""

    name: str
    needs: Path
    """Without it the program is not installed."""
    words: Callable[[str, str, Path], Sequence[str]]
    """Its command line, by the gateway's URL, the key and its folder."""
    turns: Sequence[Said]
    """The policy's answers."""
    mark: str = '"name": "write"'
    """Text in the prompts of the conversation that writes the files; a program may have further ones."""
    env: Callable[[str, str], dict[str, str]] = lambda url, key: {}
    answer: str = '{"files": ["a.txt", "b.txt"]}'
    """To its other conversations."""
    said: tuple[str, ...] = (DONE,)
    """In its output."""
    named: bool = False
    """Whether it names its session in a header of its own."""
    branches: int = 1
    """Sessions of its turns after the cut one. aider moves a reminder from message to message, so no history is the
    record of the turn before: each turn is a branch of the tree that its header names."""


def calls(name: str, *arguments: dict[str, Any]) -> list[Said]:
    """Two calls at once, then the end."""
    return [("I write both.", [(name, each) for each in arguments]), (DONE, [])]


def bash(name: str, key: str = "command", **more: str) -> list[Said]:
    return calls(name, *({key: command} | more for command in COMMANDS))


WRITES = calls("write", *({"path": path, "text": text} for path, text in FILES.items()))
BLOCKS = "\n".join(
    f"{path}\n```\n<<<<<<< SEARCH\n=======\n{text}>>>>>>> REPLACE\n```\n" for path, text in FILES.items()
)
WRONG = BLOCKS.replace("SEARCH\n", "SEARCH\nno such line\n")


def script(name: str, *kinds: str) -> Callable[[str, str, Path], Sequence[str]]:
    return lambda url, key, folder: (sys.executable, str(SCRIPTS / name), *kinds, url, key)


def agents(kind: str) -> Callable[[str, str, Path], Sequence[str]]:
    python = str(CLIENTS / "agents" / "bin" / "python")
    return lambda url, key, folder: (python, str(SCRIPTS / "agents_sdk.py"), kind, url, key)


def ai_sdk(kind: str) -> Callable[[str, str, Path], Sequence[str]]:
    def words(url: str, key: str, folder: Path) -> Sequence[str]:
        (folder.parent / "node_modules").symlink_to(CLIENTS / "aisdk" / "node_modules")
        shutil.copy(SCRIPTS / "ai_sdk.mjs", folder.parent)
        return ("node", str(folder.parent / "ai_sdk.mjs"), kind, url, key)

    return words


def mini(url: str, key: str, folder: Path) -> Sequence[str]:
    trajectory = str(folder.parent / "trajectory.json")
    program = str(CLIENTS / "mini" / "bin" / "mini")
    return (program, "-m", "openai/latest", "-t", ASKED, "-y", "--exit-immediately", "-o", trajectory)


def aider(url: str, key: str, folder: Path) -> Sequence[str]:
    quiet = ("--no-check-update", "--no-analytics", "--no-show-model-warnings", "--no-auto-lint", "--no-pretty")
    program = str(CLIENTS / "aider" / "bin" / "aider")
    settings = {"name": "openai/latest", "use_temperature": False}
    settings["extra_params"] = {"extra_headers": {"x-litellm-session-id": "chat-1"}}
    (folder / ".aider.model.settings.yml").write_text(json.dumps([settings]))
    return (program, "--model", "openai/latest", "--edit-format", "diff", "--yes-always", *quiet, "--message", ASKED)


def codex(model: str) -> Callable[[str, str, Path], Sequence[str]]:
    """model: a line of its configuration; empty for the model that it chooses itself."""

    def words(url: str, key: str, folder: Path) -> Sequence[str]:
        (folder.parent / "config.toml").write_text(
            f'{model}model_provider = "headrace"\napproval_policy = "never"\n'
            'sandbox_mode = "danger-full-access"\n[model_providers.headrace]\nname = "headrace"\n'
            f'base_url = "{url}/v1"\nenv_key = "HEADRACE_KEY"\nwire_api = "responses"\n'
        )
        return (str(CLIENTS / "codex" / "node_modules" / ".bin" / "codex"), "exec", "--skip-git-repo-check", ASKED)

    return words


def claude(url: str, key: str, folder: Path) -> Sequence[str]:
    program = str(CLIENTS / "claude" / "node_modules" / ".bin" / "claude")
    return (program, "-p", ASKED, "--model", "latest", "--allowedTools", "Bash")


def opencode(url: str, key: str, folder: Path) -> Sequence[str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": key},
        "models": {"latest": {}},
    }
    settings = {"provider": {"headrace": provider}, "model": "headrace/latest", "small_model": "headrace/latest"}
    (folder / "opencode.json").write_text(json.dumps(settings))
    return (str(CLIENTS / "opencode" / "node_modules" / ".bin" / "opencode"), "run", "-m", "headrace/latest", ASKED)


def continues(url: str, key: str, folder: Path) -> Sequence[str]:
    model = {"provider": "openai", "name": "latest", "model": "latest", "apiBase": f"{url}/v1", "apiKey": key}
    model |= {"roles": ["chat"], "capabilities": ["tool_use"]}  # type: ignore[dict-item]
    settings = folder.parent / "config.yaml"
    settings.write_text(json.dumps({"name": "headrace", "version": "1.0.0", "schema": "v1", "models": [model]}))
    program = str(CLIENTS / "continue" / "node_modules" / ".bin" / "cn")
    return (program, "-p", ASKED, "--config", str(settings), "--auto")


def openai_env(url: str, key: str) -> dict[str, str]:
    more = {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"}
    return {"OPENAI_API_KEY": key, "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_BASE": f"{url}/v1"} | more


def claude_env(url: str, key: str) -> dict[str, str]:
    return {"ANTHROPIC_API_KEY": key, "ANTHROPIC_BASE_URL": url, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}


def codex_env(url: str, key: str) -> dict[str, str]:
    return {"HEADRACE_KEY": key}


PROGRAM = "".join(f"text(await tools.exec_command({json.dumps({'cmd': command})}));\n" for command in COMMANDS)
SDK, MODULES = Path(sys.executable), CLIENTS / "aisdk" / "node_modules"
MINI, CODEX, AGENTS = CLIENTS / "mini" / "bin" / "mini", CLIENTS / "codex" / "node_modules", CLIENTS / "agents" / "bin"
TABLE = (
    *(Client(f"openai-{a}-{b}", SDK, script("openai_sdk.py", a, b), WRITES)
      for a in ("chat", "responses") for b in ("stream", "whole")),
    *(Client(f"anthropic-{a}", SDK, script("anthropic_sdk.py", a), WRITES) for a in ("stream", "whole")),
    *(Client(f"agents-{a}", AGENTS, agents(a), WRITES, 
            said=("writer ['a.txt', 'b.txt']", "reporter ['a.txt', 'b.txt']")) for a in ("chat", "responses")),
    *(Client(f"ai-sdk-{a}", MODULES, ai_sdk(a), WRITES, said=(DONE, "[ 'a.txt', 'b.txt' ]"))
      for a in ("openai", "compatible")),
    Client("ai-sdk-anthropic", MODULES, ai_sdk("anthropic"), WRITES),
    Client("mini-swe-agent", MINI, mini, [bash("bash")[0], ("I submit.", [("bash", {"command": SUBMIT})])],
           '"name": "bash"', openai_env, said=("COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",)),
    Client("aider", CLIENTS / "aider" / "bin", aider, [(WRONG, []), (BLOCKS, [])], ASKED, openai_env,
           said=("a.txt",), named=True, branches=2),
    Client("codex", CODEX, codex('model = "latest"\n'), bash("exec_command", "cmd"), '"exec_command"', codex_env,
           named=True),
    Client("codex-own-model", CODEX, codex(""), [("", [("exec", {"input": PROGRAM})]), (DONE, [])], '"name": "exec"',
           codex_env, named=True),
    Client("claude-code", CLIENTS / "claude" / "node_modules", claude, bash("Bash", description="w"), '"name": "Bash"',
           claude_env, named=True),
    Client("opencode", CLIENTS / "opencode" / "node_modules", opencode, bash("bash", description="w"),
           '"name": "bash"', named=True),
    Client("continue", CLIENTS / "continue" / "node_modules", continues, bash("Bash"), '"name": "Bash"'),
)  # fmt: skip


class Cutting:
    """Stands between a program and the gateway, and cuts every connection of the program once."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._open: set[asyncio.StreamWriter] = set()

    def cut(self) -> None:
        for writer in self._open:
            writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_connection("127.0.0.1", self._port)
        self._open |= {writer, forth}
        await asyncio.gather(self._copy(reader, forth), self._copy(back, writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            self._open.discard(writer)
            writer.close()


async def program(words: Sequence[str], folder: Path, environment: dict[str, str]) -> str:
    """Run a program to its end and return what it said. Its home is empty: no setting of this machine counts."""
    process = await asyncio.create_subprocess_exec(
        *words,
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(folder.parent), "CODEX_HOME": str(folder.parent)} | environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, output.decode()
    return output.decode()


class Served(NamedTuple):
    """A run that serves clients."""

    gateway: Gateway
    port: int
    key: str
    observer: Bus
    people: set[str]
    """The users that requests named; empty for the key's own."""
    names: set[str]
    """The sessions as the program's own headers name them."""


@asynccontextmanager
async def served(connect: Connect, folder: Path, run: str) -> AsyncIterator[Served]:
    admit("engines", [ENGINE])
    limits = AgentLimits(max_turn_tokens=1 << 14, context_tokens=1 << 22)
    config = Config(
        run=Run(dir=str(folder)),
        policy=SHAPE,
        engine=Engine(kind=ENGINE),
        production=Production(rollouts=("product",), limits=limits),
    )
    bundle = msgspec.structs.replace(bundle_of_run("hermes"), chat_template=TOOLS + CHATML)
    await renderer_bundles.publish(await connect("trainer"), run, bundle)
    observer = await connect("admin")
    (folder / run).mkdir()
    (file := folder / "0.safetensors").touch()
    await stage(observer, run, "n1", 0, str(file), "no weights")
    key = await made(await connect("operator"), "acme", scopes=SCOPES, requests_per_minute=60_000)
    people, names = set[str](), set[str]()
    async with (
        living(Feedback, config, await connect("feedback"), run, "feedback"),
        living(Rollout, config, await connect("rollout", node="n1"), run, "product"),
        living(Gateway, config, await connect("gateway"), run, "gateway") as gateway,
    ):
        begin = gateway.clients.begin

        async def seen(request: Any, caller: Caller) -> Begun:
            people.add(caller.user)
            names.add(caller.name)
            return await begin(request, caller)

        gateway.clients.begin = seen  # type: ignore[method-assign]
        url = json.loads((folder / run / "gateway.json").read_text())["url"]
        yield Served(gateway, int(url.rpartition(":")[2]), key, observer, people, names)


@pytest.mark.parametrize("client", TABLE, ids=lambda client: client.name)
async def test_a_program_edits_is_cut_asks_again_is_rated_and_purged(
    connect: Connect, tmp_path: Path, client: Client
) -> None:
    assert client.needs.exists(), "`make test-clients` installs it"
    run = f"p{abs(hash(client.name)) % 10**9}"
    (folder := tmp_path / "work").mkdir()
    async with served(connect, tmp_path, run) as there:
        play = Play(Script(client.mark, list(client.turns), client.answer), held=3)
        PLAYS.append(play)
        cutting = Cutting(there.port)
        relay = await asyncio.start_server(cutting.serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{relay.sockets[0].getsockname()[1]}"
        environment = {"PYTHONPATH": os.pathsep.join(sys.path)} if client.needs is SDK else {}
        running = asyncio.create_task(
            program(client.words(url, there.key, folder), folder, environment | client.env(url, there.key))
        )
        begun = asyncio.create_task(play.begun.wait())
        await asyncio.wait((running, begun), return_when=asyncio.FIRST_COMPLETED)
        begun.cancel()
        cutting.cut()
        said = await running
        relay.close()
        assert play.cut.is_set(), f"the engine did not hear that the connection was lost: {said}"
        assert {path: (folder / path).read_text() for path in FILES} == FILES
        assert all(text in said for text in client.said), said
        # One cut turn, then every turn of the script once.
        first, *others = play.sessions
        assert len(others) == len(client.turns) and len({root_of(each) for each in others}) == 1, play.sessions
        assert len(set(others)) == client.branches, play.sessions
        group = others[-1]
        records = [
            received.message
            async for received in there.observer.history("HR_TURN", TURN.where(run=run, trajectory=">"))
            if isinstance(received.message, TurnSampled)
        ]
        (cut,) = [record for record in records if record.turn.stop == "abort"]
        assert cut.trajectory.startswith(f"{first}-") and len(cut.turn.ids) == 3
        assert len(there.names) == 1 and there.names != {""} if client.named else there.names == {""}
        await rated_and_purged(there, run, group)


async def rated_and_purged(there: Served, run: str, group: str) -> None:
    """Rate the tree of a session: its Trajectory has the turns. Purge its user: nothing of them is left."""
    url, filter = f"http://127.0.0.1:{there.port}", TRAJ.where(run=run, group=f"{user_of(group)}.*")
    async with aiohttp.ClientSession(headers={"x-api-key": there.key}) as http:
        async with http.post(f"{url}/v1/sessions/{root_of(group)}/feedback", json={"thumb": "up"}) as answer:
            told = await answer.json()
            assert answer.status == 200 and told["outcome"] == "opted_out", told
        ends = [received.message async for received in there.observer.history("HR_TRAJ", filter)]
        (end,) = [end for end in ends if isinstance(end, Trajectory) and end.group == group]
        assert [turn.stop for turn in end.turns] == ["stop"] * len(end.turns) and end.capture is not None
        key = there.gateway.api_keys.find(there.key)
        assert key is not None
        names = [name or f"key {key.id}" for name in there.people]
        (person,) = [name for name in names if there.gateway.keys.hash("acme", name) == user_of(group)]
        async with http.delete(f"{url}/v1/users/{person}") as answer:
            told = await answer.json()
            assert answer.status == 200 and user_of(group) in told["certificate"]["statement"], told
        async with http.get(f"{url}/v1/sessions/{group}") as answer:
            assert answer.status == 404
    for stream, where in (("HR_TRAJ", filter), ("HR_TURN", TURN.where(run=run, trajectory=f"{user_of(group)}.*"))):
        assert not [received async for received in there.observer.history(stream, where)], stream
