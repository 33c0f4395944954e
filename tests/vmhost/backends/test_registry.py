"""Backends by name, their capabilities, and requests that demand more than a backend has."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.config import Config, Environment, Run
from headrace.launch.checks import machine
from headrace.launch.checks.finding import bad
from headrace.messages.sandbox import Acquire
from headrace.registry import admit
from headrace.vmhost.backend import Capabilities, Requirement, demands
from headrace.vmhost.backends.process import ProcessBackend
from headrace.vmhost.backends.registry import backend_class, capabilities
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.node.host import Host
from headrace.vmhost.qemu.backend import CloneBackend

pytestmark = pytest.mark.anyio


class IsolatedProcesses(ProcessBackend):
    """A backend from outside the package: it claims isolation and host names."""

    name = "outside"
    capabilities = Capabilities(isolated=True, network_list=True)


class Needy(IsolatedProcesses):
    """A backend that declares what it needs of a machine."""

    @classmethod
    def requirements(cls, environment: Environment) -> Iterator[Requirement]:
        yield Requirement("cache_dir", False, f"{environment.cache_dir} lacks the kernel of this backend")


def request(**changes: Any) -> Acquire:
    fields: dict[str, Any] = {"run": "r", "lane": "train", "role": "rollout", "group": "g", "slot": 0, "attempt": 0}
    return Acquire(**(fields | {"isolation": "group"} | changes))


def test_built_in_backends_declare_what_they_can_do() -> None:
    assert backend_class("auto") is backend_class("qemu") is CloneBackend
    assert capabilities("qemu").missing(("isolated", "fork", "inspect", "hostname", "network_list")) == []
    limits = ("limit_vcpus", "limit_memory")
    assert capabilities("process").names() == ("harness", "network_list", *limits)
    assert capabilities("container").names() == ("harness", "upper_diff", "bounded", *limits, "limit_disk")


def test_an_unknown_backend_is_one_sentence() -> None:
    with pytest.raises(
        VmhostError, match=r"expected one of qemu, container, process.* or module:attribute, got 'gvisor'"
    ):
        backend_class("gvisor")


def test_a_request_demands_what_its_fields_need() -> None:
    assert demands(request()) == set()
    wanted = request(lane="production", hostname="box", network=("a:1",), requires=("upper_diff",))
    assert demands(wanted) == {"isolated", "hostname", "network_list", "upper_diff"}


def test_check_prints_what_a_backend_needs_of_the_machine(tmp_path: Path) -> None:
    admit("sandboxes", [f"{__name__}:Needy"])
    section = Environment(backend=f"{__name__}:Needy", cache_dir="here")
    findings = list(machine.check(Config(run=Run(dir=str(tmp_path)), environment=section)))
    assert findings[1:] == [bad("environment.cache_dir", "here lacks the kernel of this backend")]
    plain = Config(run=Run(dir=str(tmp_path)), environment=Environment(backend="process"))
    assert [each.good for each in machine.check(plain)][1:] == [True]


async def test_a_host_refuses_what_its_backend_lacks_by_name() -> None:
    host = await Host.open(Environment(backend="process"))
    try:
        for change, missing in (
            ({"lane": "production"}, "isolated"),
            ({"hostname": "box"}, "hostname"),
            ({"requires": ("upper_diff", "kernel_private")}, "kernel_private, upper_diff"),
            ({"requires": ("levitation",)}, "levitation"),
        ):
            with pytest.raises(VmhostError, match=f"the process backend lacks the capability {missing}"):
                await host.acquire(request(**change))
        sandbox = await host.acquire(request())
        with pytest.raises(VmhostError, match="lacks the capability fork"):
            await host.fork(sandbox.id, [request(slot=1)])
    finally:
        await host.close()


async def test_a_backend_from_outside_serves_by_its_module_and_attribute() -> None:
    admit("sandboxes", [name := f"{__name__}:IsolatedProcesses"])
    host = await Host.open(Environment(backend=name))
    try:
        sandbox = await host.acquire(request(lane="production", isolation="episode"))
        assert (host.backend, sandbox.backend, sandbox.alive) == ("outside", "outside", True)
    finally:
        await host.close()
