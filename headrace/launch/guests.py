"""Guest images and templates before anything needs them, made by a process of its own that can be stopped at any point.

What makes them are blocking steps with children (mmdebstrap, QEMU). In a session of its own the whole of it ends with
one signal, and Ctrl-C in the terminal does not reach it behind our back.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress

from headrace.config import Config, Environment
from headrace.launch.children import die_with
from headrace.launch.output import say


async def prepare_host(config: Config) -> None:
    """Image and templates, cached. VmhostError with one sentence where this machine can't run VMs."""
    if config.environment.backend == "process":
        return
    from headrace.vmhost import doctor, qemu
    from headrace.vmhost.errors import VmhostError

    qemu.version()
    memory = doctor.memory(config.environment)
    if not memory.good:
        raise VmhostError(memory.text)
    parent = os.getpid()
    maker = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "headrace.cli", "vm", "build", *overrides(config.environment)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: die_with(parent),
    )
    assert maker.stdout is not None and maker.stderr is not None
    words = asyncio.ensure_future(maker.stderr.read())
    try:
        async for line in maker.stdout:
            say(line.decode("utf-8", "replace").rstrip())
        if await maker.wait() != 0:
            lines = (await words).decode("utf-8", "replace").strip().splitlines()
            raise VmhostError(lines[-1].removeprefix("headrace: ") if lines else "the guest image was not made")
    finally:
        words.cancel()
        with suppress(ProcessLookupError):
            os.killpg(maker.pid, signal.SIGTERM)
        await maker.wait()


def overrides(environment: Environment) -> list[str]:
    """The section as command-line arguments."""
    words = []
    for key in environment.__struct_fields__:
        words += ["--set", f"environment.{key}={json.dumps(getattr(environment, key))}"]
    return words


def end_together() -> None:
    """Called by the maker: its session ends with it, so that a parent's death leaves no mmdebstrap, nor anything half
    made."""
    if os.getsid(0) != os.getpid():
        return

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(os.getpid(), signal.SIGTERM)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
