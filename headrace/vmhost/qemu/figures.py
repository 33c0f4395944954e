"""Times and memory of acquired warm clones, for benchmarks, measured by the calls of actors."""

import time
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from headrace.config import Environment
from headrace.messages.sandbox import Acquire
from headrace.vmhost.node.host import Host
from headrace.vmhost.qemu.backend import CloneBackend
from headrace.vmhost.qemu.clone import Clone


class Measured(NamedTuple):
    """One acquire."""

    wall_ms: float
    private_mib: float
    """Anonymous memory of its machine while it was parked."""


def request(template: str, slot: int, files: Mapping[str, bytes] | None = None) -> Acquire:
    """A sandbox with a machine of its own."""
    fields = {"run": "figures", "lane": "eval", "group": "figures", "template": template, "files": dict(files or {})}
    return Acquire(**fields, role="rollout", slot=slot, attempt=0, isolation="episode")  # type: ignore[arg-type]


async def warm(
    environment: Environment, template: str, count: int, files: Mapping[str, bytes] | None = None
) -> list[Measured]:
    """`count` parked clones, acquired one after another. VmhostError, SandboxLost."""
    changes = {"warm": count, "also_warm": (template,), "max_vms": 2 * count + 2, "judge_share": 0}
    environment = msgspec.structs.replace(environment, production_share=0, **changes)
    host = await Host.open(environment)
    backend = host._backend
    assert isinstance(backend, CloneBackend)
    try:
        await backend.template(template)
        await backend.filled()
        parked = {clone.pid: clone.private_mb() for clone in backend.alive()}
        measured = []
        for slot in range(count):
            started = time.perf_counter()
            sandbox = await host.acquire(request(template, slot, files))
            wall = (time.perf_counter() - started) * 1000
            machine = host.machine(sandbox.id)
            assert isinstance(machine, Clone)
            measured.append(Measured(wall, parked[machine.pid]))
            host.release(sandbox.id)
        return measured
    finally:
        await host.close()
