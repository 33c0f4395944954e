"""The trainer's other processes, as its actor sees them: the wait for other nodes, the end of a rank, and the end of
this process where its thread does not return from a lost group."""

import asyncio
import os
from collections.abc import Awaitable, Callable

from headrace.bus.runtime.actor import Actor
from headrace.bus.runtime.supervisor import EXIT_GAVE_UP
from headrace.training.parallel.interface import GroupError, Loss, Others
from headrace.training.trainer import PolicyTrainer

LOOK_S = 0.2
BLOCKED_S = 60.0
"""Seconds for a step, or the opening of a group, to raise after a rank has ended: a step also waits for a version that
is being made durable."""
RETURN_S = 8.0
"""Seconds for the trainer's thread to return when its actor has failed; the supervisor waits longer for `stop`."""
EVENT_S = 2.0


class Watch:
    """The other processes of one group, from before they start."""

    def __init__(self, actor: Actor, check: Callable[[], None], idle: Callable[[], Awaitable[None]]) -> None:
        """Make it in the actor's event loop. check: raises when the actor stops. idle: returns when the trainer's
        thread has nothing to do."""
        self._actor, self._check, self._idle, self._text = actor, check, idle, ""
        self._loop = asyncio.get_running_loop()
        self._others: Others | None = None
        self.trainer: PolicyTrainer | None = None
        """As soon as it is open."""

    def waiting(self, text: str) -> None:
        """From the worker thread, often: text is empty when no node is missing. Shows it in the actor's status, and
        once per change as an event. Raises as `check`."""
        self._check()
        if text == self._text:
            return
        self._text = text
        self._actor.status = text or "preparing"
        if text:
            asyncio.run_coroutine_threadsafe(self._actor.event("waiting_for_nodes", text), self._loop)

    def started(self, others: Others) -> None:
        """From the worker thread: the other processes run."""
        self._others = others

    async def run(self) -> None:
        """Raise GroupError when a rank has ended between two steps; the actor's successor starts all ranks again. In a
        step, and while the group is opened, the thread itself raises; when it does not, this process ends."""
        while True:
            await asyncio.sleep(LOOK_S)
            if (others := self._others) is None or not others.why:
                continue
            try:
                async with asyncio.timeout(BLOCKED_S):
                    await self._idle()
            except TimeoutError:
                await leave(self._actor, others.why)
            if self.trainer is not None and self.trainer.others is not None:
                raise GroupError(others.why, "")


async def close(actor: Actor, trainer: PolicyTrainer, closed: Awaitable[None]) -> None:
    """Close the trainer, for the actor's `stop`. closed: the call of its `close`, in its thread. When the actor has
    failed, the other processes are ended first, and this process ends if the thread does not return."""
    if not actor.failed.done():
        await closed
        return
    if trainer.others is not None:
        trainer.others.fail(Loss("the trainer's actor has failed"))
    try:
        async with asyncio.timeout(RETURN_S):
            await closed
    except TimeoutError:
        await leave(actor, str(actor.failed.result()))


async def leave(actor: Actor, why: str) -> None:
    """End this process: one whose thread stays in a lost group can open no other group."""
    text = f"the trainer's thread does not return from its lost group, so process {os.getpid()} ends: {why}"
    try:
        async with asyncio.timeout(EVENT_S):
            await actor.event("process_ends", text, "error")
    finally:
        os._exit(EXIT_GAVE_UP)
