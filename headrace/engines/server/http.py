"""HTTP to one server: JSON requests, streamed generations, and one typed error for every failure.

Idea: servers report errors in three formats (`{"error": "..."}`, `{"error": {"message": ...}}`, `{"object": "error",
"message": ...}`), also inside a stream that began with status 200, and may end without any. Callers need only one fact,
the kind of the failure: refused (the same request would be refused again), gone, late, or garbled.

This module splits streams into events, because the HTTP client's line reader has a limit and routed experts make lines
of megabytes.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, Literal

import aiohttp
import msgspec

from headrace.engines.base import EngineError

Kind = Literal["refused", "gone", "late", "garbled"]
Reply = dict[str, Any]

CONNECT_S = 10.0
BUFFER = 1 << 20
LARGE = 1 << 18
"""Bytes of an event from which it is decoded in a thread: 17 MB take some 10 ms, while other turns wait."""


class ServerError(EngineError):
    """A request that the server did not answer as expected.

    kind: `refused` (an error reply; `status` is its HTTP code), `gone` (no connection, or an interrupted one), `late`
    (no answer in time), `garbled` (an answer that cannot be used).
    """

    def __init__(self, kind: Kind, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.kind: Kind = kind
        self.status = status


def reason(body: bytes) -> str:
    """The server's message in an error body of any of its formats."""
    try:
        reply = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body[:300].decode(errors="replace").strip() or "no reason given"
    for key in ("error", "message", "detail"):
        if isinstance(reply, dict) and key in reply:
            inner = reply[key]
            return str(inner.get("message", inner) if isinstance(inner, dict) else inner)
    return str(reply)


class Wire:
    """The HTTP client of one server. `close` ends its connections."""

    def __init__(self, url: str) -> None:
        """url: such as http://127.0.0.1:30000."""
        self.url = url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    def _open(self) -> aiohttp.ClientSession:
        if self._closed:
            raise ServerError("gone", f"the connection to {self.url} was closed")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                read_bufsize=BUFFER,
                json_serialize=lambda value: msgspec.json.encode(value).decode(),
            )
        return self._session

    async def get(self, path: str, timeout_s: float = 30.0) -> Reply:
        """GET a JSON object. ServerError when there is none within `timeout_s` seconds."""
        return await self._ask("GET", path, None, timeout_s)

    async def post(self, path: str, body: Mapping[str, Any], timeout_s: float = 30.0) -> Reply:
        """POST JSON and return the JSON object of the reply, empty when it has none. ServerError otherwise."""
        return await self._ask("POST", path, body, timeout_s)

    async def text(self, path: str, timeout_s: float = 30.0) -> str:
        """GET a page of plain text. ServerError otherwise."""
        return (await self._read("GET", path, None, timeout_s)).decode(errors="replace")

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Reply:
        data = await self._read(method, path, body, timeout_s)
        try:
            reply = msgspec.json.decode(data) if data.strip() else {}
        except msgspec.DecodeError:
            reply = {}  # plain text, such as the reply of /flush_cache
        return reply if isinstance(reply, dict) else {"list": reply}

    async def _read(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> bytes:
        limit = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)
        try:
            async with self._open().request(method, self.url + path, json=body, timeout=limit) as answer:
                data = await answer.read()
        except TimeoutError:
            raise ServerError("late", f"{self.url}{path} did not answer within {timeout_s:.0f} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServerError("gone", f"{self.url} cannot be reached: {error or type(error).__name__}") from None
        if answer.status != 200:
            raise ServerError("refused", f"{self.url}{path} refused: {reason(data)}", answer.status)
        return data

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[Reply]:
        """POST JSON and yield each event of the streamed answer, until the one that ends it. ServerError.

        There is no time limit here: a paused server may hold a request for any time.
        """
        limit = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        done = some = False
        try:
            async with self._open().post(self.url + path, json=body, timeout=limit) as answer:
                if answer.status != 200:
                    text = reason(await answer.read())
                    raise ServerError("refused", f"{self.url}{path} refused: {text}", answer.status)
                rest = bytearray()
                async for part in answer.content.iter_any():
                    seen = max(0, len(rest) - 1)
                    rest += part
                    while (end := rest.find(b"\n\n", seen)) >= 0:
                        with memoryview(rest) as view:
                            data, seen = bytes(view[:end]), 0
                        del rest[: end + 2]
                        large = len(data) >= LARGE
                        event = await asyncio.to_thread(self._event, path, data) if large else self._event(path, data)
                        if event is None:
                            done = True  # what follows is read, so that the connection can be used again
                        else:
                            some = True
                            yield event
        except (aiohttp.ClientError, OSError) as error:
            raise ServerError("gone", f"{self.url} broke the connection: {error or type(error).__name__}") from None
        if not done or not some:
            raise ServerError("gone", f"{self.url} broke the connection in the middle of a reply")

    def _event(self, path: str, event: bytes) -> Reply | None:
        """The reply in one event; None at the end of the stream. ServerError for an error or for invalid JSON."""
        data = event.strip().removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return None
        try:
            decoded = msgspec.json.decode(data)
        except msgspec.DecodeError as error:
            raise ServerError("garbled", f"{self.url}{path} sent an event that is not JSON: {error}") from None
        if not isinstance(decoded, dict) or "error" in decoded or decoded.get("object") == "error":
            said = decoded.get("error", decoded) if isinstance(decoded, dict) else {}
            status = said.get("code") if isinstance(said, dict) else None
            raise ServerError("refused", f"{self.url}{path} refused: {reason(data)}", status or 400)
        return decoded

    async def close(self) -> None:
        """End all connections; later calls get ServerError."""
        self._closed = True
        if self._session is not None:
            await self._session.close()
            self._session = None
