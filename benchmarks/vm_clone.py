"""Measures the cost of a machine: cold boot and clone, warm acquire, memory, round trips, forks, tools.

    python -m benchmarks.vm_clone [--small] [--light]

Boots and clones alternate, so that other load of the host affects both. Wall times of a shared host are noisy: the
ratios and the CPU time (of the QEMU process from its start to its end, by `wait4`) are the figures. ``light_`` figures
are the initramfs of small tasks, the others the full Debian image. A boot ends, as a clone's start does, with the
agent's first answer; a clone's includes its clock and entropy.
"""

import argparse
import asyncio
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import uvloop

from benchmarks.conditions import arguments, at_least, at_most, cannot_run, finish
from headrace.config import Environment
from headrace.messages.sandbox import Acquire, Exec, OpResult, PullTar, ReadFile, RunTests, SandboxLost, WriteFiles
from headrace.messages.tasks import TestPlan
from headrace.vmhost.channel import Channel
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.images import base as image
from headrace.vmhost.images import packages
from headrace.vmhost.node.host import Host, VmSandbox
from headrace.vmhost.qemu import process, snapshot
from headrace.vmhost.qemu.backend import CloneBackend
from headrace.vmhost.qemu.clone import Clone
from headrace.vmhost.qemu.memory import Memory, descriptor
from headrace.vmhost.templates import template
from headrace.vmhost.templates.template import Template
from headrace.vmhost.templates.validation import verify

Figures = dict[str, Any]
TESTS = {
    "src/pack.py": b"def double(x):\n    return 2 * x\n",
    "tests/test_pack.py": b"from pack import double\n\n\ndef test_a():\n    assert double(2) == 4\n\n\n"
    b"def test_b():\n    assert double('a') == 'aa'\n",
}
PUSHED = TESTS | {"README.md": b"# pack\n", "src/pack/__init__.py": b"", "src/pack/text.py": b"def shout(t): ...\n"}
"""Five files, as a small task has them."""
TOOLS = {
    "sh": "true",
    "python": "python3 -c pass",
    "pytest_cold": "PYTHONPATH=src python3 -m pytest -q tests",
    "ruff": "ruff check src",
    "ripgrep": "rg -c double src",
    "git": "git init -q . && git status --short",
}


class Measured(NamedTuple):
    """One acquire."""

    wall_ms: float
    private_mib: float
    """Anonymous memory of its machine while it was parked."""


def request(template: str, slot: int, files: Mapping[str, bytes] | None = None) -> Acquire:
    """A sandbox with a machine of its own."""
    fields = {"run": "figures", "lane": "eval", "group": "figures", "template": template, "files": dict(files or {})}
    return Acquire(**fields, role="rollout", slot=slot, attempt=0, isolation="episode")  # type: ignore[arg-type]


async def warmed(
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


class Book:
    """CPU time of clones by their end."""

    def __init__(self) -> None:
        self.cpu_ms: dict[int, float] = {}

    def ended(self, clone: Clone, cpu_ms: float) -> None:
        """Part of a clone's life."""
        self.cpu_ms[clone.pid] = cpu_ms


def centile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all are at most; the largest for few."""
    return round(sorted(values)[min(len(values) - 1, int(share * len(values)))], 2)


def median(values: Sequence[float]) -> float:
    """Median, rounded to two digits."""
    return round(statistics.median(values), 2)


async def boot(made: Template, folder: Path) -> tuple[float, float]:
    """(wall ms to the agent's first answer, CPU-ms of the whole boot)."""
    manifest = made.manifest
    line = process.kernel_line(manifest.hardware, template.MODULES, manifest.tsc_khz)
    base = packages.folder(made.folder.parent)
    started = time.perf_counter()
    memory = Memory("headrace-cold", manifest.hardware.memory_mb << 20)
    with (base / "vmlinuz").open() as kernel, (folder / "initrd").open() as root:
        given = [kernel.fileno(), root.fileno()]
        extra = ("-kernel", descriptor(given[0]), "-initrd", descriptor(given[1]), "-append", line)
        machine = process.Qemu(manifest.hardware, memory, share=True, extra=extra, inherit=given)
    channels = [await Channel.connect(end, f"port {number}") for number, end in enumerate(machine.ports)]
    try:
        await channels[0].call({"op": "clock"}, (), 300.0)
        wall = (time.perf_counter() - started) * 1000
    finally:
        machine.process.kill()
        _, status, usage = await asyncio.to_thread(os.wait4, machine.pid, 0)
        machine.process.returncode = os.waitstatus_to_exitcode(status)
        for channel in channels:
            channel.close("done")
            await channel.ended
        machine.close()
        memory.close()
    return wall, (usage.ru_utime + usage.ru_stime) * 1000


async def start(book: Book, made: Template) -> tuple[float, Clone]:
    """Wall ms to a clone's first answer."""
    started = time.perf_counter()
    clone = Clone(book, made)
    await clone.start()
    return (time.perf_counter() - started) * 1000, clone


async def end(*clones: Clone) -> None:
    """Kill, and wait until they are gone."""
    for clone in clones:
        clone.kill()
    await asyncio.gather(*(clone.gone for clone in clones))


async def boots_and_clones(made: Template, boots: int, clones: int, prefix: str) -> Figures:
    """Boots and clones alternately; and the number of clones that draw equal random bytes."""
    book = Book()
    boot_walls: list[float] = []
    boot_cpus: list[float] = []
    walls: list[float] = []
    cpus: list[float] = []
    draws: list[str] = []
    with tempfile.TemporaryDirectory(dir=made.folder.parent, prefix="making-bench-") as name:
        folder = Path(name)
        with (folder / "initrd").open("wb") as out:
            with (packages.folder(made.folder.parent) / f"{made.manifest.name}.cpio").open("rb") as root:
                shutil.copyfileobj(root, out)
            out.write(template.agent_archive())
        for _ in range(boots):
            wall, cpu = await boot(made, folder)
            boot_walls.append(wall)
            boot_cpus.append(cpu)
            for _ in range(clones // boots):
                wall, clone = await start(book, made)
                draws.append((await clone.ask({"op": "clock"}))["urandom"])
                await end(clone)
                walls.append(wall)
                cpus.append(book.cpu_ms[clone.pid])
    return {
        f"{prefix}boot_wall_p50_ms": median(boot_walls),
        f"{prefix}boot_wall_p99_ms": centile(boot_walls, 0.99),
        f"{prefix}boot_cpu_p50_ms": median(boot_cpus),
        f"{prefix}clone_wall_p50_ms": median(walls),
        f"{prefix}clone_wall_p99_ms": centile(walls, 0.99),
        f"{prefix}clone_cpu_p50_ms": median(cpus),
        f"{prefix}boot_over_clone_wall_ratio": median([median(boot_walls) / median(walls)]),
        f"{prefix}boot_over_clone_cpu_ratio": median([median(boot_cpus) / median(cpus)]),
        f"{prefix}clones_measured": len(walls),
        f"{prefix}entropy_collisions": len(draws) - len(set(draws)),
        f"{prefix}clock_rate_error": round(abs(await verify(made) - 1), 6),
    }


async def at_once(made: Template, clones: int, prefix: str) -> Figures:
    """Clones per second at one, two and four at a time."""
    book = Book()
    burst_figures: Figures = {}
    for width in (1, 2, 4):
        started = time.perf_counter()
        for _ in range(max(1, clones // width)):
            await end(*(clone for _, clone in await asyncio.gather(*(start(book, made) for _ in range(width)))))
        done = max(1, clones // width) * width
        burst_figures[f"{prefix}clones_per_s_{width}_at_once"] = round(done / (time.perf_counter() - started), 2)
    return burst_figures


async def timed(sandbox: VmSandbox, op: Exec | RunTests | ReadFile | WriteFiles | PullTar) -> tuple[float, OpResult]:
    """Wall ms of a call."""
    started = time.perf_counter()
    result = await sandbox.call(op)
    return (time.perf_counter() - started) * 1000, result


async def in_use(environment: Environment, name: str, calls: int, has_pytest: bool) -> Figures:
    """Round trips, push and pull, tools on a fresh and on a used clone, memory after tests, fork."""
    host = await Host.open(msgspec.structs.replace(environment, warm=0, max_vms=8, judge_share=0))
    guest_figures: Figures = {}
    try:
        sandbox = await host.acquire(request(name, 0))
        await sandbox.call(WriteFiles(files=TESTS | {"small": b"x"}))
        trips = [(await timed(sandbox, ReadFile(path="small")))[0] for _ in range(calls)][calls // 10 :]
        guest_figures |= {"round_trip_p50_ms": median(trips), "round_trip_p99_ms": centile(trips, 0.99)}
        blob = os.urandom(8 << 20)
        for way, op in (("push", WriteFiles(files={"blob": blob})), ("pull", ReadFile(path="blob", limit=16 << 20))):
            best = min([(await timed(sandbox, op))[0] for _ in range(3)])
            guest_figures[f"{way}_mib_per_s"] = round(8000 / best, 1)
        host.release(sandbox.id)

        tested = await host.acquire(request(name, 1))
        await tested.call(WriteFiles(files=TESTS))
        plan = RunTests(plan=TestPlan(kind="pytest", paths=("tests",), timeout_s=120.0))
        for age in ("fresh", "used") if has_pytest else ():
            wall, result = await timed(tested, plan)
            assert result.ok, result
            guest_figures[f"tool_pytest_worker_{age}_ms"] = round(wall, 1)
            if age == "fresh":
                machine = host.machine(tested.id)
                assert isinstance(machine, Clone)
                guest_figures["private_after_pytest_mib"] = round(machine.private_mb(), 1)
        host.release(tested.id)

        tools = await host.acquire(request(name, 2))
        await tools.call(WriteFiles(files=TESTS))
        for age in ("fresh", "used"):
            for tool, script in TOOLS.items():
                wall, result = await timed(tools, Exec(argv=("sh", "-c", script), timeout_s=120.0))
                guest_figures[f"tool_{tool}_{age}_ms"] = round(wall, 1) if result.ok else None
        machine = host.machine(tools.id)
        assert isinstance(machine, Clone)
        started = time.perf_counter()
        taken = await machine.freeze()
        guest_figures |= {
            "freeze_wall_ms": round((time.perf_counter() - started) * 1000, 1),
            "freeze_mib": round(taken.mib, 1),
        }
        started = time.perf_counter()
        forks = await host.fork(tools.id, [request(name, 10 + slot) for slot in range(2)])
        guest_figures["fork_two_wall_ms"] = round((time.perf_counter() - started) * 1000, 1)
        for fork in forks:
            host.release(fork.id)
    finally:
        await host.close()
    return guest_figures


async def measure(environment: Environment, small: bool, light_only: bool) -> Figures:
    """Run every measurement."""
    boots, clones, warm, calls = (2, 10, 4, 100) if small else (5, 100, 50, 2000)
    names = ("light",) if light_only else ("debian", "light")
    made = await asyncio.to_thread(image.ensure, environment, print, names)
    clone_figures: Figures = {}
    for name in names:
        prefix = "" if name == names[0] else f"{name}_"
        clone_figures |= await boots_and_clones(made[name], boots, clones, prefix)
        clone_figures |= await at_once(made[name], 4 if small else 20, prefix)
        for key, files in (("warm_acquire", None), ("warm_acquire_with_files", PUSHED)):
            taken: list[Measured] = []
            for _ in range(-(-warm // 10)):
                taken += await warmed(environment, name, min(warm, 10), files)
            clone_figures[f"{prefix}{key}_p50_ms"] = median([one.wall_ms for one in taken])
            clone_figures[f"{prefix}{key}_p99_ms"] = centile([one.wall_ms for one in taken], 0.99)
        clone_figures[f"{prefix}private_parked_mib"] = median([one.private_mib for one in taken])
        ratio = clone_figures[f"{prefix}boot_wall_p50_ms"] / clone_figures[f"{prefix}warm_acquire_p50_ms"]
        clone_figures[f"{prefix}boot_over_warm_acquire_wall_ratio"] = round(ratio, 1)
    manifest = made[names[0]].manifest
    facts: Figures = {"template": names[0], "accel": manifest.hardware.accel, "machine": manifest.hardware.machine}
    facts |= {"memory_mb": manifest.hardware.memory_mb, "qemu": manifest.qemu, "page_bytes": snapshot.PAGE}
    return (
        clone_figures
        | await in_use(environment, names[0], calls, manifest.has_pytest)
        | {f"vm_{name}": value for name, value in facts.items()}
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="benchmarks.vm_clone", description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="few repeats, as a test of the benchmark itself")
    parser.add_argument("--light", action="store_true", help="the light template alone")
    args = arguments(parser, small=True, light=True)
    environment = Environment()
    try:
        clone_figures = uvloop.run(measure(environment, args.small, args.light))
    except (VmhostError, SandboxLost) as error:
        cannot_run(str(error))
    collisions = clone_figures["entropy_collisions"] + clone_figures.get("light_entropy_collisions", 0)
    targets = {
        "boot_over_clone_wall_ratio": at_least(clone_figures["boot_over_clone_wall_ratio"], 25.0),
        "boot_over_clone_cpu_ratio": at_least(clone_figures["boot_over_clone_cpu_ratio"], 40.0),
        "clone_cpu_p50_ms": at_most(clone_figures["clone_cpu_p50_ms"], 70.0),
        "warm_acquire_p50_ms": at_most(clone_figures["warm_acquire_p50_ms"], 6.0),
        "private_parked_mib": at_most(clone_figures["private_parked_mib"], 28.0),
        "private_after_pytest_mib": at_most(clone_figures.get("private_after_pytest_mib"), 75.0),
        "round_trip_p50_ms": at_most(clone_figures["round_trip_p50_ms"], 1.0),
        "clock_rate_error": at_most(clone_figures["clock_rate_error"], 1e-3),
        "entropy_collisions": at_most(collisions, 0),
    }
    finish(clone_figures, targets, "headrace")


if __name__ == "__main__":
    main()
