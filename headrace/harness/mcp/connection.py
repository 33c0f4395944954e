"""A connection to one external MCP server. A call opens it when it is not open, also after the server has died.

One asyncio task opens and closes the client, because the SDK's cancel scopes belong to the task that opened them. Any
task of the same event loop may make calls.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

import msgspec

from headrace.errors import WRONG_INPUT, HeadraceError
from headrace.secret_files import SecretError, token

if TYPE_CHECKING:
    from mcp import Client

_STAYS = (-32600, -32601, -32602, -32603)
"""JSON-RPC errors that refuse one request and leave the connection usable."""


CLOSE_S = 15.0
"""Seconds for a session to end in order, and as many after its cancellation. The SDK kills a command after 4 s."""


class McpError(HeadraceError, exit_status=WRONG_INPUT):
    """A server cannot be used or does not answer; the text gives the reason in one sentence."""


class Settings(Protocol):
    """The keys of `[tasks.mcp.NAME]` that a connection needs."""

    @property
    def command(self) -> tuple[str, ...]:
        """Program and arguments."""

    @property
    def env(self) -> tuple[str, ...]:
        """Names of the environment variables that the command receives."""

    @property
    def url(self) -> str:
        """Address of a server over HTTP, in place of a command."""

    @property
    def key_file(self) -> str:
        """File with the bearer token."""

    @property
    def start_s(self) -> float:
        """Longest wait for the server's start, in seconds."""

    @property
    def calls(self) -> int:
        """Most calls in one episode."""

    @property
    def call_s(self) -> float:
        """Longest wait for an answer, in seconds."""

    @property
    def result_bytes(self) -> int:
        """Most bytes of an answer."""


class Offered(msgspec.Struct, frozen=True, kw_only=True):
    """One tool as its server lists it."""

    name: str
    about: str
    schema: dict[str, Any]
    """JSON Schema of the arguments."""
    reads: bool = False
    """Whether the server declares the tool as read-only."""


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """The tools of a server."""

    version: str
    tools: tuple[Offered, ...]


class _Session:
    """One client, and the task that owns it."""

    def __init__(self, target: Any) -> None:
        self.ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self.ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())
        self.closing = asyncio.Event()
        self.task = asyncio.create_task(self._own(target))

    async def _own(self, target: Any) -> None:
        from mcp import Client

        try:
            async with Client(target) as client:
                self.ready.set_result(client)
                await self.closing.wait()
        except Exception as error:  # the SDK raises groups of its transports' exceptions
            if not self.ready.done():
                self.ready.set_exception(McpError(reason_of(error)))
        finally:
            if not self.ready.done():  # cancelled: other callers wait for this session, too
                self.ready.set_exception(McpError("the session ended before the server answered"))


class Connection:
    """Calls one server. Every failure except cancellation is an McpError."""

    def __init__(self, name: str, section: Settings, log: Path | None = None) -> None:
        """log: file for the standard error of a command; None drops it."""
        self.name, self.section, self._log = name, section, log
        self._session: _Session | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._stderr: TextIO | None = None

    async def listing(self) -> Listing:
        """All pages of the server's tools. McpError."""
        client = await self._client()
        tools: list[Offered] = []
        try:
            async with asyncio.timeout(self.section.start_s):
                cursor: str | None = None
                while True:
                    page = await client.list_tools(cursor=cursor)
                    for tool in page.tools:
                        reads = bool(tool.annotations and tool.annotations.read_only_hint)
                        tools.append(
                            Offered(name=tool.name, about=tool.description or "", schema=tool.input_schema, reads=reads)
                        )
                    cursor = page.next_cursor
                    if cursor is None:
                        break
        except TimeoutError:
            raise McpError(f"MCP server {self.name} did not list its tools in {self.section.start_s:g} s") from None
        except Exception as error:
            self._drop()
            raise McpError(f"MCP server {self.name} does not list its tools: {reason_of(error)}") from None
        return Listing(version=str(client.server_info.version if client.server_info else ""), tools=tuple(tools))

    async def call(self, tool: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        """The answer as text, and whether the call succeeded. McpError for a refused call or a lost connection."""
        from mcp import MCPError

        client = await self._client()
        session = self._session
        try:
            async with asyncio.timeout(self.section.call_s):
                result = await client.call_tool(tool, arguments)
        except TimeoutError:
            raise McpError(f"MCP server {self.name} did not answer in {self.section.call_s:g} s") from None
        except Exception as error:
            if not isinstance(error, MCPError) or error.error.code not in _STAYS:
                self._drop(session)
            raise McpError(f"MCP server {self.name}: {reason_of(error)}") from None
        return _text(result), not result.is_error

    async def close(self) -> None:
        """End the client, and the process of a command. After CLOSE_S the end is cancelled, after as many more left."""
        self._drop()
        if self._ending:
            _, late = await asyncio.wait(self._ending, timeout=CLOSE_S)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=CLOSE_S)
        if self._stderr is not None:
            self._stderr.close()

    async def _client(self) -> "Client":
        if self._session is None or self._session.task.done():
            self._session = _Session(self._target())
        session = self._session
        try:
            async with asyncio.timeout(self.section.start_s):
                return await asyncio.shield(session.ready)
        except TimeoutError:
            self._drop(session, now=True)
            raise McpError(f"MCP server {self.name} did not start in {self.section.start_s:g} s") from None
        except McpError as error:
            self._drop(session)
            raise McpError(f"MCP server {self.name} does not start: {error}") from None

    def _target(self) -> Any:
        """Open the SDK's transport: standard streams or HTTP."""
        from mcp import StdioServerParameters, stdio_client

        section = self.section
        if section.url:
            key = _token(self.name, section.key_file) if section.key_file else ""
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            return _http(section.url, headers)
        env = {name: _variable(self.name, name) for name in section.env}
        if self._stderr is None:
            if self._log is not None:
                self._log.parent.mkdir(parents=True, exist_ok=True)
            self._stderr = open(self._log or os.devnull, "a", encoding="utf-8")
        return stdio_client(
            StdioServerParameters(command=section.command[0], args=list(section.command[1:]), env=env),
            errlog=self._stderr,
        )

    def _drop(self, session: _Session | None = None, *, now: bool = False) -> None:
        """End a session, the present one by default. now: end it also while it is being opened."""
        session = session or self._session
        if session is None:
            return
        session.closing.set()
        if now or not session.ready.done():
            session.task.cancel()
        if not session.task.done():
            self._ending.add(session.task)
            session.task.add_done_callback(self._ending.discard)
        if self._session is session:
            self._session = None


@asynccontextmanager
async def _http(url: str, headers: dict[str, str]) -> AsyncIterator[Any]:
    """Streamable HTTP with an HTTP client that is closed with it: the SDK closes only clients that it creates."""
    from httpx2 import AsyncClient, Timeout
    from mcp.client.streamable_http import streamable_http_client

    # No read timeout: each caller limits its own call, and calls may take long.
    async with (
        AsyncClient(headers=headers, timeout=Timeout(30.0, read=None)) as http,
        streamable_http_client(url, http_client=http) as streams,
    ):
        yield streams


def reason_of(error: BaseException) -> str:
    """The first real exception of a group, as one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(str(error).split())[:300] or type(error).__name__


def _variable(server: str, name: str) -> str:
    if name not in os.environ:
        raise McpError(f"MCP server {server}: set the environment variable {name}")
    return os.environ[name]


def _token(server: str, path: str) -> str:
    try:
        return token(path, f"[tasks.mcp.{server}] key_file")
    except SecretError as error:
        raise McpError(f"MCP server {server}: {error}") from None


def _text(result: Any) -> str:
    """The text blocks, with a placeholder for other kinds of block; the structured result if there are no blocks."""
    blocks = [block.text if block.type == "text" else f"[{block.type}, not shown]" for block in result.content]
    if not blocks and result.structured_content is not None:
        return msgspec.json.encode(result.structured_content).decode()
    return "\n".join(blocks)
