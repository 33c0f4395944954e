"""One clone: a QEMU with the template's devices that maps the template's memory privately.

Its device state comes from an inherited descriptor. The guest's first message (clock and entropy) is written before
QEMU has started, so that the guest reads it at once. A clone that begins at a snapshot of another clone gets that
one's pages before its device state.
"""

import asyncio
import os
import secrets
import select
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, cast

from qemu.qmp import ExecuteError, QMPClient, QMPError

from headrace import process_stat
from headrace.messages.sandbox import SandboxLost
from headrace.vmhost import cgroups
from headrace.vmhost.channel import ENDED, Channel
from headrace.vmhost.errors import VmhostError
from headrace.vmhost.guest.changes import UNCHANGED
from headrace.vmhost.images.imported import Image
from headrace.vmhost.node.capacity import OVERHEAD_MB
from headrace.vmhost.qemu import snapshot
from headrace.vmhost.qemu.drives import Disk, open_drives
from headrace.vmhost.qemu.memory import Memory
from headrace.vmhost.qemu.process import Qemu
from headrace.vmhost.qemu.snapshot import MachineSnapshot
from headrace.vmhost.templates.template import Template

START_S = 60.0
"""Deadline of a clone's first answer; 0.15 s on a quiet machine."""
_REHEARSAL = (".rehearsal/b/c", ".rehearsal/b", ".rehearsal")
UPPER_SIZE = "75%"
"""Capacity of an image's writable layer: a share of the machine's memory, in which it lies."""
CHANGES_S = 30.0
"""Deadline for reading the writable layer; the guest gives up sooner."""
PROBE_S = 10.0
"""How long QEMU's monitor, or the guest's first process, may take to show that it works."""
RAN_MS = 1000.0
"""CPU time in such a wait from which on a silent guest is not one that the host kept from running."""
CRASHES = frozenset(-number for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGSYS, signal.SIGILL, signal.SIGFPE))
"""Ends of a QEMU that no host sends: a guest provoked them."""
QUIET_S = 5.0
"""Delay before the processes of a released slot are ended, if its machine still lives."""


class Owner(Protocol):
    """Receives the end of a clone and the CPU time that it used."""

    def ended(self, clone: "Clone", cpu_ms: float) -> None:
        """The process was reaped."""


class Clone:
    """One running machine."""

    def __init__(
        self, owner: Owner, template: Template, begin: MachineSnapshot | None = None, disk: Disk | None = None
    ) -> None:
        """begin: a snapshot of another clone. disk: of its writable layer, for a template whose machines have one."""
        self.slots = template.manifest.slots
        self.limit_bytes = template.push_mb << 20
        self.template = template
        self.made_of = template.key
        self._owner = owner
        self._begin = begin
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.used = False
        self._reason = ""
        self._killed = False
        """Whether the host ended it."""
        self._exit_text = ""
        """How QEMU ended, with the last line that it wrote."""
        self._low = 0
        self._unlike_template = False
        """Whether it began with changed fixed pages, so that its integrity cannot be checked."""
        self._channels: dict[int, Channel] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._memory = template.memory
        self._mounts: dict[str, str] = begin.mounts if begin is not None else {}
        """The slot's mounts since it got its image."""
        self._devices = Memory("headrace-devices", 0)
        self.disk = disk
        drives = open_drives(template.manifest.hardware, template.image, disk)
        state = os.open(template.state, os.O_RDONLY) if begin is None else _in_memory(begin.state)
        try:
            self._qemu = Qemu(
                template.manifest.hardware,
                self._memory,
                share=False,
                drives=drives,
                extra=("-incoming", "defer"),
                inherit=(state, self._devices.fd),
                # The disk's file is larger than its file system, and a guest's kernel could write all of it.
                file_mib=disk.size_mib if disk is not None else 0,
            )
        finally:
            for fd in (state, *drives):
                os.close(fd)
        self._state_fd = state
        self.pid = self._qemu.pid
        self._control: Channel | None = None
        self._monitor = QMPClient()  # the logger of a name would stay for ever
        self._hung = False
        """Whether QEMU closed its monitor, which happens only when it ends."""
        self._resuming: asyncio.Task[None] | None = None
        self._loading: asyncio.Task[None] | None = None
        self._connected = False
        self._closing: asyncio.Task[None] | None = None
        # A page that the guest reads before it writes counts twice: reading a hole of the template's memory file makes
        # a page of that file, charged to the first reader, and writing makes the clone's own.
        hardware = template.manifest.hardware
        self._group = cgroups.enclose(self.pid, 2 * hardware.memory_mb + OVERHEAD_MB, hardware.vcpus)
        self._watch = os.pidfd_open(self.pid)
        asyncio.get_running_loop().add_reader(self._watch, self._exited)

    @property
    def lost(self) -> "asyncio.Future[str]":
        """Done, with the reason, once the machine is gone."""
        return self._lost

    async def park(self) -> None:
        """Rehearse an acquire and stop: the clone uses no CPU time until `resume`. SandboxLost.

        The emulator translates guest code when it first runs, and a clone begins with nothing translated. After the
        rehearsal the code of an acquire is translated: an acquire takes 4 ms instead of 14.
        """
        await self._identify(b"")
        await self.rehearse()
        await self._execute("stop")

    async def rehearse(self) -> None:
        """Open the first slot and write there, then remove it: code that runs for the first time costs most.
        SandboxLost."""
        slot = await self.open(0)
        # If the slot's user may not write there, the refusal rehearses the same code.
        await slot.call({"op": "open", "seed": 0, "time": 0, "paths": [_REHEARSAL[0]]}, [b"1"], START_S)
        await slot.call({"op": "write_files", "paths": [], "delete": _REHEARSAL}, [], START_S)

    def resume(self) -> None:
        """Continue a parked machine; it is `ready` once its clock is set. SandboxLost."""
        if self._lost.done():
            raise SandboxLost(self._lost.result())

        async def go_on() -> None:
            await asyncio.gather(self._execute("cont"), self._identify(b""))

        self._resuming = asyncio.get_running_loop().create_task(go_on())

    async def ready(self) -> None:
        """Wait until a resumed machine has set its clock; a started one has. SandboxLost."""
        if self._resuming is not None:
            await asyncio.shield(self._resuming)

    async def freeze(self) -> MachineSnapshot:
        """A snapshot: the pages that the machine wrote. The machine stops meanwhile and continues afterwards.
        SandboxLost, VmhostError."""
        if self._lost.done() or self._control is None:
            raise SandboxLost(self._reason or "the machine has not started")
        if self.template.manifest.hardware.disk:
            raise VmhostError(
                "a sandbox whose files lie on a disk cannot be copied: lower disk_mib or raise memory_mib"
            )
        await self._execute("stop")
        try:
            await self._execute("xen-save-devices-state", {"filename": self._devices.path})
            numbers, pages = await asyncio.to_thread(snapshot.own_pages, self.pid, self._memory.mapped)
            if self._lost.done():
                raise SandboxLost(self._reason)
            devices = os.pread(self._devices.fd, os.fstat(self._devices.fd).st_size, 0)
            state = snapshot.compose(self.template.state.read_bytes(), devices)
        finally:
            with suppress(SandboxLost):
                await self._execute("cont")
        return MachineSnapshot(state=state, numbers=numbers, pages=pages, mounts=self._mounts)

    async def _execute(self, command: str, arguments: dict[str, Any] | None = None) -> Any:
        """A command of the monitor; the machine ends where it fails. SandboxLost."""
        try:
            return await self._monitor.execute(command, arguments)
        except ExecuteError as error:
            self._end(str(error))
        except QMPError:
            self._hung = True
            self._end("its monitor closed")
        raise SandboxLost(self._reason)

    async def _identify(self, entropy: bytes) -> None:
        assert self._control is not None
        answer = await self._control.start(time.time_ns(), entropy, START_S)
        if not answer.get("ok", True):
            self._end(f"the guest could not set its clock: {answer.get('error')}")
            raise SandboxLost(f"vm {self.pid}: {self._reason}")

    async def start(self) -> None:
        """Load the state, run, set the clock. SandboxLost when the guest does not answer."""
        try:
            self._control = await Channel.connect(self._qemu.ports[0], f"vm {self.pid}")
            self._loading = asyncio.get_running_loop().create_task(self._load())
            await asyncio.gather(self._loading, self._identify(secrets.token_bytes(32)))
            if self._begin is None and self.template.image is not None:
                await self._attach(self.template.image)
            self._begin = None
        except (SandboxLost, VmhostError, OSError) as error:
            ended_by_itself = self._qemu.process.returncode is not None or self._hung_up()
            self._end(str(error))
            await self.gone
            raise SandboxLost(
                f"a clone did not start: {self._exit_text if ended_by_itself else self._reason}"
            ) from None

    async def _load(self) -> None:
        """Connect to the monitor, and load the machine's state. SandboxLost, VmhostError, OSError."""
        self._qemu.monitor.setblocking(False)
        try:
            await self._monitor.connect(self._qemu.monitor)
        except QMPError:
            self._hung = True
            self._end("its monitor closed")
            raise SandboxLost(self._reason) from None
        self._connected = True
        if self._begin is not None:  # QEMU answers, so its memory is mapped
            await asyncio.to_thread(snapshot.put_pages, self.pid, self._memory.mapped, self._begin)
            self._unlike_template = bool(self._changed_pages())
        on = [{"capability": "x-ignore-shared", "state": True}]
        await self._execute("migrate-set-capabilities", {"capabilities": on})
        await self._execute("migrate-incoming", {"uri": f"fd:{self._state_fd}"})

    async def _attach(self, image: Image) -> None:
        """Mount the image and let the slot begin in it. SandboxLost when the guest cannot."""
        assert self._control is not None
        user = {"uid": image.uid, "gid": image.gid, "groups": image.groups}
        settings = user | {"env": image.env, "workdir": image.workdir}
        size = f"{disk}m" if (disk := self.template.limits.disk_mib) else UPPER_SIZE
        disk_here = self.template.manifest.hardware.disk
        header = {"op": "attach", "drives": image.drives, "size": size, "image": settings, "disk": disk_here}
        answer, _ = await self._control.call(header, (), START_S)
        if not answer.get("ok", True):
            raise SandboxLost(f"vm {self.pid}: the image {image.name} cannot be mounted: {answer.get('error')}")
        self._mounts = {str(name): str(text) for name, text in answer["mounts"].items()}

    async def changes(self, limit: int, originals: int) -> tuple[dict[str, Any], list[bytes], str]:
        """The changes of the programs of its image, as the first process reads it (guest/changes.py). SandboxLost;
        VmhostError in a machine without an image."""
        image = self.template.image
        if image is None:
            raise VmhostError(f"{self.template.manifest.name} is no container image, so it has no layer of changes")
        if self._control is None:
            raise SandboxLost("the machine has not started")
        header = {"op": "changes", "drives": image.drives, "skip": UNCHANGED}
        answer = await self._control.call(header | {"limit": limit, "originals": originals}, (), CHANGES_S)
        return *answer, image.workdir

    def _hung_up(self) -> bool:
        """Whether QEMU closed one of its sockets, which happens only when it ends."""
        return self._hung or (self._control is not None and self._control.hung_up)

    async def open(self, slot: int) -> Channel:
        """The channel to a slot's agent. SandboxLost."""
        if self._lost.done():
            raise SandboxLost(self._lost.result())
        open_channel = self._channels.get(slot)
        if open_channel is not None and not open_channel.lost.done():
            return open_channel
        channel = await Channel.connect(self._qemu.ports[slot + 1], f"vm {self.pid} slot {slot}")
        # QEMU closes this socket only when it ends, and the socket reports that before the process has exited.
        channel.lost.add_done_callback(lambda lost: self._end("QEMU is gone") if channel.hung_up else None)
        self._channels[slot] = channel
        return channel

    async def name(self, slot: int, hostname: str) -> None:
        """Set the host name of a slot. SandboxLost when the guest does not do it."""
        assert self._control is not None
        answer, _ = await self._control.call({"op": "name", "slot": slot, "name": hostname}, (), START_S)
        if not answer.get("ok", True):
            raise SandboxLost(f"vm {self.pid}: the guest could not set its host name: {answer.get('error')}")

    async def blame(self, channel: Channel, alone: bool) -> str:
        """The guest ended its machine or crashed its emulator; or the machine runs and this slot does not answer. Where
        other sandboxes were hit as well, any of them may be the cause."""
        if self._lost.done():
            await self.gone
            events = cast(tuple[dict[str, Any], ...], self._monitor.events.history)
            by_guest = any(event["event"] == "SHUTDOWN" and event["data"]["guest"] for event in events)
            crashed = self._qemu.process.returncode in CRASHES
            return ENDED if alone and not self._killed and (by_guest or crashed) else ""
        assert self._control is not None
        try:
            async with asyncio.timeout(PROBE_S):
                status = await self._execute("query-status")
        except (TimeoutError, SandboxLost):
            return ""
        if status.get("status") != "running":
            return ""
        if self._control.lost.done():
            return ENDED if alone else ""
        before_ms = self.cpu_ms()
        with suppress(SandboxLost):
            await self._control.call({"op": "clock"}, (), PROBE_S)
            return ENDED
        # All of the guest is silent: it ran and did not answer, or the host gave it no processor.
        return ENDED if alone and self.cpu_ms() - before_ms > RAN_MS else ""

    def leave(self, channel: Channel) -> None:
        """End the processes of a released slot after `QUIET_S`, if the machine still lives. Usually it has ended by
        then, and every message to a slot costs CPU time. The slot's namespaces stay: removing them one by one would
        cost more than the end of the machine.
        """

        async def end_processes() -> None:
            await asyncio.sleep(QUIET_S)
            with suppress(SandboxLost):
                await channel.call({"op": "end"})

        task = asyncio.get_running_loop().create_task(end_processes())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def ask(self, header: dict[str, Any]) -> dict[str, Any]:
        """Ask the guest's first process: facts, clock, condition. SandboxLost."""
        if self._control is None:
            raise SandboxLost("the machine has not started")
        return (await self._control.call(header, (), START_S))[0]

    async def check_integrity(self, thorough: bool = False) -> tuple[str, ...]:
        """Changes here that no legitimate work makes (see integrity). `thorough` also asks the machine's
        first process, which costs tens of milliseconds. SandboxLost; VmhostError when it cannot be checked."""
        if self._lost.done():
            raise SandboxLost(self._lost.result())
        if self._unlike_template:
            raise VmhostError("integrity cannot be checked: the machine did not begin as its template")
        try:
            tampered = self._changed_pages()
        except VmhostError:
            if select.select([self._watch], [], [], 0)[0]:
                raise SandboxLost(f"vm {self.pid}: it ended before its integrity was checked") from None
            raise
        if not thorough:
            return tampered
        return tampered + self.template.integrity.differences(await self.ask({"op": "condition"}), self._mounts)

    def _changed_pages(self) -> tuple[str, ...]:
        if not self._low:
            self._low, _ = snapshot.mapping(self.pid, self._memory.mapped)
        return self.template.integrity.check(self.pid, self._low, self._memory.fd)

    def kill(self) -> None:
        """End it now."""
        self._killed = self._killed or not self._lost.done()
        self._end("it was ended")

    def cpu_ms(self) -> float:
        """CPU time of the process so far."""
        stat = process_stat.read(self.pid)
        return 0.0 if stat is None else stat.cpu_s * 1000.0

    def growth_mb(self) -> float:
        """MB of memory that it may still take."""
        return max(0.0, self.template.manifest.hardware.memory_mb + OVERHEAD_MB - self.private_mb())

    def private_mb(self) -> float:
        """Anonymous memory of the process: the clone's memory beyond its template's."""
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
            # Popen.kill would reap a machine that has just died, and `_exited` would find no child.
            signal.pidfd_send_signal(self._watch, signal.SIGKILL)
        if not self._lost.done():
            self._lost.set_result(reason)

    def _exited(self) -> None:
        """Runs when the process has ended: reap it, close everything, tell the owner."""
        asyncio.get_running_loop().remove_reader(self._watch)
        os.close(self._watch)
        _, status, usage = os.wait4(self.pid, 0)
        self._qemu.process.returncode = os.waitstatus_to_exitcode(status)
        code = self._qemu.process.returncode
        how = f"was ended by signal {-code}" if code < 0 else "ended"
        self._exit_text = f"QEMU {how}: {self._qemu.complaint()}"
        self._end(self._exit_text)
        for task in self._leaving:
            task.cancel()
        for channel in (self._control, *self._channels.values()):
            if channel is not None:
                channel.close(self._reason)
        self._devices.close()
        self.disk = None
        if self._group is not None:
            self._group.close()
        self._owner.ended(self, (usage.ru_utime + usage.ru_stime) * 1000)
        self._closing = asyncio.get_running_loop().create_task(self._close())

    async def _close(self) -> None:
        """Close the host's ends; then it is gone. A connection that is not made yet fails and closes itself."""
        if self._loading is not None:
            await asyncio.wait([self._loading])
        try:
            if self._connected:
                with suppress(QMPError, EOFError, OSError):  # `_exit_text` says how it ended
                    await self._monitor.disconnect()
        finally:
            self._qemu.close()
            self.gone.set_result(None)


def _in_memory(data: bytes) -> int:
    """A descriptor of an anonymous file with this content, positioned at its beginning."""
    memory = Memory("headrace-state", 0)
    with open(memory.path, "wb") as file:
        file.write(data)
    return os.dup(memory.fd)
