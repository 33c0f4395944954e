"""What a pool does, in figures: for `headrace vm pool` and for benchmarks, taken by the calls that actors use."""

import time
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


def request(template: str, slot: int) -> Acquire:
    """A sandbox with a machine of its own."""
    who = {"run": "figures", "lane": "eval", "group": "figures", "template": template}
    return Acquire(**who, role="rollout", slot=slot, attempt=0, isolation="episode")  # type: ignore[arg-type]


async def acquires(environment: Environment, template: str, count: int) -> tuple[list[Taking], list[Taking]]:
    """`count` warm clones taken one after another, and as many made on demand. VmhostError, SandboxLost."""
    warm = msgspec.structs.replace(environment, warm=count, also_warm=(template,), max_vms=2 * count + 2)
    cold = msgspec.structs.replace(environment, warm=0, max_vms=count + 2)
    return await _acquires(warm, template, count), await _acquires(cold, template, count)


async def _acquires(environment: Environment, template: str, count: int) -> list[Taking]:
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
            sandbox = await host.acquire(request(template, slot))
            wall = (time.perf_counter() - started) * 1000
            machine = host.machine(sandbox.id)
            assert isinstance(machine, Clone)
            taken.append(Taking(wall, parked.get(machine.pid, machine.private_mb())))
            host.release(sandbox.id)
        return taken
    finally:
        await host.close()
