"""Shadow turns: the candidate version also answers users' turns, and no user sees its answers.

A shadow turn has a session of its own under the user's hash, so a purge reaches its record. Its context is the whole
history as the client sent it, encoded anew: the candidate never continues ids that another version sampled.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable

import msgspec

from headrace.bus.connection import Bus
from headrace.gateway.http import HttpRefused
from headrace.messages.product import ClientTurn, ClientTurnDone, ShadowTurn
from headrace.messages.rollout import PolicyRef
from headrace.messages.subjects import EVENT, token

AT_ONCE = 4
"""The most shadow turns at a time; further ones are skipped, because users' turns have priority."""


class Shadows:
    """Sends copies of users' turns to the candidate."""

    def __init__(self, bus: Bus, run: str, ask: Callable[[ClientTurn], Awaitable[ClientTurnDone]]) -> None:
        self._bus, self._run, self._ask = bus, run, ask
        self._running: set[asyncio.Task[None]] = set()

    def mirror(self, turn: ClientTurn, candidate: PolicyRef) -> None:
        """Begin a shadow turn, unless `AT_ONCE` are under way."""
        if len(self._running) < AT_ONCE:
            task = asyncio.create_task(self._turn(turn, candidate))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _turn(self, turn: ClientTurn, candidate: PolicyRef) -> None:
        group = f"{turn.group.partition('.')[0]}.shadow-{secrets.token_hex(6)}"
        shadow = msgspec.structs.replace(turn, group=group, known=0, policy=candidate)
        try:
            done = await self._ask(shadow)
            result = ShadowTurn(run=self._run, policy=candidate, ok=True, sampled=done.usage.sampled)
        except HttpRefused as error:
            result = ShadowTurn(run=self._run, policy=candidate, ok=False, detail=str(error))
        subject = EVENT.at(run=token(self._run), actor="gateway", type=ShadowTurn.type_name)
        await self._bus.publish(subject, result)
