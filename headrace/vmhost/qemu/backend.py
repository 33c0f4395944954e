"""The `qemu` backend: copy-on-write clones, made on demand or kept ready, as many as memory holds."""

import asyncio
import fcntl
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from headrace.config import Environment
from headrace.messages.sandbox import SandboxLost
from headrace.vmhost import image, room
from headrace.vmhost.clone import Clone
from headrace.vmhost.demand import MEMORY_S, Demand
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.machine import OnEvent
from headrace.vmhost.memory import Memory
from headrace.vmhost.room import OVERHEAD_MB
from headrace.vmhost.snapshot import Snapshot
from headrace.vmhost.template import Template

WARM = "light"
"""The template of which clones are always kept ready, beside those that the configuration names."""
FILL_AFTER_S, FILL_BY_S = 0.05, 0.5
"""Whoever takes clones has the processors for itself: the next ones are made when nobody has taken any for a moment, or
a longer one after the first."""


class CloneBackend:
    """Clones behind the Backend protocol."""

    name = "qemu"

    def __init__(self, environment: Environment, templates: dict[str, Template], on_event: OnEvent) -> None:
        self.slots = environment.slots_per_vm
        self._environment = environment
        self._templates = templates
        self._event = on_event
        self._alive: set[Clone] = set()
        self._spent_ms = 0.0
        self._making = asyncio.Lock()
        self._held: list[TextIO] = []
        self._memories: dict[str, Memory] = {}
        self._parked: list[Clone] = []
        self._promised = 0
        least = dict.fromkeys((WARM, *environment.also_warm), environment.warm)
        self._demand = Demand(least, environment.warm_most if environment.warm else 0)
        self._filling: asyncio.Task[None] | None = None
        self._later: asyncio.TimerHandle | None = None
        self._fill_by = 0.0
        self._processors = room.Processors(environment.max_busy)
        self._looking = asyncio.get_running_loop().create_task(self._look())
        self._closed = False

    @classmethod
    async def open(cls, environment: Environment, on_event: OnEvent) -> "CloneBackend":
        """Templates ready. VmhostError."""
        backend = cls(environment, {}, on_event)
        try:
            for name in (WARM, *environment.also_warm):
                await backend.template(name)
        except VmhostError:
            await backend.close()
            raise
        backend._fill(0.0)
        return backend

    async def template(self, name: str) -> Template:
        """A template by name, made where it is missing or was touched. VmhostError."""
        async with self._making:
            known = self._templates.get(name)
            if known is not None and not known.intact:
                self._event(
                    "vm_template", f"template {name}: its files were touched behind our back: looked at again", {}
                )
                for clone in [clone for clone in self._parked if clone.template is known]:
                    clone.kill()
                    self._parked.remove(clone)
                known = None
            if known is None:
                loop = asyncio.get_running_loop()

                def say(text: str) -> None:
                    loop.call_soon_threadsafe(self._event, "vm_template", text, {})

                self._templates |= await asyncio.to_thread(image.ensure, self._environment, say, (name,))
                # Read it here once, and not in the middle of a clone's start.
                self._memories[name] = await asyncio.to_thread(lambda: self._templates[name].memory)
                held = (self._templates[name].folder / "manifest.json").open()
                fcntl.flock(held, fcntl.LOCK_SH)  # so that no other process throws it away as an old one
                self._held.append(held)
            return self._templates[name]

    async def machine(self, template: str) -> Clone:
        """A clone that answers or is about to (`Clone.ready`), parked ahead or made now. SandboxLost, VmhostError."""
        try:
            made = await self.template(template)
        finally:
            self._promised = max(0, self._promised - 1)
        self._demand.took(template)
        try:
            while (clone := self._waiting(template)) is not None:
                self._parked.remove(clone)
                clone.used = True
                with suppress(SandboxLost):
                    clone.resume()
                    return clone
            clone = Clone(self, made)
            clone.used = True
            self._alive.add(clone)
            await clone.start()
            return clone
        finally:
            self._fill()

    async def again(self, template: Template, begin: Snapshot) -> Clone:
        """A clone that begins at a snapshot of another clone of that template. SandboxLost."""
        self._promised = max(0, self._promised - 1)
        clone = Clone(self, template, begin)
        clone.used = True
        self._alive.add(clone)
        await clone.start()
        return clone

    def slots_of(self, template: str) -> int:
        """Slots of a machine of that template: an imported image has its machine for itself."""
        known = self._templates.get(template)
        return known.manifest.slots if known else image.plan(self._environment, template).slots

    def _fill(self, after: float = FILL_AFTER_S) -> None:
        """Soon, have as many clones ready as will be asked for, if there is room; and let go of what nobody will."""
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

    def _waiting(self, template: str) -> Clone | None:
        """A parked clone of that template."""
        return next((clone for clone in reversed(self._parked) if clone.template is self._templates[template]), None)

    def _surplus(self, name: str) -> list[Clone]:
        """Parked clones of a template beyond what should wait, the oldest first."""
        waiting = [clone for clone in self._parked if clone.template is self._templates.get(name)]
        return waiting[: max(0, len(waiting) - self._demand.wanted(name))]

    def _missing(self) -> str:
        """A template of which fewer clones wait than should; empty when none is missing or none more fits."""
        if self._closed or len(self._alive) >= self._environment.max_vms:
            return ""
        for name in self._demand.templates():
            waiting = sum(clone.template is self._templates[name] for clone in self._parked)
            if waiting < self._demand.wanted(name) and not self._memory_short(name):
                return name
        return ""

    async def _park(self) -> None:
        for name in self._templates:
            for clone in self._surplus(name):
                self._parked.remove(clone)
                clone.kill()
        while name := self._missing():
            clone = Clone(self, self._templates[name])
            self._alive.add(clone)
            try:
                await clone.start()
                await clone.park()
            except SandboxLost as lost:
                clone.kill()
                self._event("warm_clone_lost", str(lost), {})
                return
            self._parked.append(clone)

    async def filled(self) -> None:
        """Wait until as many clones are parked as there is room for."""
        if self._filling is None or self._filling.done():
            self._fill_now()
        assert self._filling is not None
        await asyncio.shield(self._filling)

    async def _look(self) -> None:
        """Every second: how busy machines keep the node; now and then: whether clones wait for a burst long past."""
        loop = asyncio.get_running_loop()
        filled = loop.time()
        while True:
            await asyncio.sleep(room.LOOK_S)
            self._processors.look(loop.time(), self.cpu_ms())
            if loop.time() - filled > MEMORY_S:
                filled = loop.time()
                self._fill()

    def alive(self) -> list[Clone]:
        """All clones whose process is there."""
        return list(self._alive)

    def busy(self) -> str:
        """Whether machines use more of the processors than they should."""
        return self._processors.short()

    def short_of(self, template: str) -> str:
        """Why there can't be another machine now; empty when a parked clone waits, or memory and disk have room for
        one. Parked ones make way for another template. Room that was found is promised: it counts as taken until
        `machine` or `again` takes it."""
        short = self._short_of(template)
        if not short:
            self._promised += 1
        return short

    def _short_of(self, template: str) -> str:
        if sum(clone.template is self._templates.get(template) for clone in self._parked) > self._promised:
            return ""
        if template not in self._templates:
            size = image.plan(self._environment, template).memory_mb
            if short := room.disk_short(Path(self._environment.cache_dir).absolute(), size):
                return short
        short = self._memory_short(template)
        if short:
            for clone in self._parked:
                clone.kill()
            self._parked.clear()
        return short

    def _memory_short(self, template: str) -> str:
        """Why this one, and all that are alive at their largest, do not fit into the memory that is free."""
        known = self._templates.get(template)
        # What nobody uses yet comes into memory itself, beside its first clone.
        size = known.manifest.hardware.memory_mb if known else 2 * image.plan(self._environment, template).memory_mb
        growth = sum(
            max(0.0, clone.template.manifest.hardware.memory_mb + OVERHEAD_MB - clone.private_mb())
            for clone in self._alive
        )
        return room.memory_short(size, growth + self._promised * (size + OVERHEAD_MB))

    def ended(self, clone: Clone, cpu_ms: float) -> None:
        """Book a clone's end. One that was in use makes room for one that waits ready; one that died waiting does not
        call for the next, which might die as well."""
        self._alive.discard(clone)
        self._spent_ms += cpu_ms
        if clone in self._parked:
            self._parked.remove(clone)
        if clone.used:
            self._fill()

    def facts(self) -> dict[str, Any]:
        """What serves here."""
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
        """CPU time of all clones, dead and alive."""
        return self._spent_ms + sum(clone.cpu_ms() for clone in self._alive)

    async def settle(self) -> None:
        """Wait for the processes of ended clones."""
        ended = [clone.gone for clone in self._alive if clone.lost.done()]
        if ended:
            await asyncio.wait(ended)

    async def close(self) -> None:
        """End every clone and wait until no process is left."""
        self._closed = True
        self._looking.cancel()
        await asyncio.wait([self._looking])
        if self._later is not None:
            self._later.cancel()
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.wait([self._filling])
        for clone in list(self._alive):
            clone.kill()
        await self.settle()
        for held in self._held:
            held.close()
