"""Orders of an operator to the trainer: other settings from the next manifest on, or a rollback by the next step.

An order is an event. The trainer answers it with another one, and the manifest that follows it names it; so a restarted
trainer knows which orders its manifests have followed, also when the events are purged.
"""

from pathlib import Path

import msgspec

from headrace.bus.runtime.actor import Actor
from headrace.messages.subjects import EVENT
from headrace.messages.training import StepManifest, TrainerOrder
from headrace.replay.recipe import refused

ACCEPTED, REFUSED = "order_accepted", "order_refused"
"""Kinds of the answers; `data["order"]` is the order's sequence in HR_EVENT."""


class Orders:
    """The orders of one run."""

    def __init__(self, actor: Actor, checkpoints: Path) -> None:
        self._actor, self._checkpoints = actor, checkpoints
        self._where = EVENT.where(run=actor.run, actor="operator", type=TrainerOrder.type_name)
        self.settings: dict[str, float | int | str | bool] = {}
        """Those that orders have changed, by name."""
        self._newest = self._read = 0
        """Sequences of the newest order that was accepted, and of the newest record that was read."""
        self._restore = -1

    def seen(self, manifest: StepManifest) -> None:
        """Take over what a manifest on record has followed."""
        if manifest.orders >= self._newest:
            self._newest = self._read = manifest.orders
            self.settings = dict(manifest.ordered)

    async def begin(self) -> None:
        """Read the orders that no manifest has followed yet."""
        async for received in self._actor.bus.history("HR_EVENT", self._where, start=self._read + 1):
            await self._hear(received.seq, received.message)

    async def follow(self) -> None:
        """Read further orders, without end."""
        async for received in self._actor.bus.follow("HR_EVENT", self._where, start=self._read + 1):
            await self._hear(received.seq, received.message)

    async def _hear(self, seq: int, order: object) -> None:
        if not isinstance(order, TrainerOrder):
            return
        self._read = seq
        if why := self.refusal(order):
            await self._actor.event(REFUSED, why, "warning", order=seq)
            return
        self._newest, self.settings = seq, self.settings | order.settings
        words = [f"algorithm.{name} = {value}" for name, value in order.settings.items()]
        if order.restore >= 0:
            self._restore = order.restore
            words.append(f"back to version {order.restore}")
        await self._actor.event(ACCEPTED, f"{', '.join(words)}, from the next manifest on", order=seq)

    def refusal(self, order: TrainerOrder) -> str:
        """Why an order cannot be followed, in one sentence; empty when it can."""
        if order.restore >= 0 and not (self._checkpoints / f"v{order.restore:08d}.safetensors").exists():
            versions = sorted(int(file.name[1:9]) for file in self._checkpoints.glob("v*.safetensors"))
            return (
                f"no checkpoint of version {order.restore} is kept; there are {', '.join(map(str, versions)) or 'none'}"
            )
        return refused(self._actor.config, self.settings | order.settings)

    def taken(self, manifest: StepManifest) -> StepManifest:
        """The manifest with the orders that it follows; it has `settings` already."""
        restore, self._restore = self._restore, -1
        return msgspec.structs.replace(manifest, orders=self._newest, ordered=dict(self.settings), restore=restore)
