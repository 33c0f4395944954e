"""The machines of a node: one for a group or a sandbox, each slot given out once; a reset is a kill and a new clone.

There is never more than `max_vms`, nor more than memory, disk and processors hold: then `NoRoom`, and the caller asks
again. `judge_share` of the machines are out of the rollouts' reach, so verdicts never wait for them;
`production_share` are out of training's, so a user doesn't wait for a group to end.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from headrace.config import Environment
from headrace.messages.sandbox import Acquire, NoRoom, Role
from headrace.vmhost.machine import Backend, Machine

Owner = tuple[str, str, str, str]
"""Run, lane, role, group."""


class Cell:
    """One machine in the pool, and who uses it."""

    def __init__(self, owner: Owner, shared: bool, template: str, slots: int) -> None:
        self.owner = owner
        self.template = template
        self.slots, self.unused = slots, set(range(slots))
        self.left = slots if shared else 1
        self.closing = not shared
        self.used = 0
        self.live: set[str] = set()
        self.idle_since = 0.0
        self.timer: asyncio.TimerHandle | None = None
        self.making: asyncio.Future[Machine] | None = None
        self.machine: Machine | None = None
        self.dead = False

    @property
    def role(self) -> str:
        """Of whoever asked for it."""
        return self.owner[2]


class Pool:
    """Cells and the rules for them; all methods belong to one event loop."""

    def __init__(self, environment: Environment, backend: Backend) -> None:
        self._environment = environment
        self._backend = backend
        self._ending: set[asyncio.Task[None]] = set()
        self._closed = False
        self.cells: set[Cell] = set()
        self.clones = 0
        """Machines ever made."""

    def find(self, request: Acquire) -> Cell | None:
        """A machine of the same group with an unused slot."""
        if request.isolation == "episode" or request.lane == "production":
            return None
        owner = (request.run, request.lane, request.role, request.group)
        for cell in self.cells:
            if cell.owner == owner and not cell.closing and cell.left > 0 and cell.template == request.template:
                return cell
        return None

    def make(self, request: Acquire, machine: "Callable[[], Awaitable[Machine]] | None" = None) -> Cell:
        """Start another machine, or one that is in the making. NoRoom."""
        patient = request.role != "judge" and request.lane != "production"
        if patient and (busy := self._backend.busy()):  # no machine that ends would change that soon
            raise NoRoom(f"no room for a {request.role} machine: {busy}")
        while full := self._full(request):
            idle = [cell for cell in self.cells if not cell.live and cell.machine is not None]
            if not idle:
                raise NoRoom(f"no room for a {request.role} machine: {full}")
            self.end(min(idle, key=lambda cell: cell.idle_since))
        shared = request.isolation == "group" and request.lane != "production" and machine is None
        owner = (request.run, request.lane, request.role, request.group)
        cell = Cell(owner, shared, request.template, self._backend.slots_of(request.template))
        cell.making = asyncio.ensure_future(machine() if machine else self._backend.machine(request.template))
        self.cells.add(cell)
        self.clones += 1
        return cell

    def _full(self, request: Acquire) -> str:
        """What stands in the way of another machine; empty when nothing does."""
        most = self._environment.max_vms
        if len(self.cells) >= most:
            return f"{len(self.cells)} machines of {most} are in use"
        share = most - self._environment.judge_share
        rollouts = [cell for cell in self.cells if cell.role != "judge"]
        if request.role != "judge" and len(rollouts) >= share:
            return f"{len(rollouts)} machines of {share} are in use, the rest is the judge's"
        share -= self._environment.production_share
        others = sum(cell.owner[1] != "production" for cell in rollouts)
        if request.role != "judge" and request.lane != "production" and others >= share:
            return f"{others} machines of {share} are in use, the rest is for users and the judge"
        return self._backend.short_of(request.template)

    def release_group(self, run: str, lane: str, role: Role, group: str) -> None:
        """No further slot of the group will be asked for: its machines end with their last sandboxes."""
        for cell in list(self.cells):
            if cell.owner == (run, lane, role, group):
                cell.closing = True
                self.settle(cell)

    async def close(self) -> None:
        """End them all, those too that are still being made."""
        self._closed = True
        for cell in list(self.cells):
            self.end(cell)
        if self._ending:
            await asyncio.wait(self._ending)

    def settle(self, cell: Cell) -> None:
        """After a change: end the machine when nobody can need it, or look again when it has been idle for long."""
        if cell.dead or cell.live:
            return
        if cell.closing or cell.left == 0 or self._closed:
            self.end(cell)
            return
        cell.idle_since = time.monotonic()
        if cell.timer is not None:
            cell.timer.cancel()

        def look() -> None:
            if not cell.live:
                self.end(cell)

        cell.timer = asyncio.get_running_loop().call_later(self._environment.group_idle_s, look)

    def end(self, cell: Cell) -> None:
        """End a machine. Idempotent."""
        if cell.dead:
            return
        cell.dead = True
        self.cells.discard(cell)
        if cell.timer is not None:
            cell.timer.cancel()
        if cell.machine is not None:
            cell.machine.kill()
        elif cell.making is not None:
            discarding = asyncio.get_running_loop().create_task(self._discard(cell.making))
            self._ending.add(discarding)
            discarding.add_done_callback(self._ending.discard)

    async def _discard(self, making: "asyncio.Future[Machine]") -> None:
        """A machine that was still starting when its last user left."""
        with suppress(Exception):
            (await making).kill()
