"""Saves the device state of a template that is about to be frozen."""

import os
from pathlib import Path
from typing import cast

from qemu.qmp import QMPClient

from headrace.messages.sandbox import SandboxLost
from headrace.vmhost.qemu.process import Qemu


async def save(machine: Qemu, state: Path) -> None:
    """Write the device state; the memory is in its file already. The machine is not stopped first: saving stops it, and
    a state that says ``running`` lets clones run without another command.
    """
    client = QMPClient("template")
    machine.monitor.setblocking(False)
    await client.connect(machine.monitor)
    fd = os.open(state, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        on = [{"capability": "x-ignore-shared", "state": True}, {"capability": "events", "state": True}]
        await client.execute("migrate-set-capabilities", {"capabilities": on})
        await client.execute("migrate-set-parameters", {"max-bandwidth": 10**12})
        client.send_fd_scm(fd)
        await client.execute("getfd", {"fdname": "state"})
        with client.listener("MIGRATION") as events:
            await client.execute("migrate", {"uri": "fd:state"})
            async for event in events:
                status = cast(dict[str, dict[str, str]], event)["data"]["status"]
                if status == "completed":
                    break
                if status in ("failed", "cancelled"):
                    raise SandboxLost(f"saving the machine {status}")
    finally:
        os.close(fd)
        await client.disconnect()
