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


class Waits:
    """The opening of a group. Shows the nodes that it waits for: in the actor's status, and once per change as an
    event."""

    def __init__(self, actor: Actor, check: Callable[[], None]) -> None:
        """Make it in the actor's event loop. check: raises when the actor stops."""
        self._actor, self._check, self._text = actor, check, ""
        self._loop = asyncio.get_running_loop()
        self._others: Others | None = None

    def __call__(self, text: str) -> None:
        """From the worker thread, often: text is empty when no node is missing. Raises as `check`."""
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

    async def opened(self, work: Awaitable[PolicyTrainer]) -> PolicyTrainer:
        """The result of `work`, which opens the group in the worker thread. This process ends when the other ones have
        ended and the thread does not return."""
        opening, looks = asyncio.ensure_future(work), 0
        try:
            while not (await asyncio.wait({opening}, timeout=LOOK_S))[0]:
                others = self._others
                looks = looks + 1 if others is not None and others.why and others.busy else 0
                if others is not None and looks * LOOK_S >= BLOCKED_S:
                    await leave(self._actor, others.why)
            return opening.result()
        finally:
            opening.cancel()  # of an actor that stops, nobody asks for the thread's result


async def watch(actor: Actor, trainer: PolicyTrainer) -> None:
    """Raise GroupError when a rank has ended between two steps; the actor's successor starts all ranks again. In a
    step the step itself raises; when it does not, this process ends."""
    looks = 0
    while True:
        await asyncio.sleep(LOOK_S)
        others = trainer.others
        if others is None or not others.why:
            continue
        if not others.busy:
            raise GroupError(others.why, "")
        looks += 1
        if looks * LOOK_S >= BLOCKED_S:
            await leave(actor, others.why)


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
