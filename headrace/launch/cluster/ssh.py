"""Runs commands on hosts through OpenSSH's client; a failure is one sentence."""

import asyncio
import os
import shlex
import signal
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial

from headrace.errors import HeadraceError
from headrace.launch.cluster.file import Cluster, Node
from headrace.launch.runs import RunError
from headrace.parent_death import die_with

CONNECT_S = 15
ANSWER_S = 240.0
"""Seconds for one command: a start waits for the broker of its host, a stop for the drain of its actors."""
_LOST = 255
"""Exit code of ssh itself when it cannot connect."""


class HostError(HeadraceError):
    """A host could not do what it was asked; the text is one sentence without the host's name."""

    def __init__(self, text: str, status: int = 0) -> None:
        """status: the exit status of the command; 0 without one."""
        super().__init__(text)
        self.status = status


async def call(cluster: Cluster, host: Node, command: str, stdin: bytes = b"") -> str:
    """Standard output of a shell command on a host. HostError when it cannot be reached or the command fails.

    The kernel ends the client with this process; the command on the host goes on. When no answer comes in time or the
    call is cancelled, the client's children are ended too, such as the command of a `ProxyCommand`."""
    target = f"{host.user}@{host.address}" if host.user else host.address
    argv = ["ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}", *cluster.ssh]
    argv += ["-p", str(host.port), "--", target, "sh", "-c", shlex.quote(command)]
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=partial(die_with, os.getpid()),
        )
    )
    try:
        async with asyncio.timeout(ANSWER_S):
            process = await asyncio.shield(starting)
            out, said = await process.communicate(stdin)
    except FileNotFoundError:
        raise RunError(
            "there is no ssh on this machine; install OpenSSH's client (Debian: openssh-client)", 3
        ) from None
    except TimeoutError:
        raise HostError(f"no answer within {ANSWER_S:g} s") from None
    finally:
        await _end(starting)
    if process.returncode:
        lines = [line.strip() for line in said.decode("utf-8", "replace").splitlines() if line.strip()]
        text = (lines or [f"code {process.returncode} without a message"])[-1].removeprefix("headrace: ")
        raise HostError(f"ssh cannot reach it: {text}" if process.returncode == _LOST else text, process.returncode)
    return out.decode("utf-8", "replace")


async def _end(starting: "asyncio.Future[asyncio.subprocess.Process]") -> None:
    """End a client with its children. A start that was interrupted is awaited: the client may have children already."""
    with suppress(OSError):
        process = await starting
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def everywhere(hosts: Sequence[Node], body: Callable[[Node], Awaitable[str]]) -> dict[str, str]:
    """Ask all hosts at once; the answers by host name. RunError with a line per host that failed."""

    async def one(host: Node) -> tuple[Node, str, str]:
        try:
            return host, await body(host), ""
        except HostError as error:
            return host, "", str(error)

    answers = await asyncio.gather(*(one(host) for host in hosts))
    failed = [f"host {host.name} ({host.address}:{host.port}): {error}" for host, _, error in answers if error]
    if failed:
        raise RunError("\nheadrace: ".join(failed), 3)
    return {host.name: answer for host, answer, _ in answers}
