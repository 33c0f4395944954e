"""The trainer's other processes, as its actor sees them: the wait for other nodes, and the end of a rank."""

import asyncio
from collections.abc import Callable

from headrace.bus.runtime.actor import Actor
from headrace.training.parallel.interface import GroupError
from headrace.training.trainer import PolicyTrainer


class Waits:
    """Shows the nodes that a group waits for: in the actor's status, and once per change as an event."""

    def __init__(self, actor: Actor, check: Callable[[], None]) -> None:
        """Make it in the actor's event loop. check: raises when the actor stops."""
        self._actor, self._check, self._text = actor, check, ""
        self._loop = asyncio.get_running_loop()

    def __call__(self, text: str) -> None:
        """From the worker thread, often: text is empty when no node is missing. Raises as `check`."""
        self._check()
        if text == self._text:
            return
        self._text = text
        self._actor.status = text or "preparing"
        if text:
            asyncio.run_coroutine_threadsafe(self._actor.event("waiting_for_nodes", text), self._loop)


async def watch(trainer: PolicyTrainer) -> None:
    """Raise GroupError when a rank has ended, even between two steps; the actor's successor starts all ranks again."""
    while not trainer.lost:
        await asyncio.sleep(0.2)
    raise GroupError(trainer.lost)
