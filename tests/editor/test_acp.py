"""`headrace acp` as an editor starts it: the protocol's own client, a real subprocess, a gateway with its actors."""

import asyncio
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from headrace.actors.environment.actor import Environment
from headrace.actors.rollout import policies
from headrace.actors.rollout.actor import Rollout
from headrace.config import Environment as Section
from headrace.editor.folder import read_folder, write_changes
from headrace.gateway.split import Split
from headrace.messages import subjects
from headrace.messages.product import Feedback
from headrace.messages.rollout import PolicyRef, Trajectory
from headrace.rendering.base import Call
from headrace.vmhost.node import host
from tests.conftest import Connect
from tests.gateway.test_agents import Product
from tests.support import forged
from tests.support.actors import living
from tests.support.paths import ROOT

# Imported in the test alone: the protocol's models take 2 s of processor time, which every worker would spend.
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(importlib.util.find_spec("acp") is None, reason="the extra `acp` is not installed"),
]

EDIT: list[list[Call]] = [
    [("edit_file", {"path": "app.py", "lines": "2", "text": "two"}), ("terminal", {"command": "cat app.py"})],
    [("finish", {"message": "I mended it."})],
]
AGAIN: list[list[Call]] = [
    [("edit_file", {"path": "app.py", "lines": "2", "text": "zwei"})],
    [("finish", {"message": "Again."})],
]
WAIT: list[list[Call]] = [[("terminal", {"command": "echo > started; sleep 600"})], [("finish", {})]]


class Editor:
    """The client side: keeps every update and accepts every change."""

    def __init__(self) -> None:
        self.updates: list[Any] = []
        self.news = asyncio.Event()
        self.on_ask: Any = None

    async def session_update(self, session_id: str, update: Any, **kwargs: Any) -> None:
        self.updates.append(update)
        self.news.set()

    async def request_permission(self, session_id: str, tool_call: Any, options: Any, **kwargs: Any) -> Any:
        import acp

        self.on_ask()
        allow = next(option.option_id for option in options if option.kind == "allow_once")
        return acp.RequestPermissionResponse(outcome=acp.schema.AllowedOutcome(outcome="selected", option_id=allow))

    async def until(self, kind: str, count: int) -> list[Any]:
        """So many updates of a kind: the answer to a prompt may be read before the updates that were sent before it."""
        while len(self.kinds(kind)) < count:
            self.news.clear()
            await self.news.wait()
        return self.kinds(kind)

    def kinds(self, kind: str) -> list[Any]:
        return [update for update in self.updates if update.session_update == kind]


async def test_an_editor_prompts_gets_updates_merges_the_diff_and_cancels(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Users' sandboxes need an isolating backend; machines would make this minutes longer.
    monkeypatch.setattr(host, "demands", lambda request: set(request.requires))
    scripts = iter((EDIT, WAIT, AGAIN))
    monkeypatch.setattr(policies, "script", lambda *_: next(scripts))
    monkeypatch.setattr(Split, "policy", lambda *_: PolicyRef(kind="scripted", name="idle"))

    import acp

    product = Product(connect, tmp_path, "acp")
    product.config = msgspec.structs.replace(product.config, environment=Section(backend="process", lease_s=30.0))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "app.py").write_text("1\n2\n3\n4\n5\n6\n")
    editor = Editor()

    def edit_meanwhile() -> None:
        (folder / "app.py").write_text("1\n2\n3\n4\n5\nsix\n")

    editor.on_ask = edit_meanwhile
    try:
        await product.open()
        env = {**os.environ, "HEADRACE_API_KEY": product.key, "PYTHONPATH": str(ROOT)}
        command = (sys.executable, "-m", "headrace.cli", "acp", "--url", product.url)
        async with (
            asyncio.timeout(300),
            living(Environment, product.config, await connect("environment"), product.run),
            living(Rollout, product.config, await connect("rollout"), product.run, "product"),
            acp.spawn_agent_process(cast(Any, editor), *command, env=env) as (agent, _),
        ):
            opened = await agent.initialize(protocol_version=acp.PROTOCOL_VERSION)
            assert opened.protocol_version == acp.PROTOCOL_VERSION and opened.agent_info
            assert opened.agent_info.name == "headrace"
            session = (await agent.new_session(cwd=str(folder), mcp_servers=[])).session_id
            ended = await agent.prompt(session_id=session, prompt=[acp.text_block("mend app.py")])
            assert ended.stop_reason == "end_turn"
            assert [update.content.text for update in await editor.until("agent_message_chunk", 1)] == ["I mended it."]
            edit, look, change = await editor.until("tool_call", 3)
            assert (edit.kind, look.kind, change.kind) == ("edit", "execute", "edit")
            assert change.content[0].new_text == "1\ntwo\n3\n4\n5\n6\n" and change.content[0].old_text[2] == "2"
            done = {update.tool_call_id: update for update in await editor.until("tool_call_update", 3)}
            assert "two" in done[look.tool_call_id].content[0].content.text
            assert done[change.tool_call_id].status == "completed"
            assert (folder / "app.py").read_text() == "1\ntwo\n3\n4\n5\nsix\n", "the user's own edit stays"

            rating = await product.admin.last("HR_FEEDBACK", subjects.FEEDBACK.where())
            assert rating is not None and isinstance(rating.message, Feedback)
            assert (rating.message.signal, rating.message.thumb) == ("diff", "up"), "the accepted diff is a signal"

            editor.updates.clear()
            waiting = asyncio.create_task(agent.prompt(session_id=session, prompt=[acp.text_block("wait")]))
            await editor.until("tool_call", 1)
            await agent.cancel(session_id=session)
            assert (await waiting).stop_reason == "cancelled"
            where = subjects.FEEDBACK.where()
            rated = (await anext(product.admin.follow("HR_FEEDBACK", where, start=rating.seq + 1))).message
            assert (rated.signal, rated.thumb, rated.final, rated.comment) == (
                "cancel",
                "down",
                False,
                "turns until then: 1",
            )
            where = subjects.TRAJ.at(run=product.run, group=rated.trajectory.rsplit("-", 2)[0])
            record = await product.admin.last("HR_TRAJ", where)
            assert record is not None and isinstance(record.message, Trajectory) and not record.message.diff
            assert record.message.outcome == "cancelled" and record.message.id == rated.trajectory
            (turn,) = record.message.turns
            assert [call.name for call in turn.calls] == ["terminal"] and not turn.results, "the call was under way"
            with pytest.raises(acp.RequestError):
                await agent.prompt(session_id="none", prompt=[acp.text_block("x")])
            await agent.close_session(session_id=session)
            with pytest.raises(acp.RequestError):
                await agent.prompt(session_id=session, prompt=[acp.text_block("x")])
            again = Editor()
            again.on_ask = lambda: None
            async with acp.spawn_agent_process(cast(Any, again), *command, env=env) as (other, _):
                able = (await other.initialize(protocol_version=acp.PROTOCOL_VERSION)).agent_capabilities
                assert able is not None and able.load_session and able.session_capabilities is not None
                assert able.session_capabilities.close and able.session_capabilities.resume
                with pytest.raises(acp.RequestError):
                    await other.load_session(cwd=str(folder), session_id="none", mcp_servers=[])
                await other.load_session(cwd=str(folder), session_id=session, mcp_servers=[])
                asked = [update.content.text for update in await again.until("user_message_chunk", 2)]
                assert asked == ["mend app.py", "wait"] and len(await again.until("tool_call", 3)) == 3
                await other.resume_session(cwd=str(folder), session_id=session, mcp_servers=[])
                ended = await other.prompt(session_id=session, prompt=[acp.text_block("mend app.py again")])
                assert ended.stop_reason == "end_turn"
                (change,) = [
                    u for u in again.kinds("tool_call") if u.kind == "edit" and u.content and u.status == "pending"
                ]
                assert change.content[0].old_text == "1\ntwo\n3\n4\n5\n6\n", "the base is the agent's own file"
                assert (folder / "app.py").read_text() == "1\nzwei\n3\n4\n5\nsix\n"
    finally:
        await product.gateway.shut(1.0)


async def test_a_folder_is_read_without_its_programs_and_files_outside_it(tmp_path: Path) -> None:
    folder = forged.repository_at(tmp_path / "r")
    ran = forged.armed(folder)
    (folder / "d").mkdir()
    (folder / "d" / "a").write_text("1")
    forged.git(folder, "-c", "core.fsmonitor=false", "add", "d/a")
    (folder / "d").rename(tmp_path / "outside")
    (folder / "d").symlink_to(tmp_path / "outside")
    (folder / "b").write_text("2")
    assert await read_folder(folder) == {"b": b"2"}
    assert not ran.exists(), ran.read_text()


@pytest.mark.parametrize("path", [".git/hooks/post-checkout", "sub/.GIT/config"])
async def test_no_change_is_written_into_a_folder_of_git(tmp_path: Path, path: str) -> None:
    with pytest.raises(ValueError, match="folder of git"):
        write_changes(tmp_path, {"a": b"1", path: b"2"}, ())
    assert not list(tmp_path.iterdir())


RUBBISH = (b"rubbish", b"[1]", b"null", b'"x"', b"", b"\xff\xfe", b"[" * 50_000, b'{"jsonrpc": "2.0"}')


async def acp_of(redirect: str, given: bytes = b"") -> tuple[bytes, bytes, int | None]:
    """Output, errors and exit code of `headrace acp`. redirect: of its streams, in the shell's words."""
    env = {**os.environ, "HEADRACE_API_KEY": "hr-x", "PYTHONPATH": str(ROOT)}
    line = f"{sys.executable} -m headrace.cli acp --url http://127.0.0.1:9 {redirect}"
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_shell(line, env=env, stdin=pipe, stdout=pipe, stderr=pipe)
    said, errors = await process.communicate(given)
    return said, errors, process.returncode


async def test_lines_that_are_no_messages_are_errors_and_end_nothing() -> None:
    hello = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"protocolVersion": 1}}
    said, errors, code = await acp_of("", b"\n".join((*RUBBISH, json.dumps(hello).encode(), b"{")))
    assert code == 0 and not errors, errors
    answers = [json.loads(line) for line in said.splitlines()]
    codes = [answer["error"]["code"] for answer in answers if answer["id"] is None]
    assert codes == [-32700, -32600, -32600, -32600, -32700, -32700, -32700]
    assert [answer["result"]["protocolVersion"] for answer in answers if answer["id"] == 1] == [1]


@pytest.mark.parametrize("redirect", ["<&-", ">&-", "< /dev/null", "> /dev/null"])
async def test_an_editor_has_pipes(redirect: str) -> None:
    _, errors, code = await acp_of(redirect)
    assert code == 2 and len(errors.splitlines()) == 1, errors
