"""What a pool does, in figures: for `headrace vm pool` and for benchmarks, taken by the calls that actors use."""

import time
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from headrace.config import Environment
from headrace.messages.sandbox import Acquire
from headrace.vmhost.clone import Clone
from headrace.vmhost.clones import CloneBackend
from headrace.vmhost.host import Host


class Taking(NamedTuple):
    """One acquire."""

    wall_ms: float
    private_mib: float
    """Anonymous memory of its machine while it was parked; of one made on demand, when it had answered."""


def request(template: str, slot: int, files: Mapping[str, bytes] | None = None) -> Acquire:
    """A sandbox with a machine of its own."""
    who = {"run": "figures", "lane": "eval", "group": "figures", "template": template, "files": dict(files or {})}
    return Acquire(**who, role="rollout", slot=slot, attempt=0, isolation="episode")  # type: ignore[arg-type]


async def warm(
    environment: Environment, template: str, count: int, files: Mapping[str, bytes] | None = None
) -> list[Taking]:
    """`count` clones that wait, taken one after another. VmhostError, SandboxLost."""
    environment = msgspec.structs.replace(environment, warm=count, also_warm=(template,), max_vms=2 * count + 2)
    return await _taken(environment, template, count, files)


async def on_demand(environment: Environment, template: str, count: int) -> list[Taking]:
    """`count` clones made one after another when they are asked for. VmhostError, SandboxLost."""
    return await _taken(msgspec.structs.replace(environment, warm=0, max_vms=count + 2), template, count, None)


async def _taken(
    environment: Environment, template: str, count: int, files: Mapping[str, bytes] | None
) -> list[Taking]:
    environment = msgspec.structs.replace(environment, judge_share=0, production_share=0)
    host = await Host.open(environment)
    backend = host._backend
    assert isinstance(backend, CloneBackend)
    try:
        await backend.template(template)
        if environment.warm:
            await backend.filled()
        parked = {clone.pid: clone.private_mb() for clone in backend.alive()}
        taken = []
        for slot in range(count):
            started = time.perf_counter()
            sandbox = await host.acquire(request(template, slot, files))
            wall = (time.perf_counter() - started) * 1000
            machine = host.machine(sandbox.id)
            assert isinstance(machine, Clone)
            taken.append(Taking(wall, parked.get(machine.pid, machine.private_mb())))
            host.release(sandbox.id)
        return taken
    finally:
        await host.close()
