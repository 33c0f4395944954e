"""The machines of a node: one per group or per sandbox. Each slot is given out once; a reset is a kill and a new clone.

There are never more than `max_vms` machines, nor more than memory, disk and processors hold; then `NoCapacity` is
raised and the caller asks again. `judge_share` of the machines are reserved for the judge, so verdicts never wait for
rollouts; `production_share` are reserved for the production lane and the judge, so users do not wait for training.
"""

import asyncio
import time
from contextlib import suppress
from functools import partial
from itertools import product
from typing import get_args

from headrace.config import Environment
from headrace.messages.rollout import Lane
from headrace.messages.sandbox import Acquire, GroupKey, NoCapacity, Role, SandboxKey
from headrace.vmhost.backend import Backend, Machine, MakeMachine

GROUP_IDLE_S = 10.0
"""Seconds that a shared machine without sandboxes waits for the next sandbox of its group; then it ends."""


class PooledMachine:
    """One machine of the pool, and the sandboxes in it."""

    def __init__(self, group: GroupKey, shared: bool, template: str, slots: int) -> None:
        self.group = group
        self.template = template
        self.slots, self.unused = slots, set(range(slots))
        self.left = slots if shared else 1
        """Sandboxes that may still be admitted."""
        self.closing = not shared
        """Whether the machine ends with its last sandbox."""
        self.used = 0
        """Sandboxes ever admitted."""
        self.live: set[str] = set()
        """Ids of the sandboxes in it."""
        self.idle_since = 0.0
        self.timer: asyncio.TimerHandle | None = None
        self.making: asyncio.Future[Machine] | None = None
        self.machine: Machine | None = None
        self.dead = False


def _shared(request: Acquire) -> bool:
    """Whether sandboxes of its group may share its machine: limits are those of a whole machine."""
    return request.isolation == "group" and request.lane != "production" and not request.limits.needs()


class Pool:
    """All machines of a node and the rules for them; its methods belong to one event loop."""

    def __init__(self, environment: Environment, backend: Backend) -> None:
        self._environment = environment
        self._backend = backend
        self._ending: set[asyncio.Task[None]] = set()
        self._closed = False
        self.machines: set[PooledMachine] = set()
        self.clones = 0
        """Machines ever made."""
        self._spent_ms = dict.fromkeys(product(get_args(Lane), get_args(Role)), 0.0)

    def find(self, request: Acquire) -> PooledMachine | None:
        """A machine of the request's group with an unused slot."""
        if not _shared(request):
            return None
        group = SandboxKey.of(request).in_group
        for pooled in self.machines:
            if pooled.group == group and not pooled.closing and pooled.left and pooled.template == request.template:
                return pooled
        return None

    def make(self, request: Acquire, make: MakeMachine | None = None) -> PooledMachine:
        """Start another machine: by `make`, otherwise a fresh one of the request's template. NoCapacity."""
        can_wait = request.role == "rollout" and request.lane != "production"
        if can_wait and (busy := self._backend.busy()):  # ending an idle machine would not free the processor soon
            raise NoCapacity(f"no capacity for a {request.role} machine: {busy}")
        while shortage := self._shortage(request):
            idle = [pooled for pooled in self.machines if not pooled.live and pooled.machine is not None]
            if not idle:
                raise NoCapacity(f"no capacity for a {request.role} machine: {shortage}")
            self.end(min(idle, key=lambda pooled: pooled.idle_since))
        self._backend.reserve(request.template, request.limits)
        shared = _shared(request) and make is None
        slots = self._backend.slots_of(request.template)
        pooled = PooledMachine(SandboxKey.of(request).in_group, shared, request.template, slots)
        pooled.making = asyncio.ensure_future(
            (make or partial(self._backend.machine, request.template, request.limits))()
        )
        self.machines.add(pooled)
        self.clones += 1
        return pooled

    def _shortage(self, request: Acquire) -> str:
        """Why another machine cannot start; empty when it can. Machines that wait unused are ended if that helps."""
        if reached := self._limit_reached(request):
            return reached
        shortage = self._backend.shortage(request.template, request.limits)
        if shortage:
            self._backend.free_idle(request.template, request.limits)
        return shortage

    def _limit_reached(self, request: Acquire) -> str:
        """Which configured limit another machine would exceed; empty when none."""
        most = self._environment.max_vms
        if len(self.machines) >= most:
            return f"{len(self.machines)} machines of {most} are in use"
        share = most - self._environment.judge_share
        rollouts = [pooled for pooled in self.machines if pooled.group.role == "rollout"]
        if request.role == "rollout" and len(rollouts) >= share:
            return f"{len(rollouts)} machines of {share} are in use, the others are reserved for the judge"
        share -= self._environment.production_share
        training = sum(pooled.group.lane != "production" for pooled in rollouts)
        if request.role == "rollout" and request.lane != "production" and training >= share:
            return f"{training} machines of {share} are in use, the others are reserved for users and the judge"
        return ""

    def spent(self) -> dict[str, float]:
        """CPU-ms of the machines by the lane and role of their sandboxes. Machines that died, or that wait for their
        first sandbox, are in the backend's total alone."""
        total = self._spent_ms.copy()
        for pooled in self.machines:
            if pooled.machine is not None:
                total[pooled.group.lane, pooled.group.role] += pooled.machine.cpu_ms()
        return {f"vm_cpu_{lane}_{role}_ms": spent for (lane, role), spent in total.items()}

    def release_group(self, group: GroupKey) -> None:
        """Expect no further sandbox of the group: its machines end with their last sandboxes."""
        for pooled in list(self.machines):
            if pooled.group == group:
                pooled.closing = True
                self.update(pooled)

    async def close(self) -> None:
        """End all machines, also those that are still starting."""
        self._closed = True
        for pooled in list(self.machines):
            self.end(pooled)
        if self._ending:
            await asyncio.wait(self._ending)

    def update(self, pooled: PooledMachine) -> None:
        """After a change: end a machine that no sandbox can need, or set the timer of one that became idle."""
        if pooled.dead or pooled.live:
            return
        if pooled.closing or pooled.left == 0 or self._closed:
            self.end(pooled)
            return
        pooled.idle_since = time.monotonic()
        if pooled.timer is not None:
            pooled.timer.cancel()

        def end_if_idle() -> None:
            if not pooled.live:
                self.end(pooled)

        pooled.timer = asyncio.get_running_loop().call_later(GROUP_IDLE_S, end_if_idle)

    def end(self, pooled: PooledMachine) -> None:
        """End a machine. Idempotent."""
        if pooled.dead:
            return
        pooled.dead = True
        self.machines.discard(pooled)
        if pooled.timer is not None:
            pooled.timer.cancel()
        if pooled.machine is not None:
            self._spent_ms[pooled.group.lane, pooled.group.role] += pooled.machine.cpu_ms()
            pooled.machine.kill()
        elif pooled.making is not None:
            discarding = asyncio.get_running_loop().create_task(self._discard(pooled.making))
            self._ending.add(discarding)
            discarding.add_done_callback(self._ending.discard)

    async def _discard(self, making: "asyncio.Future[Machine]") -> None:
        """Kill a machine that was still starting when its last sandbox was released."""
        with suppress(Exception):
            (await making).kill()
