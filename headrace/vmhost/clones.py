"""The `qemu` backend: copy-on-write clones of a template, one QEMU process each.

A clone is a QEMU with the template's devices that maps the template's memory privately and loads its device state from
an inherited descriptor. All monitor commands and the guest's first frame (clock and entropy) are written before QEMU
has even started; then there is one thing to wait for, the guest's answer.
"""

import asyncio
import fcntl
import os
import secrets
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from headrace.config import Environment
from headrace.messages.sandbox import SandboxLost
from headrace.vmhost import image
from headrace.vmhost.channel import Channel
from headrace.vmhost.machine import OnEvent
from headrace.vmhost.qemu import Monitor, Qemu
from headrace.vmhost.template import SIZE_MB, Template

START_S = 60.0
"""Deadline of a clone's first answer; 0.15 s on a quiet machine."""
WARM = "light"
"""The template of which clones are kept ready."""
QUIET_S = 5.0
"""Seconds after which a slot that was left is made quiet, if its machine still lives."""
OVERHEAD_MB = 96
"""What a QEMU takes beside its guest's memory: translated code, tables, heap."""
RESERVE_MB = 256
"""Memory that stays free for everything else on the node."""


class Clone:
    """One running machine."""

    def __init__(self, backend: "CloneBackend", template: Template) -> None:
        self.slots = template.manifest.slots
        self.limit_bytes = SIZE_MB[template.manifest.name] << 20
        self.template = template
        self._backend = backend
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.used = False
        self._reason = ""
        self._channels: list[Channel] = []
        self._leaving: set[asyncio.Task[None]] = set()
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        state = os.open(template.state, os.O_RDONLY)
        try:
            self._qemu = Qemu(
                template.manifest.hardware,
                template.ram,
                share=False,
                extra=("-incoming", "defer"),
                inherit=(state,),
            )
        finally:
            os.close(state)
        self._state_fd = state
        self.pid = self._qemu.pid
        self._control: Channel | None = None
        self._monitor: Monitor | None = None
        self._watch = os.pidfd_open(self.pid)
        asyncio.get_running_loop().add_reader(self._watch, self._exited)

    @property
    def lost(self) -> "asyncio.Future[str]":
        """Done, with the reason, once the machine is gone."""
        return self._lost

    async def park(self) -> None:
        """Stop a started machine: it takes no CPU time until `resume`."""
        assert self._monitor is not None
        await self._monitor.send("stop")

    async def resume(self) -> None:
        """Let a parked machine go on, with the time and entropy of now. SandboxLost."""
        if self._lost.done():
            raise SandboxLost(self._lost.result())
        assert self._monitor is not None
        self._monitor.send("cont")
        await self._identify()

    async def _identify(self) -> None:
        assert self._control is not None
        header = {"op": "start", "time": time.time_ns()}
        answer, _ = await self._control.call(header, [secrets.token_bytes(32)], START_S)
        if not answer.get("ok", True):
            raise SandboxLost(f"vm {self.pid}: the guest could not set its clock: {answer.get('error')}")

    async def start(self) -> None:
        """Load, run, and set the clock. SandboxLost when the guest does not answer."""
        try:
            self._monitor = await Monitor.connect(self._qemu.monitor)
            self._monitor.broken.add_done_callback(lambda broken: self._end(broken.result()))
            on = [{"capability": "x-ignore-shared", "state": True}]
            self._monitor.send("migrate-set-capabilities", {"capabilities": on})
            self._monitor.send("migrate-incoming", {"uri": f"fd:{self._state_fd}"})
            self._control = await Channel.connect(self._qemu.ports[0], f"vm {self.pid}")
            await self._identify()
        except (SandboxLost, OSError) as error:
            self._end(str(error))
            raise SandboxLost(f"a clone did not start: {self._reason}") from None

    async def open(self, slot: int) -> Channel:
        """The slot's port; its keeper waits behind it."""
        if self._lost.done():
            raise SandboxLost(self._lost.result())
        channel = await Channel.connect(self._qemu.ports[slot + 1], f"vm {self.pid} slot {slot}")
        # Only a QEMU that is ending closes this socket, and the socket tells it first.
        channel.lost.add_done_callback(lambda lost: self._end("QEMU is gone") if channel.hung_up else None)
        self._channels.append(channel)
        return channel

    def leave(self, channel: Channel) -> None:
        """Nothing at first: a machine mostly ends soon after, and every word to a slot costs it CPU time. What still
        runs in a slot when the machine lives on for long is ended then; the slot's namespaces stay, for taking them
        down one by one costs more than killing the machine.
        """

        async def quiet() -> None:
            await asyncio.sleep(QUIET_S)
            with suppress(SandboxLost):
                await channel.call({"op": "end"})

        task = asyncio.get_running_loop().create_task(quiet())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def ask(self, header: dict[str, Any]) -> dict[str, Any]:
        """A question to the guest's root agent: facts, clock."""
        if self._control is None:
            raise SandboxLost("the machine has not started")
        return (await self._control.call(header))[0]

    def kill(self) -> None:
        """End it now."""
        self._end("it was ended")

    def cpu_ms(self) -> float:
        """CPU time of the process so far."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) * 1000.0 / os.sysconf("SC_CLK_TCK")

    def private_mb(self) -> float:
        """Anonymous memory of the process: what the clone takes beyond the template."""
        try:
            for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) / 1024
        except OSError:
            pass
        return 0.0

    def _end(self, reason: str) -> None:
        if self._reason:
            return
        self._reason = reason
        if self._qemu.process.returncode is None:
            # Popen.kill would reap a machine that has just died, and `_exited` find no child.
            signal.pidfd_send_signal(self._watch, signal.SIGKILL)
        if not self._lost.done():
            self._lost.set_result(reason)

    def _exited(self) -> None:
        """The process ended, by us or by itself."""
        asyncio.get_running_loop().remove_reader(self._watch)
        os.close(self._watch)
        _, status, usage = os.wait4(self.pid, 0)
        self._qemu.process.returncode = os.waitstatus_to_exitcode(status)
        code = self._qemu.process.returncode
        self._end(f"QEMU was ended by signal {-code}" if code < 0 else f"QEMU ended: {self._qemu.complaint()}")
        for task in self._leaving:
            task.cancel()
        for channel in (self._control, *self._channels):
            if channel is not None:
                channel.close(self._reason)
        if self._monitor is not None:
            self._monitor.close()
        self._qemu.close()
        self._backend.ended(self, (usage.ru_utime + usage.ru_stime) * 1000)
        self.gone.set_result(None)


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
        self._parked: list[Clone] = []
        self._filling: asyncio.Task[None] | None = None
        self._closed = False

    @classmethod
    async def open(cls, environment: Environment, on_event: OnEvent) -> "CloneBackend":
        """Templates ready. VmhostError."""
        backend = cls(environment, {}, on_event)
        await backend._template(WARM)
        backend._fill()
        return backend

    async def _template(self, name: str) -> Template:
        async with self._making:
            if name not in self._templates:
                loop = asyncio.get_running_loop()

                def say(text: str) -> None:
                    loop.call_soon_threadsafe(self._event, "vm_template", text, {})

                self._templates |= await asyncio.to_thread(image.ensure, self._environment, say, (name,))
                held = (self._templates[name].folder / "manifest.json").open()
                fcntl.flock(held, fcntl.LOCK_SH)  # so that no other process throws it away as an old one
                self._held.append(held)
            return self._templates[name]

    async def machine(self, template: str) -> Clone:
        """A fresh clone that has answered, parked ahead or made now. SandboxLost, VmhostError."""
        made = await self._template(template)
        try:
            while self._parked and template == WARM:
                clone = self._parked.pop()
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

    def _fill(self) -> None:
        """Have the next clone ready before it is asked for, if there is room."""
        if not self._closed and (self._filling is None or self._filling.done()):
            self._filling = asyncio.get_running_loop().create_task(self._park())

    async def _park(self) -> None:
        while len(self._parked) < self._environment.warm and not self._closed:
            if len(self._alive) >= self._environment.max_vms or not self._fits(WARM):
                return
            clone = Clone(self, self._templates[WARM])
            self._alive.add(clone)
            try:
                await clone.start()
                await clone.park()
            except SandboxLost as lost:
                self._event("warm_clone_lost", str(lost), {})
                return
            self._parked.append(clone)

    def room(self, template: str, alive: int) -> bool:
        """Whether a parked clone waits, or memory has room for another. Parked ones make way for another template."""
        if self._parked and template == WARM:
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
        size = known.manifest.hardware.memory_mb if known else image.DEBIAN_MB
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
