"""The `qemu` backend: copy-on-write clones, made on demand or parked ahead of need, as many as memory holds."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from headrace.backoff import Backoff
from headrace.config import Environment
from headrace.harnesses.bundles import Bundle
from headrace.messages.sandbox import SandboxLost
from headrace.messages.tasks import SandboxLimits
from headrace.vmhost.backend import Capabilities, Machine, MakeMachine, OnEvent, Requirement
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.images import base, mounting
from headrace.vmhost.node import capacity
from headrace.vmhost.node.capacity import OVERHEAD_MB
from headrace.vmhost.node.doctor import doctor
from headrace.vmhost.qemu import held
from headrace.vmhost.qemu.beginnings import Beginnings
from headrace.vmhost.qemu.clone import Clone
from headrace.vmhost.qemu.drives import Disk, disk_short
from headrace.vmhost.qemu.held import HeldTemplates
from headrace.vmhost.qemu.process import no_kvm
from headrace.vmhost.qemu.snapshot import MachineSnapshot
from headrace.vmhost.templates import classes
from headrace.vmhost.templates.template import Template

WARM = "light"
"""The template of which clones are always kept ready, beside those that the configuration names."""
FILL_AFTER_S, FILL_BY_S = 0.05, 0.5
"""Prewarming waits until acquires pause for the first time, at most the second, so that it does not compete with them
for the processor."""
CALM_S = 60.0
"""Time after which parking is tried again, with the first delay."""
REPLACE_FIRST_S, REPLACE_MOST_S = 0.5, 30.0
"""Delay before a clone that died while it was parked is replaced. It grows while replacements die as well."""


class CloneBackend:
    """Clones behind the Backend protocol."""

    name = "qemu"
    capabilities: ClassVar[Capabilities] = Capabilities(
        harness=True,
        isolated=True,
        fork=True,
        inspect=True,
        hostname=True,
        network_list=True,
        upper_diff=True,
        bounded=True,
        limit_vcpus=True,
        limit_memory=True,
        limit_disk=True,
        kernel_private=True,
    )

    @classmethod
    def requirements(cls, environment: Environment) -> Iterator[Requirement]:
        """QEMU, its accelerator, memory, disk and rights, as `headrace check` prints them."""
        if environment.accel == "kvm" and (reason := no_kvm()):
            text = f"{reason}; set environment.accel to auto or tcg, or give this user /dev/kvm"
            yield Requirement("accel", False, text)
        yield from (Requirement("", finding.good, finding.text) for finding in doctor(environment))

    def __init__(self, environment: Environment, templates: dict[str, Template], on_event: OnEvent) -> None:
        self.slots = environment.slots_per_vm
        self._environment = environment
        self._cache = Path(environment.cache_dir).absolute()
        self._templates = templates
        self._event = on_event
        self._alive: set[Clone] = set()
        self._beginnings = Beginnings(on_event)
        self._spent_ms = 0.0
        self._making: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._held = HeldTemplates(environment.template_memory_mb)
        self._parked: list[Clone] = []
        self._reserved = 0
        self._kept_warm = (WARM, *environment.also_warm)
        self._filling: asyncio.Task[None] | None = None
        self._later: asyncio.TimerHandle | None = None
        self._replacing: asyncio.TimerHandle | None = None
        self._replace = Backoff(REPLACE_FIRST_S, REPLACE_MOST_S)
        self._fill_by = 0.0
        self._processors = capacity.Processors(environment.max_busy)
        self._measuring: asyncio.Task[None] | None = None
        self._closed = False

    @classmethod
    async def open(cls, environment: Environment, on_event: OnEvent) -> "CloneBackend":
        """A backend whose warm templates are ready. VmhostError."""
        backend = cls(environment, {}, on_event)
        try:
            for name in (WARM, *environment.also_warm):
                await backend.template(name)
        except VmhostError:
            await backend.close()
            raise
        # Not before: prewarming needs the templates, and another process may take minutes to build them.
        backend._measuring = asyncio.get_running_loop().create_task(backend._measure())
        backend._fill(0.0)
        return backend

    async def template(self, name: str) -> Template:
        """A template by name, built where it is missing or its files were changed. VmhostError."""
        async with self._making.setdefault(name, asyncio.Lock()):
            template = self._templates.get(name)
            if template is not None and not template.intact:
                self._event("vm_template", f"the files of template {name} were changed; it is checked again", {})
                for clone in [clone for clone in self._parked if clone.template is template]:
                    clone.kill()
                    self._parked.remove(clone)
                template = None
            if template is None:
                loop = asyncio.get_running_loop()

                def say(text: str) -> None:
                    loop.call_soon_threadsafe(self._event, "vm_template", text, {})

                template = (await asyncio.to_thread(base.ensure, self._environment, say, (name,)))[name]
                # Read the template's memory now, not while a clone starts.
                self._held.keep(template, await asyncio.to_thread(held.read, template))
                self._templates[name] = template
            self._held.use(template)
            self._drop_templates(template)
            return template

    def _drop_templates(self, *needed: Template) -> None:
        """Drop the memory of templates that no clone uses, if all exceed the budget. Those that are always kept warm
        stay. A later request reads a dropped one from the cache again."""
        warm = [self._templates[name] for name in self._kept_warm if name in self._templates]
        in_use = {template.folder for template in (*needed, *warm, *(clone.template for clone in self._alive))}
        for dropped in self._held.drop(in_use):
            names = [name for name, template in self._templates.items() if template.folder == dropped.folder]
            for name in names:
                del self._templates[name]
            text = f"dropped from memory, which is beyond template_memory_mb = {self._held.budget_mb}"
            figures = {"freed_mb": round(dropped.mb), "left_mb": round(self._held.mb)}
            self._event("template_dropped", f"template {', '.join(names)}: {text}", figures)

    async def machine(self, template: str, limits: SandboxLimits) -> Clone:
        """A parked clone, or a new one, which answers once it is `ready`. SandboxLost, VmhostError."""
        template = classes.named(template, limits)
        try:
            made = await self.template(template)
            disk = await asyncio.to_thread(Disk, self._cache, made.disk_mib) if made.disk_mib else None
        finally:
            self._reserved = max(0, self._reserved - 1)
        try:
            while (clone := self._waiting(template)) is not None:
                self._parked.remove(clone)
                clone.used = True
                with suppress(SandboxLost):
                    clone.resume()
                    return clone
            clone = Clone(self, made, self._beginnings.find(made), disk)
            clone.used = True
            self._alive.add(clone)
            await clone.start()
            await self._beginnings.learn(clone)
            return clone
        finally:
            self._fill()

    async def fork(self, machine: Machine) -> MakeMachine:
        """Copies of a clone; see `Backend.fork`."""
        clone = _clone(machine)
        return partial(self._copy, clone.template, await clone.freeze())

    async def _copy(self, template: Template, begin: MachineSnapshot) -> Clone:
        """A clone that begins at a snapshot of another clone of the template. SandboxLost."""
        self._reserved = max(0, self._reserved - 1)
        if template not in self._held:  # dropped since the snapshot was taken
            self._held.keep(template, await asyncio.to_thread(held.read, template))
        clone = Clone(self, template, begin)
        clone.used = True
        self._alive.add(clone)
        await clone.start()
        return clone

    def slots_of(self, template: str) -> int:
        """Slots of a machine of that template: an imported image has its machine for itself."""
        ready = self._templates.get(template)
        return ready.manifest.slots if ready else base.plan(self._environment, template).slots

    def _fill(self, after: float = FILL_AFTER_S) -> None:
        """Schedule prewarming: park clones until `warm` of each kept template wait."""
        if self._closed or (self._filling is not None and not self._filling.done()):
            return
        loop = asyncio.get_running_loop()
        if self._later is None:
            self._fill_by = loop.time() + FILL_BY_S
        else:
            self._later.cancel()
        self._later = loop.call_at(min(loop.time() + after, self._fill_by), self._fill_now)

    def _fill_now(self) -> None:
        if self._later is not None:
            self._later.cancel()
        self._later = None
        self._filling = asyncio.get_running_loop().create_task(self._park())

    def _fill_again(self) -> None:
        """Schedule prewarming after a clone died while it was parked or being parked."""
        if self._closed or self._replacing is not None:
            return

        self._replacing = asyncio.get_running_loop().call_later(self._replace.next(), self._refill)

    def _refill(self) -> None:
        self._replacing = None
        self._fill(0.0)

    def _waiting(self, template: str) -> Clone | None:
        """A parked clone of that template."""
        return next((clone for clone in reversed(self._parked) if clone.template is self._templates[template]), None)

    def _missing(self) -> str:
        """A template of which fewer clones wait than should; empty when none is missing or no further one fits."""
        if self._closed or len(self._alive) >= self._environment.max_vms:
            return ""
        for name in self._kept_warm:
            if name not in self._templates:  # dropped since it was last asked for
                continue
            waiting = sum(clone.template is self._templates[name] for clone in self._parked)
            if waiting < self._environment.warm and not self._memory_shortage(name):
                return name
        return ""

    async def _park(self) -> None:
        while name := self._missing():
            clone = Clone(self, template := self._templates[name], self._beginnings.find(template))
            self._alive.add(clone)
            try:
                await clone.start()
                await clone.park()
            except SandboxLost as lost:
                clone.kill()
                self._event("warm_clone_lost", str(lost), {})
                self._fill_again()
                return
            self._parked.append(clone)

    async def filled(self) -> None:
        """Wait until as many clones are parked as `warm` and memory allow."""
        if self._filling is None or self._filling.done():
            self._fill_now()
        assert self._filling is not None
        await asyncio.shield(self._filling)

    async def _measure(self) -> None:
        """Every `SAMPLE_S` sample the processor time of all machines; every `CALM_S` forget failed replacements, and
        park again what a shortage of memory ended."""
        loop = asyncio.get_running_loop()
        filled = loop.time()
        while True:
            await asyncio.sleep(capacity.SAMPLE_S)
            self._processors.sample(loop.time(), self.cpu_ms())
            if loop.time() - filled > CALM_S:
                filled = loop.time()
                self._replace.reset()
                self._fill()

    def alive(self) -> list[Clone]:
        """All clones whose process exists."""
        return [*self._alive]

    def busy(self) -> str:
        """Why no machine that can wait should start: the machines use too much of the processors."""
        return self._processors.short()

    def with_harness(self, template: str, bundle: Bundle) -> tuple[str, str]:
        """As a read-only drive whose files lie below the image."""
        return mounting.mounted(Path(self._environment.cache_dir).absolute(), template, bundle)

    def shortage(self, template: str, limits: SandboxLimits) -> str:
        """Why there cannot be another machine now; empty when a parked clone waits, or memory and disk suffice."""
        template = classes.named(template, limits)
        if sum(clone.template is self._templates.get(template) for clone in self._parked) > self._reserved:
            return ""
        wanted: Template | base.TemplatePlan | None = self._templates.get(template)
        short = ""
        if wanted is None:
            wanted = base.plan(self._environment, template)
            short = capacity.disk_short(self._cache, wanted.memory_mb)
        disks = [clone.disk for clone in self._alive]
        short = short or disk_short(self._cache, wanted.disk_mib, disks, self._reserved)
        return short or self._memory_shortage(template)

    def reserve(self, template: str, limits: SandboxLimits) -> None:
        """Count one machine as present until `machine` or a copy starts it."""
        self._reserved += 1

    def free_idle(self, template: str, limits: SandboxLimits) -> None:
        """End the parked clones if the template lacks memory."""
        if self._memory_shortage(classes.named(template, limits)):
            for clone in self._parked:
                clone.kill()
            self._parked.clear()

    def _memory_shortage(self, template: str) -> str:
        """Why this machine, and all that are alive at their full size, do not fit into the memory that is free."""
        ready = self._templates.get(template)
        # The first clone of a template in a process also brings the template's memory file into memory.
        size = ready.manifest.hardware.memory_mb if ready else 2 * base.plan(self._environment, template).memory_mb
        growth = sum(clone.growth_mb() for clone in self._alive)
        return capacity.memory_short(size, growth + self._reserved * (size + OVERHEAD_MB))

    def ended(self, clone: Clone, cpu_ms: float) -> None:
        """Record a clone's end. A used one makes capacity for a parked one; one that died while it was parked is
        replaced after a delay, because the next one may die as well."""
        self._alive.discard(clone)
        self._spent_ms += cpu_ms
        if clone in self._parked:
            self._parked.remove(clone)
            self._fill_again()
        if clone.used:
            self._fill()
        if not self._closed:
            self._drop_templates()

    def facts(self) -> dict[str, Any]:
        """Description for reports."""
        manifest = next(iter(self._templates.values())).manifest
        return {
            "backend": self.name,
            "isolated": True,
            "accel": manifest.hardware.accel,
            "machine": manifest.hardware.machine,
            "memory_mb": manifest.hardware.memory_mb,
            "qemu": manifest.qemu,
            "kernel": manifest.kernel,
            "template": manifest.key,
        }

    def cpu_ms(self) -> float:
        """CPU time of all clones, ended ones included."""
        return self._spent_ms + sum(clone.cpu_ms() for clone in self._alive)

    async def settle(self) -> None:
        """Wait for the processes of ended clones."""
        ended = [clone.gone for clone in self._alive if clone.lost.done()]
        if ended:
            await asyncio.wait(ended)

    async def close(self) -> None:
        """End every clone and wait until no process is left."""
        self._closed = True
        if self._measuring is not None:
            self._measuring.cancel()
            await asyncio.wait([self._measuring])
        for timer in (self._later, self._replacing):
            if timer is not None:
                timer.cancel()
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.wait([self._filling])
        for clone in list(self._alive):
            clone.kill()
        await self.settle()
        self._held.close()


def _clone(machine: Machine) -> Clone:
    """This backend makes clones alone."""
    if not isinstance(machine, Clone):
        raise VmhostError(f"expected a machine of the qemu backend, got {type(machine).__name__}")
    return machine
