"""A host of real machines, and requests to it: what tests of machines and of the pool ask alike."""

from typing import Any

from headrace.config import Environment
from headrace.messages.sandbox import Acquire
from headrace.vmhost.node.host import Host, VmSandbox
from headrace.vmhost.qemu.backend import CloneBackend
from headrace.vmhost.qemu.clone import Clone
from tests.support.paths import ROOT

CACHE = str(ROOT / ".cache" / "headrace")


def environment(**changes: Any) -> Environment:
    return Environment(backend="qemu", cache_dir=CACHE, **changes)


def ask(slot: int = 0, **changes: Any) -> Acquire:
    fields: dict[str, Any] = {"run": "r1", "lane": "train", "role": "rollout", "attempt": 0, "isolation": "group"}
    fields["group"] = "g0"
    return Acquire(slot=slot, **({"files": {"a.txt": b"one\n"}} | fields | changes))


def backend(host: Host) -> CloneBackend:
    assert isinstance(host._backend, CloneBackend)
    return host._backend


def clone_of(host: Host, sandbox: VmSandbox) -> Clone:
    machine = host._sandboxes[sandbox.id][1].machine
    assert isinstance(machine, Clone)
    return machine
