"""The `qemu` backend: copy-on-write clones, made on demand or kept ready, as many as memory holds."""

import asyncio
import fcntl
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from headrace.config import Environment
from headrace.messages.sandbox import SandboxLost
from headrace.vmhost import image
from headrace.vmhost.clone import Clone
from headrace.vmhost.machine import OnEvent
from headrace.vmhost.memory import Memory
from headrace.vmhost.snapshot import Snapshot
from headrace.vmhost.template import Template

WARM = "light"
"""The template of which clones are always kept ready."""
OVERHEAD_MB = 96
"""What a QEMU takes beside its guest's memory: translated code, tables, heap."""
RESERVE_MB = 256
"""Memory that stays free for everything else on the node."""


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
        self._warm = dict.fromkeys((WARM, *environment.also_warm), environment.warm)
        self._filling: asyncio.Task[None] | None = None
        self._closed = False

    @classmethod
    async def open(cls, environment: Environment, on_event: OnEvent) -> "CloneBackend":
        """Templates ready. VmhostError."""
        backend = cls(environment, {}, on_event)
        for name in backend._warm:
            await backend.template(name)
        backend._fill()
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
        """A fresh clone that has answered, parked ahead or made now. SandboxLost, VmhostError."""
        made = await self.template(template)
        try:
            while (clone := self._waiting(template)) is not None:
                self._parked.remove(clone)
                clone.used = True
                with suppress(SandboxLost):
                    await clone.resume()
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
        clone = Clone(self, template, begin)
        clone.used = True
        self._alive.add(clone)
        await clone.start()
        return clone

    def slots_of(self, template: str) -> int:
        """Slots of a machine of that template: an imported image has its machine for itself."""
        known = self._templates.get(template)
        return known.manifest.slots if known else image.plan(self._environment, template).slots

    def _fill(self) -> None:
        """Have the next clone ready before it is asked for, if there is room."""
        if not self._closed and (self._filling is None or self._filling.done()):
            self._filling = asyncio.get_running_loop().create_task(self._park())

    def _waiting(self, template: str) -> Clone | None:
        """A parked clone of that template."""
        return next((clone for clone in reversed(self._parked) if clone.template is self._templates[template]), None)

    def _missing(self) -> str:
        """A template of which fewer clones wait than should; empty when none is missing or none more fits."""
        if self._closed or len(self._alive) >= self._environment.max_vms:
            return ""
        for name, count in self._warm.items():
            waiting = sum(clone.template is self._templates[name] for clone in self._parked)
            if waiting < count and self._fits(name):
                return name
        return ""

    async def _park(self) -> None:
        while name := self._missing():
            clone = Clone(self, self._templates[name])
            self._alive.add(clone)
            try:
                await clone.start()
                await clone.park()
            except SandboxLost as lost:
                self._event("warm_clone_lost", str(lost), {})
                return
            self._parked.append(clone)

    async def filled(self) -> None:
        """Wait until as many clones are parked as there is room for."""
        self._fill()
        assert self._filling is not None
        await asyncio.shield(self._filling)

    def alive(self) -> list[Clone]:
        """All clones whose process is there."""
        return list(self._alive)

    def room(self, template: str, alive: int) -> bool:
        """Whether a parked clone waits, or memory has room for another. Parked ones make way for another template."""
        if template in self._templates and self._waiting(template) is not None:
            return True
        if self._fits(template):
            return True
        for clone in self._parked:
            clone.kill()
        self._parked.clear()
        return False

    def _fits(self, template: str) -> bool:
        """Whether this one, and all that are alive at their largest, still fit into the memory that is free."""
        known = self._templates.get(template)
        # What nobody uses yet comes into memory itself, beside its first clone.
        size = known.manifest.hardware.memory_mb if known else 2 * image.plan(self._environment, template).memory_mb
        growth = sum(
            max(0.0, clone.template.manifest.hardware.memory_mb + OVERHEAD_MB - clone.private_mb())
            for clone in self._alive
        )
        return free_mb() - growth >= size + OVERHEAD_MB + RESERVE_MB

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
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.wait([self._filling])
        for clone in list(self._alive):
            clone.kill()
        await self.settle()
        for held in self._held:
            held.close()


def free_mb() -> float:
    """Memory that could be used now: what the kernel says, and what our cgroup leaves."""
    free = 0.0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) / 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            used = int(Path("/sys/fs/cgroup/memory.current").read_text())
            stats = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
            reclaimable = int(stats.get("inactive_file", 0)) + int(stats.get("active_file", 0))
            free = min(free, (int(limit) - used + reclaimable) / 2**20)
    except (OSError, ValueError):
        pass
    return free
