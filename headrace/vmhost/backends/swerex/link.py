"""The host's side of the bridge: requests to a SWE-ReX server, and the channels of the sandboxes behind it.

Every request has a deadline. One that fails ends the link and every sandbox behind it: they are then infrastructure
that was lost, as with a node.

Source: SWE-ReX 1.4.0, swerex/server.py and swerex/runtime/abstract.py.
"""

import asyncio
import base64
import io
import json
import secrets
import socket
import zipfile
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp

from headrace.messages.sandbox import SandboxLost
from headrace.vmhost import agent_files
from headrace.vmhost.backends.swerex.bridge import HEAD
from headrace.vmhost.channel import Channel
from headrace.vmhost.errors import VmhostError

_REQUEST_S = 60.0
START_S = 60.0
"""Longest wait for the bridge's first file."""
ALIVE_S = 20.0
_CHUNK = 1 << 20
_BUSY_S, _SLOWEST_S, _IDLE_S = 0.005, 0.1, 1.0
_START = "cd / && exec python3 -I -c {code} {place} > {place}/log 2>&1 < /dev/null &"
_CODE = "'import sys; sys.path.insert(0, sys.argv[1]); from headrace.vmhost.backends.swerex import bridge; bridge.main(sys.argv[1])'"  # noqa: E501


def package() -> bytes:
    """A zip archive of the bridge and the slot agent."""
    empty = ("headrace", "headrace/vmhost", "headrace/vmhost/backends", "headrace/vmhost/backends/swerex")
    files = {f"{folder}/__init__.py": b"" for folder in empty}
    files |= {f"headrace/vmhost/guest/{path}": content for path, content in agent_files.sources().items()}
    spec = find_spec("headrace.vmhost.backends.swerex.bridge")
    assert spec is not None and spec.origin is not None
    files["headrace/vmhost/backends/swerex/bridge.py"] = Path(spec.origin).read_bytes()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in files.items():
            archive.writestr(path, content)
    return out.getvalue()


class Link:
    """One bridge on one server. Make it by `open`."""

    def __init__(self, url: str, token: str) -> None:
        self._url = url.rstrip("/")
        self._http = aiohttp.ClientSession(
            headers={"X-API-Key": token} if token else {}, timeout=aiohttp.ClientTimeout(total=_REQUEST_S)
        )
        self._place = f"/tmp/headrace-swerex-{secrets.token_hex(8)}"
        self._sent = self._read = self._count = 0
        self._order = asyncio.Lock()
        self._ends: dict[int, tuple[socket.socket, Channel]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._asked = asyncio.Event()
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.found: dict[str, Any] = {}
        """Python's version on the server, and whether it has pytest."""

    @classmethod
    async def open(cls, url: str, token: str) -> "Link":
        """A link to a bridge that runs. VmhostError with one sentence."""
        link = cls(url, token)
        try:
            async with asyncio.timeout(START_S):
                await link._start()
        except (VmhostError, aiohttp.ClientError, TimeoutError) as error:
            await link.close()
            why = f"no answer within {START_S:g} s" if isinstance(error, TimeoutError) else str(error)
            raise VmhostError(f"the SWE-ReX server at {url} cannot be used: {why}") from None
        link._spawn(link._poll())
        link._spawn(link._keep_alive())
        return link

    async def _start(self) -> None:
        await self._post("is_alive")
        await self._upload(self._place, package(), unzip=True)
        await self._alive()
        await self._post("write_file", {"path": f"{self._place}/written", "content": "0"})
        command = _START.format(code=_CODE, place=self._place)
        await self._post("execute", {"command": command, "shell": True, "timeout": 10.0})
        while not await self._written():
            if "Error" in (log := await self._text("log")):
                raise VmhostError(f"its Python cannot run the slot agent: {log.strip().splitlines()[-1][:300]}")
            await asyncio.sleep(_SLOWEST_S)
        self.found = json.loads(await self._text("out/0"))
        self._read = 1

    async def _post(self, path: str, body: Any = None, data: aiohttp.FormData | None = None) -> Any:
        """An answer of the server. VmhostError for a refusal, aiohttp's errors, TimeoutError."""
        method = "GET" if body is None and data is None else "POST"
        async with self._http.request(method, f"{self._url}/{path}", json=body, data=data) as response:
            text = await response.text()
            if response.status == 200:
                return json.loads(text)
            if response.status == 511:  # an exception of the runtime
                told = json.loads(text)["swerexception"]
                raise VmhostError(f"{path}: {told['class_path']}: {told['message']}"[:300])
            if response.status in (401, 403, 500) and path == "is_alive":
                raise VmhostError(
                    f"it answers {response.status}; [environment] key_file names the file with its --auth-token"
                )
            raise VmhostError(f"{path}: it answers {response.status}: {text[:200]}")

    async def _upload(self, target: str, content: bytes, unzip: bool = False) -> None:
        form = aiohttp.FormData()
        form.add_field("file", content, filename="chunk")
        form.add_field("target_path", target)
        form.add_field("unzip", "true" if unzip else "false")
        await self._post("upload", data=form)

    async def _text(self, name: str) -> str:
        """A file of the bridge."""
        return str((await self._post("read_file", {"path": f"{self._place}/{name}"}))["content"])

    async def _written(self) -> int:
        return int(await self._text("written"))

    async def _alive(self) -> None:
        await self._post("write_file", {"path": f"{self._place}/alive", "content": str(self._read)})

    def _spawn(self, work: Any) -> None:
        async def guarded() -> None:
            try:
                await work
            except (VmhostError, aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                self._end(f"the SWE-ReX server at {self._url}: {str(error) or type(error).__name__}")

        task = asyncio.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _end(self, reason: str) -> None:
        if not self.lost.done():
            self.lost.set_result(reason)
        for end, channel in list(self._ends.values()):
            channel.close(reason)
            end.close()
        self._ends.clear()

    async def sandbox(self, name: str) -> Channel:
        """The channel of a new sandbox. SandboxLost."""
        if self.lost.done():
            raise SandboxLost(f"{name}: {self.lost.result()}")
        self._count += 1
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        channel = await Channel.connect(ours, name)
        self._ends[self._count] = (theirs, channel)
        self._spawn(self._send(self._count, theirs))
        return channel

    async def _send(self, number: int, end: socket.socket) -> None:
        """Upload what the host writes to a channel until it closes."""
        loop = asyncio.get_running_loop()
        while number in self._ends:
            try:
                data = await loop.sock_recv(end, _CHUNK)
            except OSError:
                data = b""
            await self._put(number, data)
            self._asked.set()
            if not data:
                if self._ends.pop(number, None):
                    end.close()
                return

    async def _put(self, number: int, data: bytes) -> None:
        async with self._order:
            await self._upload(f"{self._place}/in/{self._sent}", HEAD.pack(number, len(data)) + data)
            self._sent += 1

    async def _poll(self) -> None:
        """Read the files of ``out`` in their order: often while a call waits, else once a second."""
        pause = _BUSY_S
        while True:
            if self._read < await self._written():
                pause = _BUSY_S
                await self._deliver(await self._text(f"out/{self._read}"))
                self._read += 1
                continue
            if any(channel.busy for _, channel in self._ends.values()):
                await asyncio.sleep(pause)
                pause = min(2 * pause, _SLOWEST_S)
                continue
            self._asked.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_IDLE_S):
                    await self._asked.wait()
            pause = _BUSY_S

    async def _deliver(self, text: str) -> None:
        loop = asyncio.get_running_loop()
        for line in text.splitlines():
            number, _, data = line.partition(" ")
            end, channel = self._ends.get(int(number), (None, None))
            if end is None or channel is None:
                continue  # it was released meanwhile
            if not data:
                channel.close("its agent has ended")
                continue
            with suppress(OSError):  # released meanwhile
                await loop.sock_sendall(end, base64.b64decode(data))

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(ALIVE_S)
            await self._alive()

    async def close(self) -> None:
        """End the bridge with everything behind it."""
        if not self.lost.done():
            with suppress(VmhostError, aiohttp.ClientError, TimeoutError):
                if self.found:
                    await self._put(0, b"")
                else:
                    await self._post("execute", {"command": ["rm", "-rf", self._place], "timeout": 10.0})
        self._end("the backend was closed")
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.close()
