"""A client of the agents API: sends requests, and reads the events of a run across lost connections."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from urllib.parse import quote

import aiohttp

from headrace.errors import HeadraceError

RECONNECT_S = 1.0
RECONNECTS = 30
"""Failed connections without a new event after which `events` raises AgentsApiError."""


class AgentsApiError(HeadraceError):
    """The gateway refused a request, or cannot be reached; then `status` is 0."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class RunEvent(NamedTuple):
    """One event of a run's stream."""

    name: str
    data: dict[str, Any]


class AgentsApi:
    """Calls of one gateway with one key."""

    def __init__(self, url: str, key: str) -> None:
        self._url, self._headers = url.rstrip("/"), {"x-api-key": key}
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "AgentsApi":
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30.0)
        self._http = aiohttp.ClientSession(headers=self._headers, timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._http is not None:
            await self._http.close()

    @property
    def _open(self) -> aiohttp.ClientSession:
        assert self._http is not None, "use it as a context manager"
        return self._http

    @asynccontextmanager
    async def _answer(self, method: str, path: str, **options: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer to a request. AgentsApiError for a refusal or an unreachable gateway."""
        try:
            async with self._open.request(method, self._url + path, **options) as answer:
                if answer.status >= 300:
                    text = f"{method} {path}: {answer.status}: {_message(await answer.text())}"
                    raise AgentsApiError(text, answer.status)
                yield answer
        except (aiohttp.ClientError, OSError) as error:
            raise AgentsApiError(f"{self._url} cannot be reached: {error}") from None

    async def call(self, method: str, path: str, body: dict[str, Any] | None = None, once: str = "") -> dict[str, Any]:
        """Send a request and return the JSON of its answer. once: the Idempotency-Key. AgentsApiError."""
        headers = {"Idempotency-Key": once} if once else {}
        async with self._answer(method, path, json=body, headers=headers) as answer:
            content: dict[str, Any] = await answer.json()
            return content

    async def content(self, agent: str, path: str) -> bytes | None:
        """The content of a file in an agent's workspace; None if there is no such file. AgentsApiError."""
        try:
            async with self._answer("GET", f"/v1/agents/{agent}/artifacts/{quote(path)}") as answer:
                return await answer.read()
        except AgentsApiError as error:
            if error.status == 404:
                return None
            raise

    async def events(self, agent: str, run: str) -> AsyncIterator[RunEvent]:
        """The events of a run up to its end, each once. After a lost connection the stream resumes after the last
        received event. AgentsApiError."""
        last, lost = "", 0
        url = f"{self._url}/v1/agents/{agent}/runs/{run}/stream"
        while True:
            headers = {"Last-Event-ID": last} if last else {}
            try:
                async with self._open.get(url, headers=headers) as answer:
                    if answer.status >= 300:
                        raise AgentsApiError(f"the stream of {run}: {answer.status}: {_message(await answer.text())}")
                    fields: dict[str, str] = {}
                    async for line in answer.content:
                        text = line.decode().rstrip("\n")
                        if text and not text.startswith(":"):
                            name, _, value = text.partition(": ")
                            fields[name] = value
                        elif fields and not text:
                            last, lost = fields.get("id", last), 0
                            event = RunEvent(fields["event"], json.loads(fields["data"]))
                            fields = {}
                            yield event
                            if event.name == "done":
                                return
            except (aiohttp.ClientError, OSError) as error:
                lost += 1
                if lost > RECONNECTS:
                    raise AgentsApiError(f"the stream of {run} was lost {lost} times: {error}") from None
            await asyncio.sleep(RECONNECT_S)


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:300]
