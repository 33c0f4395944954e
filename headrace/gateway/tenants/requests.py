"""The gateway's HTTP interface as requests on the bus, for tenants whose programs reach the broker alone.

    subject   hr.tenant.<id of the key>.<get|post|delete>
    header    Path: /v1/...            as over HTTP, with its query; Idempotency-Key as there
    payload   the body
    answer    the body, with the status in the header Hr-Status

The broker lets a tenant publish under the id of its own key only, so the subject proves the caller (callout.py). Each
request goes to the same handlers through a socket in a private folder; so keys, limits, answers and errors are those of
HTTP. Streamed answers exist over HTTP alone.
"""

import json
import re
import tempfile
from pathlib import Path

import aiohttp
from yarl import URL

from headrace.bus.connection import Bus, RawMessage
from headrace.gateway.http import Listener
from headrace.gateway.tenants.keys import ApiKeys
from headrace.messages import subjects

METHODS = ("get", "post", "delete")
PATHS = ("agents", "agent-sets", "client", "chat", "responses", "messages", "models")
"""First part of a path after /v1/: the routes that need a key."""
PASSED_ON = ("Idempotency-Key",)
AT_ONCE = 256
"""Requests under way; one more is answered with 503."""
TOTAL_S = 590.0
"""The broker forgets after ten minutes that a request may be answered."""
MAX_ANSWER = 7 << 20
"""Bytes of an answer; the broker takes 8 MB a message."""
STATUS = "Hr-Status"


_PATH = re.compile(rf"/v1/(?:{'|'.join(PATHS)})(?:[/?][!-~]*)?")


class TenantRequests:
    """Answers requests of tenants. Call `start`, later `stop`."""

    def __init__(self, bus: Bus, keys: ApiKeys) -> None:
        self._bus, self._keys = bus, keys
        self._under_way = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._http: aiohttp.ClientSession | None = None

    async def start(self, listener: Listener) -> None:
        """Open the socket to the listener's handlers, then the subjects."""
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-")  # mode 0700, and short enough for a socket
        path = Path(self._folder.name) / "gateway"
        await listener.also(path)
        timeout = aiohttp.ClientTimeout(total=TOTAL_S)
        self._http = aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path), limit=AT_ONCE), timeout=timeout)
        await self._bus.listen_raw(subjects.TENANT.where(), self._on_request)

    async def stop(self) -> None:
        """Close the socket."""
        if self._http is not None:
            await self._http.close()
        if self._folder is not None:
            self._folder.cleanup()

    async def _on_request(self, raw: RawMessage) -> None:
        if not raw.reply:
            return
        if self._under_way >= AT_ONCE:
            status, body = 503, _error("too many requests at once, try again")
        else:
            self._under_way += 1
            try:
                status, body = await self._passed_on(raw)
            except TimeoutError:
                status, body = 504, _error(f"no answer within {TOTAL_S:g} s")
            except aiohttp.ClientError as error:
                status, body = 503, _error(f"the gateway does not answer, try again: {error}")
            finally:
                self._under_way -= 1
        await self._bus.connection.send(raw.reply, body, {STATUS: str(status)})

    async def _passed_on(self, raw: RawMessage) -> tuple[int, bytes]:
        """Status and body of the handler's answer."""
        assert self._http is not None
        _, _, key, method = raw.subject.split(".", 3)
        headers = raw.headers or {}
        path = headers.get("Path", "")
        if method not in METHODS:
            return 405, _error(f"expected hr.tenant.<key>.<{'|'.join(METHODS)}>, got {method[:20]!a}")
        if not _PATH.fullmatch(path) or ".." in path or "%2e" in path.lower():
            return 400, _error(f"header Path: expected /v1/{{{','.join(PATHS)}}}/... as in a URL, got {path[:80]!a}")
        passed_on = {name: headers[name] for name in PASSED_ON if name in headers}
        async with self._http.request(
            method.upper(),
            URL(f"http://gateway{path}", encoded=True),
            data=raw.data,
            headers={"x-api-key": self._keys.inside(key), "Content-Type": "application/json"} | passed_on,
            allow_redirects=False,
        ) as answer:
            if answer.content_type == "text/event-stream":
                return 400, _error("streamed answers exist over HTTP alone: ask without `stream`, or read the run")
            body = bytearray()
            async for part in answer.content.iter_any():
                body += part
                if len(body) > MAX_ANSWER:
                    return 413, _error(f"the answer is over {MAX_ANSWER >> 20} MiB: ask for it over HTTP")
            return answer.status, bytes(body)


def _error(text: str) -> bytes:
    return json.dumps({"error": text}).encode()
