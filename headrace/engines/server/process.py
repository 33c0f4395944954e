"""A server process of an engine: starts it from its own virtual environment and ends it with its children.

A server runs as several processes in a session of their own. A signal to that session ends all of them; the server gets
SIGTERM when this process dies. To use a server that another program runs, leave `python` empty and set `url`.
"""

import asyncio
import os
import signal
import socket
import subprocess
import weakref
from contextlib import suppress
from pathlib import Path

from headrace.engines.base import EngineError
from headrace.engines.server.backend import Command
from headrace.parent_death import die_with

HIDDEN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Variables that a server does not inherit."""


def reserve() -> tuple[int, int]:
    """A free port on loopback, and the descriptor of a socket that keeps it until it is closed.

    The socket is bound and never listens. Nobody gets the port from the kernel while it is bound; a server that asks
    for this port gets it, because both sockets have SO_REUSEADDR. The option is set after bind, so that the kernel does
    not hand out a port which another such socket keeps.
    """
    keeper = socket.socket()
    try:
        keeper.bind(("127.0.0.1", 0))
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port = int(keeper.getsockname()[1])
    except OSError:
        keeper.close()
        raise
    return port, keeper.detach()


class Server:
    """One server as a child process."""

    def __init__(self, python: str, log: Path, *, devices: str | None = None) -> None:
        """python: the interpreter of the environment with the server. log: the file for its output. devices: the GPUs
        that it sees, as in CUDA_VISIBLE_DEVICES; None for all that this process sees.

        Its port is reserved as long as this object exists, also between two starts.
        """
        self._devices = devices
        self.python, self.log = python, log
        self.port, keeper = reserve()
        self._keeper = weakref.finalize(self, os.close, keeper)
        self.process: asyncio.subprocess.Process | None = None
        self.starts = 0

    @property
    def url(self) -> str:
        """The address of the server."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process is not None and self.process.returncode is None

    async def start(self, command: Command) -> None:
        """Start the server. Does not wait until it answers. EngineError when it cannot be started."""
        await self.stop()
        argv = [self.python, *command.arguments]
        # The server's interpreter has its own packages; this process's paths must not apply to it.
        mine = {key: value for key, value in os.environ.items() if key not in HIDDEN}
        env = {**command.environment, **mine, **command.forced}
        if self._devices is not None:
            env["CUDA_VISIBLE_DEVICES"] = self._devices
        self.log.parent.mkdir(parents=True, exist_ok=True)
        parent = os.getpid()

        try:
            with self.log.open("ab") as sink:
                self.process = await asyncio.create_subprocess_exec(
                    *argv,
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=sink,
                    env=env,
                    start_new_session=True,
                    preexec_fn=lambda: die_with(parent),
                )
        except OSError as error:
            raise EngineError(f"[engine.options] python {self.python} cannot be run: {error}") from None
        self.starts += 1

    def reason(self) -> str:
        """The last error in the server's log, or its last line."""
        try:
            lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        except OSError:
            lines = []
        errors = [line for line in lines[-200:] if "Error" in line]
        return (errors or lines or ["its log is empty"])[-1]

    def kill(self) -> None:
        """End all processes of the server with SIGKILL, without waiting: `process` reports the exit."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """End all processes of the server: SIGTERM, then SIGKILL after 5 s."""
        process, self.process = self.process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            async with asyncio.timeout(5.0):
                await process.wait()
        except TimeoutError:
            pass
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
