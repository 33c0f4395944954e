"""A server process of this engine: starts it from its own virtual environment and ends it with its children.

SGLang runs as three processes in a session of their own. A signal to that session ends all of them; the server gets
SIGTERM when this process dies. To use a server that another program runs, leave [engine] python empty and set url.
"""

import asyncio
import os
import shlex
import signal
import socket
import subprocess
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from headrace.engines.base import EngineError
from headrace.engines.sglang.weights.sparse import FOLDER, LOADER
from headrace.parent_death import die_with

ALWAYS = (
    *("--enable-metrics", "--skip-server-warmup", "--decode-log-interval", "10"),
    *("--enable-priority-scheduling", "--default-priority-value", "0", "--retraction-policy", "priority"),
)
"""The server reports its requests by priority every ten steps; where capacity is short, it retracts training requests
first."""
CPU = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-overlap-schedule", "--mem-fraction-static", "0.05", "--max-total-tokens", "65536"),
)
"""Arguments with which the server runs without a GPU (docs/sglang.md)."""


NO_DUMPS = {"SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0", "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0"}
"""By default a server whose scheduler died stays for 65 s to write dumps, while turns wait; this disables the dumps."""


def arguments() -> list[str]:
    """The server's arguments in tests and benchmarks: HEADRACE_SGLANG_ARGS where it is set (on a machine with a GPU),
    else `CPU`."""
    return shlex.split(os.environ["HEADRACE_SGLANG_ARGS"]) if "HEADRACE_SGLANG_ARGS" in os.environ else list(CPU)


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
    """One SGLang server as a child process."""

    def __init__(
        self, python: str, args: Sequence[str], log: Path, *, sparse: bool = False, devices: str | None = None
    ) -> None:
        """python: the interpreter of the environment with SGLang. args: arguments of SGLang's launch_server. log: the
        file for its output. sparse: give the server the loader that applies changed elements. devices: the GPUs that it
        sees, as in CUDA_VISIBLE_DEVICES; None for all that this process sees.

        Its port is reserved as long as this object exists, also between two starts.
        """
        self._sparse, self._devices = sparse, devices
        self.python, self.args, self.log = python, list(args), log
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

    async def start(self, model: Path, label: str) -> None:
        """Start the server with a checkpoint folder; it will report `label` as its weight version. Does not wait until
        it answers. EngineError when it cannot be started."""
        await self.stop()
        argv = [self.python, "-m", "sglang.launch_server", "--model-path", str(model), "--weight-version", label]
        argv += ["--host", "127.0.0.1", "--port", str(self.port), *ALWAYS, *self.args]
        env = NO_DUMPS | os.environ
        if "cpu" in self.args:
            # One thread by default: on cores that other processes use, threads would spend most of the time spinning.
            env = {"OMP_NUM_THREADS": "1"} | env | {"SGLANG_USE_CPU_ENGINE": "1"}
        # The server's interpreter has its own packages; this process's paths must not apply to it.
        env = {key: value for key, value in env.items() if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
        env.pop("DISABLE_OPENAPI_DOC", None)  # the client reads the description
        if self._devices is not None:
            env["CUDA_VISIBLE_DEVICES"] = self._devices
        if self._sparse:
            env["PYTHONPATH"] = str(FOLDER)
            argv += ["--custom-weight-loader", LOADER]
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
            raise EngineError(f"[engine] python {self.python} cannot be run: {error}") from None
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
