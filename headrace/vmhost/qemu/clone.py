"""One clone: a QEMU with the template's devices that maps the template's memory privately.

Its device state comes from an inherited descriptor. All monitor commands and the guest's first frame (clock and
entropy) are written before QEMU has even started; then there is one thing to wait for, the guest's answer. A clone that
begins at a snapshot of another one gets that one's pages first, which is the only wait more.
"""

import asyncio
import os
import secrets
import select
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from headrace.messages.sandbox import SandboxLost
from headrace.vmhost import groups, snapshot
from headrace.vmhost.channel import Channel
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.memory import Memory
from headrace.vmhost.qemu import Monitor, Qemu
from headrace.vmhost.room import OVERHEAD_MB
from headrace.vmhost.snapshot import Snapshot
from headrace.vmhost.template import Template

START_S = 60.0
"""Deadline of a clone's first answer; 0.15 s on a quiet machine."""
_STAGE = (".rehearsal/b/c", ".rehearsal/b", ".rehearsal")
QUIET_S = 5.0
"""Seconds after which a slot that was left is made quiet, if its machine still lives."""


class Owner(Protocol):
    """Who hears that a clone is gone, and what it took."""

    def ended(self, clone: "Clone", cpu_ms: float) -> None:
        """The process was reaped."""


class Clone:
    """One running machine."""

    def __init__(self, owner: Owner, template: Template, begin: Snapshot | None = None) -> None:
        self.slots = template.manifest.slots
        self.limit_bytes = template.push_mb << 20
        self.template = template
        self._owner = owner
        self._begin = begin
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.used = False
        self._reason = ""
        self._words = ""
        """How QEMU ended, and what it said on its way out."""
        self._low = 0
        self._odd = False
        self._channels: dict[int, Channel] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._memory = template.memory
        self._devices = Memory("headrace-devices", 0)
        state = os.open(template.state, os.O_RDONLY) if begin is None else _in_memory(begin.state)
        try:
            self._qemu = Qemu(
                template.manifest.hardware,
                self._memory,
                share=False,
                extra=("-incoming", "defer"),
                inherit=(state, self._devices.fd),
            )
        finally:
            os.close(state)
        self._state_fd = state
        self.pid = self._qemu.pid
        self._control: Channel | None = None
        self._monitor: Monitor | None = None
        self._resuming: asyncio.Task[None] | None = None
        self._group = groups.enclose(self.pid, template.manifest.hardware.memory_mb + OVERHEAD_MB)
        self._watch = os.pidfd_open(self.pid)
        asyncio.get_running_loop().add_reader(self._watch, self._exited)

    @property
    def lost(self) -> "asyncio.Future[str]":
        """Done, with the reason, once the machine is gone."""
        return self._lost

    async def park(self) -> None:
        """Rehearse an acquire and stop: it takes no CPU time until `resume`. SandboxLost.

        An emulator translates the guest's code when it first runs, and a clone begins with nothing translated. What
        was rehearsed is there when somebody waits for it: 4 ms instead of 14 for an acquire.
        """
        slot = await self.open(0)
        await self._identify(b"")
        # One that may not write there says so, and has rehearsed that.
        await slot.call({"op": "open", "seed": 0, "time": 0, "paths": [_STAGE[0]]}, [b"1"], START_S)
        await slot.call({"op": "write_files", "paths": [], "delete": _STAGE}, [], START_S)
        assert self._monitor is not None
        await self._monitor.send("stop")

    def resume(self) -> None:
        """Let a parked machine go on; it is `ready` with the time of now. SandboxLost."""
        if self._lost.done():
            raise SandboxLost(self._lost.result())
        assert self._monitor is not None
        self._monitor.send("cont")
        self._resuming = asyncio.get_running_loop().create_task(self._identify(b""))

    async def ready(self) -> None:
        """Wait for `resume`; at once where the machine was started. SandboxLost."""
        if self._resuming is not None:
            await asyncio.shield(self._resuming)

    async def freeze(self, whole: bool = False) -> Snapshot:
        """This moment of the machine, which stops for it and goes on: the pages that it wrote, or with `whole` all
        that are not empty. SandboxLost, VmhostError.
        """
        if self._lost.done() or self._monitor is None:
            raise SandboxLost(self._reason or "the machine has not started")
        await self._monitor.send("stop")
        try:
            await self._monitor.send("xen-save-devices-state", {"filename": self._devices.path})
            if self._lost.done():
                raise SandboxLost(self._reason)
            read = snapshot.all_pages if whole else snapshot.own_pages
            numbers, pages = await asyncio.to_thread(read, self.pid, self._memory.mapped)
            if self._lost.done():
                raise SandboxLost(self._reason)
            devices = os.pread(self._devices.fd, os.fstat(self._devices.fd).st_size, 0)
            state = snapshot.compose(self.template.state.read_bytes(), devices)
        finally:
            if not self._lost.done():
                self._monitor.send("cont")
        return Snapshot(state=state, numbers=numbers, pages=pages)

    async def _identify(self, entropy: bytes) -> None:
        assert self._control is not None
        answer = await self._control.start(time.time_ns(), entropy, START_S)
        if not answer.get("ok", True):
            self._end(f"the guest could not set its clock: {answer.get('error')}")
            raise SandboxLost(f"vm {self.pid}: {self._reason}")

    async def start(self) -> None:
        """Load, run, and set the clock. SandboxLost when the guest does not answer."""
        try:
            self._monitor = await Monitor.connect(self._qemu.monitor)
            self._monitor.broken.add_done_callback(lambda broken: self._end(broken.result()))
            if self._begin is not None:
                await self._monitor.send("query-status")  # once it answers, its memory is mapped
                if not self._lost.done():
                    await asyncio.to_thread(snapshot.put_pages, self.pid, self._memory.mapped, self._begin)
                    self._odd = bool(self._look())
                self._begin = None
            on = [{"capability": "x-ignore-shared", "state": True}]
            self._monitor.send("migrate-set-capabilities", {"capabilities": on})
            self._monitor.send("migrate-incoming", {"uri": f"fd:{self._state_fd}"})
            self._control = await Channel.connect(self._qemu.ports[0], f"vm {self.pid}")
            await self._identify(secrets.token_bytes(32))
        except (SandboxLost, VmhostError, OSError) as error:
            by_itself = self._qemu.process.returncode is not None or self._hung_up()
            self._end(str(error))
            await self.gone
            raise SandboxLost(f"a clone did not start: {self._words if by_itself else self._reason}") from None

    def _hung_up(self) -> bool:
        """Whether QEMU closed a socket of ours, which only one that ends does."""
        closed = self._monitor is not None and self._monitor.ended.done()
        return closed or (self._control is not None and self._control.hung_up)

    async def open(self, slot: int) -> Channel:
        """The slot's port; its keeper waits behind it."""
        if self._lost.done():
            raise SandboxLost(self._lost.result())
        known = self._channels.get(slot)
        if known is not None and not known.lost.done():
            return known
        channel = await Channel.connect(self._qemu.ports[slot + 1], f"vm {self.pid} slot {slot}")
        # Only a QEMU that is ending closes this socket, and the socket tells it first.
        channel.lost.add_done_callback(lambda lost: self._end("QEMU is gone") if channel.hung_up else None)
        self._channels[slot] = channel
        return channel

    async def name(self, slot: int, hostname: str) -> None:
        """Set the host name of a slot. SandboxLost when the guest does not do it."""
        assert self._control is not None
        answer, _ = await self._control.call({"op": "name", "slot": slot, "name": hostname}, (), START_S)
        if not answer.get("ok", True):
            raise SandboxLost(f"vm {self.pid}: the guest could not take its name: {answer.get('error')}")

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
        return (await self._control.call(header, (), START_S))[0]

    async def inspect(self, thorough: bool = False) -> tuple[str, ...]:
        """What was touched here that nothing honest writes (see integrity). `thorough`: the machine's first process is
        asked as well, which costs tens of milliseconds. SandboxLost; VmhostError when it can't be told."""
        if self._lost.done():
            raise SandboxLost(self._lost.result())
        if self._odd:
            raise VmhostError("it can't be told what was touched: the machine did not begin as its template")
        try:
            touched = self._look()
        except VmhostError:
            if select.select([self._watch], [], [], 0)[0]:
                raise SandboxLost(f"vm {self.pid}: it ended before it was looked at") from None
            raise
        if not thorough:
            return touched
        return touched + self.template.watch.differences(await self.ask({"op": "condition"}))

    def _look(self) -> tuple[str, ...]:
        if not self._low:
            self._low, _ = snapshot.mapping(self.pid, self._memory.mapped)
        return self.template.watch.look(self.pid, self._low, self._memory.fd)

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
        how = f"was ended by signal {-code}" if code < 0 else "ended"
        self._words = f"QEMU {how}: {self._qemu.complaint()}"
        self._end(self._words)
        for task in self._leaving:
            task.cancel()
        for channel in (self._control, *self._channels.values()):
            if channel is not None:
                channel.close(self._reason)
        if self._monitor is not None:
            self._monitor.close()
        self._qemu.close()
        self._devices.close()
        if self._group is not None:
            self._group.close()
        self._owner.ended(self, (usage.ru_utime + usage.ru_stime) * 1000)
        self.gone.set_result(None)


def _in_memory(data: bytes) -> int:
    """A descriptor of a file that exists nowhere, at its beginning."""
    held = Memory("headrace-state", 0)
    with open(held.path, "wb") as file:
        file.write(data)
    return os.dup(held.fd)
