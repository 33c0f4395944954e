"""Builds guest images and templates before a run needs them, in a process that can be stopped at any point.

The build consists of blocking steps with children (mmdebstrap, QEMU). Its process has its own session, so that one
signal ends all of it and Ctrl-C in the terminal reaches only the command.
"""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import suppress

from headrace.config import Config, Environment
from headrace.launch.output import say
from headrace.parent_death import die_with
from headrace.python_modules import module_command

LINE_CHARS = 2000
"""Characters of a line of the build that are printed."""
_READ = 1 << 16
END_S = 10.0
"""Seconds for a build to end by SIGTERM; it is killed then."""


async def prepare_host(config: Config) -> None:
    """Build image and templates unless they are cached. VmhostError when this machine cannot run VMs."""
    from headrace.vmhost.backends.registry import capabilities
    from headrace.vmhost.errors import VmhostError

    if not capabilities(config.environment.backend).kernel_private:
        return
    from headrace.vmhost.node import doctor
    from headrace.vmhost.qemu import process

    process.version()
    memory = doctor.memory(config.environment)
    if not memory.good:
        raise VmhostError(memory.text)
    parent = os.getpid()
    maker = await asyncio.create_subprocess_exec(
        *module_command("headrace.cli", "vm", "build", *overrides(config.environment)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: die_with(parent),
    )
    assert maker.stdout is not None and maker.stderr is not None
    errors = asyncio.ensure_future(_end_of(maker.stderr))
    try:
        async for line in bounded_lines(maker.stdout):
            say(line)
        if await maker.wait() != 0:
            lines = (await errors).decode("utf-8", "replace").strip().splitlines()
            last = lines[-1].removeprefix("headrace: ")[:LINE_CHARS] if lines else "the guest image was not built"
            raise VmhostError(last)
    finally:
        errors.cancel()
        with suppress(ProcessLookupError):
            os.killpg(maker.pid, signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await maker.wait()
        with suppress(ProcessLookupError):
            os.killpg(maker.pid, signal.SIGKILL)
        await maker.wait()


async def bounded_lines(reader: asyncio.StreamReader) -> AsyncIterator[str]:
    """The lines of a stream, without the end of those that are longer than `LINE_CHARS`. `readline` raises ValueError
    for a line of more than 64 KiB."""
    line = b""
    while piece := await reader.read(_READ):
        *whole, rest = piece.split(b"\n")
        for part in whole:
            yield _shown(line + part)
            line = b""
        line = (line + rest)[: 4 * LINE_CHARS + 1]
    if line:
        yield _shown(line)


def _shown(line: bytes) -> str:
    text = line.decode("utf-8", "replace").rstrip()
    return text if len(text) <= LINE_CHARS else f"{text[:LINE_CHARS]} ..."


async def _end_of(reader: asyncio.StreamReader) -> bytes:
    """The last bytes of a stream."""
    end = b""
    while piece := await reader.read(_READ):
        end = (end + piece)[-_READ:]
    return end


def overrides(environment: Environment) -> list[str]:
    """The section as command-line arguments."""
    arguments = []
    for key in environment.__struct_fields__:
        arguments += ["--set", f"environment.{key}={json.dumps(getattr(environment, key))}"]
    return arguments


def end_together() -> None:
    """Called by the build process: make SIGTERM end its whole session, mmdebstrap and QEMU included."""
    if os.getsid(0) != os.getpid():
        return

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(os.getpid(), signal.SIGTERM)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)


def has_machines(config: Config) -> bool:
    """Whether sandboxes of this configuration run in virtual machines. VmhostError for an unknown backend."""
    from headrace.vmhost.backends.registry import capabilities

    return capabilities(config.environment.backend).kernel_private
