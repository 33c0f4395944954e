"""Maps an editor's sessions to agents, its prompts to runs, and the events of a run to session updates.

The agent works in its sandbox with a copy of the editor's folder. At the end of a prompt the adapter shows the agent's
changes as diffs and asks the user once. Accepted changes are merged into the folder with a three-way merge: the user's
own edits stay, and conflicting lines stay in the file between markers. The sandbox does not receive edits that the user
makes in the folder after the first prompt.
"""

import asyncio
import base64
import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import acp
from acp import schema

from headrace import __version__
from headrace.editor.api import AgentsApi, AgentsApiError
from headrace.editor.folder import FolderTooLarge, read_folder, tar_of, write_changes
from headrace.gateway.agents.merging import merge

KINDS: dict[str, schema.ToolKind] = {
    "read_file": "read",
    "list_files": "search",
    "search": "search",
    "keyword_search": "search",
    "semantic_search": "search",
    "edit_file": "edit",
    "write_file": "edit",
    "terminal": "execute",
    "run_tests": "execute",
}
ACCEPT, REJECT = "accept", "reject"


class Session:
    """A folder of the editor and the agent that works on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.agent = ""
        """Empty before the first prompt."""
        self.run = ""
        """The id of the current run; empty when there is none."""
        self.files: dict[str, bytes] = {}
        """The agent's workspace after its last run."""
        self.cancelled = False


class Adapter:
    """An ACP agent over the agents API."""

    def __init__(self, api: AgentsApi) -> None:
        self._api = api
        self._sessions: dict[str, Session] = {}

    def on_connect(self, conn: acp.Client) -> None:
        """Store the editor's side of the connection."""
        self._editor = conn

    async def initialize(
        self,
        protocol_version: int,
        client_capabilities: schema.ClientCapabilities | None = None,
        client_info: schema.Implementation | None = None,
        **kwargs: Any,
    ) -> acp.InitializeResponse:
        """Negotiate the protocol version and state what the agent supports."""
        return acp.InitializeResponse(
            protocol_version=min(protocol_version, acp.PROTOCOL_VERSION),
            agent_capabilities=schema.AgentCapabilities(
                load_session=True,
                prompt_capabilities=schema.PromptCapabilities(embedded_context=True),
                session_capabilities=schema.SessionCapabilities(
                    close=schema.SessionCloseCapabilities(), resume=schema.SessionResumeCapabilities()
                ),
            ),
            agent_info=schema.Implementation(name="headrace", version=__version__),
        )

    async def new_session(
        self,
        cwd: str,
        additional_directories: list[str] | None = None,
        mcp_servers: Any = None,
        **kwargs: Any,
    ) -> acp.NewSessionResponse:
        """Open a session on a folder; the first prompt creates its agent."""
        id = secrets.token_hex(8)
        self._sessions[id] = Session(_folder(cwd))
        return acp.NewSessionResponse(session_id=id)

    async def load_session(self, cwd: str, session_id: str, **kwargs: Any) -> schema.LoadSessionResponse:
        """Take up a session of an earlier connection, and send the updates of its prompts that ended again."""
        session = await self._again(cwd, session_id)
        for run in (await self._api.call("GET", f"/v1/agents/{session.agent}"))["runs"]:
            update = acp.update_user_message_text(run["prompt"])
            await self._editor.session_update(session_id=session_id, update=update)
            session.run = run["id"]
            if run["status"] != "RUNNING":
                await self._follow(session_id, session)
                session.run = ""
        return schema.LoadSessionResponse()

    async def resume_session(self, cwd: str, session_id: str, **kwargs: Any) -> schema.ResumeSessionResponse:
        """Take up a session of an earlier connection."""
        await self._again(cwd, session_id)
        return schema.ResumeSessionResponse()

    async def close_session(self, session_id: str, **kwargs: Any) -> schema.CloseSessionResponse:
        """Cancel the session's run and forget the session; it can be loaded again."""
        await self.cancel(session_id)
        self._sessions.pop(session_id, None)
        return schema.CloseSessionResponse()

    async def _again(self, cwd: str, id: str) -> Session:
        """The session whose agent was created under this id, with the agent's files."""
        session = Session(_folder(cwd))
        try:
            found = (await self._api.call("GET", f"/v1/agents?idempotencyKey={quote(id)}"))["agents"]
            if not found:
                raise acp.RequestError.invalid_params({"sessionId": "there is no such session"})
            session.agent = found[0]["id"]
            made = await self._api.call("GET", f"/v1/agents/{session.agent}/artifacts")
            for path in {*await read_folder(session.folder), *(each["path"] for each in made["artifacts"])}:
                if (data := await self._api.content(session.agent, path)) is not None:
                    session.files[path] = data
        except (AgentsApiError, FolderTooLarge) as error:
            raise acp.RequestError.internal_error({"details": str(error)}) from None
        self._sessions[id] = session
        return session

    async def prompt(self, session_id: str, prompt: Sequence[Any], **kwargs: Any) -> acp.PromptResponse:
        """Run the prompt to its end and send updates meanwhile."""
        session = self._sessions.get(session_id)
        if session is None:
            raise acp.RequestError.invalid_params({"sessionId": "there is no such session"})
        session.cancelled = False
        try:
            await self._begin(session_id, session, _text(prompt))
            result = await self._follow(session_id, session)
            if result.get("status") == "FINISHED":
                await self._offer(session_id, session, result)
        except (AgentsApiError, FolderTooLarge, ValueError) as error:
            raise acp.RequestError.internal_error({"details": str(error)}) from None
        finally:
            session.run = ""
        if result.get("status") == "CANCELLED":
            return acp.PromptResponse(stop_reason="cancelled")
        if result.get("status") != "FINISHED":
            await self._say(session_id, f"The run failed: {result.get('detail')}")
            return acp.PromptResponse(stop_reason="refusal")
        limits = {"max_turns": "max_turn_requests", "max_tokens": "max_tokens", "context": "max_tokens"}
        reason: Any = limits.get(str(result.get("detail")), "end_turn")
        return acp.PromptResponse(stop_reason=reason)

    async def cancel(self, session_id: str, **kwargs: Any) -> None:
        """Cancel the session's run; the prompt answers ``cancelled``."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.cancelled = True
            if session.run:
                await self._cancel(session)

    async def _cancel(self, session: Session) -> None:
        try:
            await self._api.call("POST", f"/v1/agents/{session.agent}/runs/{session.run}/cancel")
        except AgentsApiError:
            if (await self._api.call("GET", f"/v1/agents/{session.agent}/runs/{session.run}"))["status"] == "RUNNING":
                raise  # in any other state the run ended before the cancellation reached it

    async def _begin(self, id: str, session: Session, text: str) -> None:
        if session.agent:
            run = await self._api.call("POST", f"/v1/agents/{session.agent}/runs", {"prompt": text})
        else:
            session.files = await read_folder(session.folder)
            workspace = {"tar": base64.b64encode(tar_of(session.files)).decode()} if session.files else {}
            made = await self._api.call("POST", "/v1/agents", {"prompt": text, "workspace": workspace}, once=id)
            session.agent, run = made["agent"]["id"], made["run"]
        session.run = run["id"]
        if session.cancelled:  # `cancel` was called before the run had an id
            await self._cancel(session)

    async def _follow(self, id: str, session: Session) -> dict[str, Any]:
        """Send updates until the run ends; return its result."""
        result: dict[str, Any] = {}
        async for event in self._api.events(session.agent, session.run):
            calls = event.data.get("toolCalls", ())
            if event.name == "turn":
                for call in calls:
                    await self._begun(id, f"{session.run}/{event.data['attempt']}/{call['callId']}", call)
            elif event.name == "results":
                for done in calls:
                    await self._editor.session_update(
                        session_id=id,
                        update=acp.update_tool_call(
                            f"{session.run}/{event.data['attempt']}/{done['callId']}",
                            status="completed" if done["ok"] else "failed",
                            content=[acp.tool_content(acp.text_block(done["result"]))],
                        ),
                    )
            elif event.name == "result":
                result = event.data
        return result

    async def _begun(self, id: str, call_id: str, call: dict[str, Any]) -> None:
        arguments = call["args"]
        if call["name"] == "finish":
            if arguments.get("message"):
                await self._say(id, arguments["message"])
            return
        target = arguments.get("path") or arguments.get("command") or ""
        update = acp.start_tool_call(
            call_id,
            f"{call['name']} {target}".strip()[:200],
            kind=KINDS.get(call["name"], "other"),
            status="failed" if call["error"] else "in_progress",
            raw_input=arguments,
        )
        await self._editor.session_update(session_id=id, update=update)

    async def _say(self, id: str, text: str) -> None:
        await self._editor.session_update(session_id=id, update=acp.update_agent_message_text(text))

    async def _offer(self, id: str, session: Session, result: dict[str, Any]) -> None:
        """Show the changes, ask, and merge accepted ones into the folder."""
        after = dict(session.files)
        for path in result["changed"]:
            data = await self._api.content(session.agent, path)
            if data is None:
                after.pop(path, None)
            else:
                after[path] = data
        base, session.files = session.files, after
        changed = [path for path in result["changed"] if base.get(path) != after.get(path)]
        if not changed:
            return
        diffs: list[Any] = [
            acp.tool_diff_content(
                str(session.folder / path), after.get(path, b"").decode("utf-8", "replace"),
                base[path].decode("utf-8", "replace") if path in base else None,
            )
            for path in changed
        ]  # fmt: skip
        call_id = f"{session.run}/changes"
        title = f"Change {len(changed)} file{'s' if len(changed) > 1 else ''}"
        start = acp.start_tool_call(call_id, title, kind="edit", status="pending", content=diffs)
        await self._editor.session_update(session_id=id, update=start)
        answer = await self._editor.request_permission(
            session_id=id,
            tool_call=schema.ToolCallUpdate(tool_call_id=call_id, title=title, content=diffs),
            options=[
                schema.PermissionOption(option_id=ACCEPT, name="Accept", kind="allow_once"),
                schema.PermissionOption(option_id=REJECT, name="Reject", kind="reject_once"),
            ],
        )
        chosen = getattr(answer.outcome, "option_id", "")
        accepted = chosen == ACCEPT
        if accepted:
            merged = await merge(base, await read_folder(session.folder), after, session.agent)
            write_changes(session.folder, merged.changed, merged.deleted)
            for conflict in merged.conflicts:
                where = f" lines {conflict['firstLine']}-{conflict['lastLine']}" if "firstLine" in conflict else ""
                await self._say(id, f"Conflict ({conflict['kind']}): {conflict['path']}{where}\n")
        if chosen in (ACCEPT, REJECT):  # a closed dialog is not a rating
            where = f"/v1/agents/{session.agent}/runs/{session.run}/feedback"
            try:
                await self._api.call("POST", where, {"diff": "accepted" if accepted else "rejected"})
            except AgentsApiError as error:  # the changes are already merged, so only the rating is missing
                await self._say(id, f"The gateway did not accept the rating: {error}\n")
        status: Any = "completed" if accepted else "failed"
        await self._editor.session_update(session_id=id, update=acp.update_tool_call(call_id, status=status))


async def pass_messages(given: asyncio.StreamReader, answers: asyncio.StreamWriter, read: asyncio.StreamReader) -> None:
    """Pass the editor's messages on. A line that is none gets JSON-RPC's error, and ends nothing."""
    while not given.at_eof():
        line = b""
        try:
            line = await given.readline()
            known = isinstance(json.loads(line), dict)
            error = {"code": -32600, "message": "expected a JSON object"}
        except (ValueError, RecursionError) as wrong:  # also a line that is longer than the reader's limit
            known, error = (
                line.isspace() or (given.at_eof() and not line),
                {"code": -32700, "message": f"expected a line of JSON: {wrong}"},
            )
        if known:
            read.feed_data(line)
        else:
            answers.write(json.dumps({"jsonrpc": "2.0", "id": None, "error": error}).encode() + b"\n")
    read.feed_eof()


def _folder(cwd: str) -> Path:
    folder = Path(cwd)
    if not folder.is_absolute() or not folder.is_dir():
        raise acp.RequestError.invalid_params({"cwd": f"expected the absolute path of a folder, got {cwd!r}"})
    return folder


def _text(blocks: Sequence[Any]) -> str:
    """The text of a prompt: text blocks, embedded texts with their URIs, and the URIs of links.

    ValueError for a block of another type.
    """
    parts = []
    for block in blocks:
        resource = getattr(block, "resource", None)
        if getattr(block, "text", None):
            parts.append(block.text)
        elif getattr(resource, "text", None):
            parts.append(f"{resource.uri}:\n{resource.text}")  # type: ignore[union-attr]
        elif getattr(block, "uri", None):
            parts.append(str(block.uri))
        else:
            raise ValueError(f"expected text, a link or an embedded text, got a block of type {block.type}")
    return "\n".join(parts)
