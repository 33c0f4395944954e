"""The pinned versions that an engine holds beside `latest`.

A version is loaded when the first request names it, and released `UNPIN_AFTER_S` after the last one. The promoted
version is held while the actor serves the product, also without requests and while the actor is lent to training: after
a pause the first user's turn would wait until the version is loaded again, and new sessions would not find the keys and
values of the prompts' common beginnings, which an engine drops with the version.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

from headrace.bus.errors import BusError
from headrace.engines.base import Engine, EngineError
from headrace.errors import HeadraceError
from headrace.messages.rollout import PolicyRef
from headrace.messages.weights import WeightsStaged

UNPIN_AFTER_S = 20.0
"""Seconds for which an unused pinned version stays loaded: an evaluation's next request usually follows soon."""
AGAIN_S = 30.0
"""Seconds after which a promoted version that could not be loaded is tried again."""


class NoPolicy(HeadraceError):
    """This node cannot serve the policy that a request names: an infrastructure failure."""


class _Pin:
    """A pinned version in use."""

    def __init__(self) -> None:
        self.users = 0
        self.ready = asyncio.Lock()
        self.loaded = ""
        """The state hash of the loaded file; empty before."""
        self.release: asyncio.TimerHandle | None = None


class Pins:
    """The pinned versions of one engine."""

    def __init__(
        self,
        open_engine: Callable[[], Awaitable[Engine]],
        find: Callable[[int], Awaitable[WeightsStaged]],
        staged: Mapping[int, WeightsStaged],
    ) -> None:
        """find: waits for the staged file of a version. staged: the newest announcement of each version."""
        self._open_engine, self._find, self._staged = open_engine, find, staged
        self._pins: dict[int, _Pin] = {}
        self._releasing: set[asyncio.Task[None]] = set()
        self._stopped = False

    @property
    def versions(self) -> frozenset[int]:
        """The versions that are in use, or were in the last `UNPIN_AFTER_S`."""
        return frozenset(self._pins)

    @asynccontextmanager
    async def use(self, version: int) -> AsyncIterator[Engine]:
        """The engine with a version, which it holds while this context is open. A version that was staged with other
        bits since it was loaded is loaded again. NoPolicy; EngineError."""
        pin = self._pins.setdefault(version, _Pin())
        pin.users += 1
        if pin.release is not None:
            pin.release.cancel()
            pin.release = None
        engine: Engine | None = None
        try:
            engine = await self._open_engine()
            async with pin.ready:
                if not pin.loaded or self._staged[version].state_hash != pin.loaded:
                    staged = await self._find(version)
                    await engine.pin(version, staged.path, staged.state_hash)
                    pin.loaded = staged.state_hash
            yield engine
        finally:
            pin.users -= 1
            if not pin.users and not self._stopped:
                pin.release = asyncio.get_running_loop().call_later(UNPIN_AFTER_S, self._release, version, engine)

    def _release(self, version: int, engine: Engine | None) -> None:
        del self._pins[version]
        if engine is not None:
            releasing = asyncio.create_task(_unpin(engine, version))
            self._releasing.add(releasing)
            releasing.add_done_callback(self._releasing.discard)

    def stop(self) -> None:
        """Release no further version: the engine ends."""
        self._stopped = True
        for pin in self._pins.values():
            if pin.release is not None:
                pin.release.cancel()


async def _unpin(engine: Engine, version: int) -> None:
    with suppress(EngineError):  # an engine that was stopped holds nothing
        await engine.unpin(version)


class Promoted:
    """Holds the promoted version while the actor serves the product."""

    def __init__(
        self,
        hold: Callable[[PolicyRef], AbstractAsyncContextManager[None]],
        refused: Callable[[int, str, bool], Awaitable[None]],
    ) -> None:
        """hold: opens a context in which a pinned version stays loaded. refused: takes a version that cannot be loaded,
        why, and whether it is tried again."""
        self._hold, self._refused = hold, refused
        self._serves = False
        self._policy = self._held = PolicyRef()
        self._holding: asyncio.Task[None] | None = None

    def promote(self, policy: PolicyRef) -> None:
        """Hold another version."""
        self._policy = policy
        self._change()

    def serve(self, serves: bool) -> None:
        """Hold the promoted version, or none."""
        self._serves = serves
        self._change()

    def _change(self) -> None:
        wanted = self._policy if self._serves else PolicyRef()
        if wanted == self._held:
            return
        self.stop()
        self._held = wanted
        if wanted.kind == "pinned":
            self._holding = asyncio.create_task(self._keep(wanted), name=f"version {wanted.version} stays loaded")

    async def _keep(self, policy: PolicyRef) -> None:
        while True:
            try:
                async with self._hold(policy):
                    await asyncio.Event().wait()
            except (NoPolicy, EngineError, BusError) as error:
                with suppress(BusError):  # then nobody can be told, and the next try comes all the same
                    await self._refused(policy.version, f"{error}; it is tried again in {AGAIN_S:g} s", True)
                await asyncio.sleep(AGAIN_S)

    def stop(self) -> None:
        """Hold no version."""
        if self._holding is not None:
            self._holding.cancel()
            self._holding = None
