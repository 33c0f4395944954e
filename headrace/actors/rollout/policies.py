"""Selects the engine and the renderer of a request.

`latest` follows the versions that this node has staged, a pinned version stays loaded while requests name it, and a
scripted policy is an engine for one episode. The receiver of this node stores a verified file per version and announces
it with WeightsStaged. The engine loads the newest version and switches to it between two decode steps; it skips the
versions in between. A trainer that repeats a step may publish its version again with other bits: a version is loaded
again when its state hash differs from that of the served one.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from headrace.actors.rollout.pins import NoPolicy, Pins
from headrace.backoff import Backoff
from headrace.bus.connection import Bus
from headrace.bus.errors import BusError, MessageGone
from headrace.bus.payloads import renderer_bundles
from headrace.config import Config, versions
from headrace.engines.base import Engine, EngineError, RefusedVersion, UnusableEngine
from headrace.engines.registry import EngineSetup, opener
from headrace.harness.scripted import ScriptedEngine, script
from headrace.harness.tools.registry import schemas_of
from headrace.harness.tools.toolbox import tools_of
from headrace.inner_paths import own_file
from headrace.messages.base import Message
from headrace.messages.product import TURN_S, ClientTurn
from headrace.messages.rollout import PolicyRef
from headrace.messages.subjects import EVENT
from headrace.messages.tasks import Oracle, Task
from headrace.messages.weights import WeightsStaged, WeightsSwapped
from headrace.policy.layout import hugging_face
from headrace.registry import PluginError
from headrace.rendering import schemas
from headrace.rendering.base import Renderer, RendererError
from headrace.rendering.native.client import ClientRenderer, UnusableConversation
from headrace.rendering.native.renderer import NativeRenderer
from headrace.rendering.registry import Renderers
from headrace.rendering.schemas import ToolSchema
from headrace.rendering.terse import TerseRenderer
from headrace.rendering.tokenizer import Tokenizer
from headrace.tasks import UnknownSuite

STAGED_WITHIN_S = 60.0
"""Seconds that a request waits for the pinned version that it names."""
AGAIN_S = (2.0, 60.0)
"""The first and the largest delay in seconds before a load that failed is tried again."""


class ClientServed(NamedTuple):
    """The engine and policy version that sample a client's turn."""

    engine: Engine
    renderer: Callable[[ClientTurn], ClientRenderer]
    """The policy's format with the tools of a turn. UnusableConversation."""
    bundle: str
    """sha256 of the renderer bundle behind the format."""


class Served(NamedTuple):
    """The sampler of an episode, and its renderer."""

    engine: Engine
    renderer: Renderer


class Policies:
    """The policies of one rollout actor: its engine, renderers and weights."""

    def __init__(
        self,
        config: Config,
        bus: Bus,
        run: str,
        id: str,
        on_swap: Callable[[WeightsSwapped], Awaitable[None]],
        on_refused: Callable[[int, str, bool], Awaitable[None]],
    ) -> None:
        """on_swap: takes every completed load. on_refused: takes a version that could not be loaded, why, and whether
        it is tried again."""
        self._config, self._bus, self._run, self._id = config, bus, run, id
        self._on_swap, self._on_refused = on_swap, on_refused
        self._served = (-1, "")
        """Version and state hash of `latest`."""
        self._refused: WeightsStaged | None = None
        """The newest version, if the engine will never serve this file. The same file, announced again, is tried
        again, because the receiver has verified it again."""
        self._folder, self._versions = Path(config.run.dir) / run, versions.folder(config, run)
        self._engine: Engine | None = None
        self._renderers: Renderers | None = None
        self._staged: dict[int, WeightsStaged] = {}
        self._news = asyncio.Condition()
        self._opening, self._fetching = asyncio.Lock(), asyncio.Lock()
        self.pins = Pins(self._open_engine, self._find, self._staged)
        self._branches: dict[str, asyncio.Task[Policies]] = {}
        """Other runs whose policies requests name, each with an engine of its own, because version numbers are per
        run."""
        self._following: list[asyncio.Task[None]] = []
        self._loading: asyncio.Task[None] | None = None
        """The task that loads a branch's versions, once a request named its `latest`. The actor runs `load` for its own
        run."""

    @property
    def version(self) -> int:
        """The version of `latest`; -1 before the first."""
        return self._engine.version if self._engine is not None else -1

    @property
    def engine(self) -> Engine | None:
        """The engine of this actor; None before the first version."""
        return self._engine

    async def recover(self) -> int:
        """Read the versions that this node staged before; returns the sequence after which `follow` continues."""
        last = 0
        async for received in self._bus.history("HR_EVENT", EVENT.where(run=self._run, type="weights_staged")):
            await self._hear(received.message)
            last = received.seq
        return last

    async def follow(self, after: int) -> None:
        """Follow the staged versions, without end."""
        subject = EVENT.where(run=self._run, type="weights_staged")
        async for received in self._bus.follow("HR_EVENT", subject, start=after + 1):
            await self._hear(received.message)

    async def _hear(self, message: Message) -> None:
        if isinstance(message, WeightsStaged) and message.node == self._bus.node:
            try:
                await asyncio.to_thread(own_file, self._versions.parent, message.path, ".safetensors")
            except FileNotFoundError:
                pass  # the receiver has dropped it for a newer one
            except ValueError as error:
                return await self._on_refused(message.version, str(error), False)
            async with self._news:
                self._staged[message.version] = message
                self._news.notify_all()

    def _due(self) -> WeightsStaged | None:
        """The newest staged version; None when the engine serves it or has refused it."""
        newest = self._staged[max(self._staged)] if self._staged else None
        if newest is None or newest is self._refused or (newest.version, newest.state_hash) == self._served:
            return None
        return newest

    async def _wait_for_another(self, failed: WeightsStaged, most_s: float) -> None:
        """Wait until another file than `failed` is due, `most_s` seconds at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(most_s), self._news:
                await self._news.wait_for(lambda: self._due() is not failed)

    async def load(self) -> None:
        """Switch to the newest staged version whenever the engine does not serve it, without end. The engine keeps its
        version when a load fails. The load is tried again after a delay, unless the file is refused, and a newer
        version or file is tried at once."""
        retry, failed = Backoff(*AGAIN_S), None
        while True:
            async with self._news:
                await self._news.wait_for(lambda: self._due() is not None)
                staged = self._due()
            assert staged is not None
            try:
                engine = await self._open_engine()
                swap = await engine.load(staged.version, staged.path, staged.state_hash)
            except RefusedVersion as error:
                self._refused = staged
                text = f"{error}; it is not tried again until this node stages version {staged.version} again"
                await self._on_refused(staged.version, text, False)
                continue
            except EngineError as error:
                if staged is not failed:
                    retry.reset()
                failed, delay = staged, retry.next()
                await self._on_refused(staged.version, f"{error}; it is tried again in {delay:g} s", True)
                await self._wait_for_another(staged, delay)
                continue
            self._served = swap.version, swap.state_hash
            await self._on_swap(
                WeightsSwapped(
                    run=self._run,
                    rollout=self._id,
                    node=self._bus.node,
                    version=swap.version,
                    state_hash=swap.state_hash,
                    pause_ms=swap.pause_ms,
                )
            )
            async with self._news:
                self._news.notify_all()

    async def reached(self, version: int, within_s: float = math.inf) -> None:
        """Wait until `latest` is at least this version. NoPolicy after `[rollout] wait_s` or `within_s`,
        whichever is shorter."""
        limit_s = min(self._config.rollout.wait_s, within_s)
        try:
            async with asyncio.timeout(limit_s), self._news:
                await self._news.wait_for(lambda: self.version >= version)
        except TimeoutError:
            has = f"serves version {self.version}" if self.version >= 0 else "has no version"
            raise NoPolicy(
                f"run {self._run} {has} on {self._bus.node}, and version {version} or newer did not come within "
                f"{limit_s:g} s: check that its trainer, its weight_sender and this node's weight_receiver run"
            ) from None

    @asynccontextmanager
    async def serving(self, policy: PolicyRef, task: Task, oracle: Callable[[], Oracle]) -> AsyncIterator[Served]:
        """Engine and renderer for one episode. NoPolicy when this node cannot serve the policy."""
        if policy.run not in ("", self._run):
            branch = await self._branch(policy.run)
            branch.follow_latest(policy)
            async with branch.serving(PolicyRef(policy.kind, policy.version), task, oracle) as served:
                yield served
            return
        if policy.kind == "scripted":
            renderer = await self._scripted_renderer(task)
            try:
                task_oracle = _oracle_of(policy.name, task, oracle)
                turns, message = script(policy.name, task, task_oracle), None
                if not task.sandbox:
                    message = task_oracle.answer if policy.name == "oracle" else "done"
                engine: Engine = ScriptedEngine(turns, renderer, message)
            except ValueError as error:
                raise NoPolicy(str(error)) from None
            yield Served(engine, renderer)
        elif policy.kind == "pinned":
            async with self.pins.use(policy.version) as engine:
                yield Served(engine, await self._renderer(task))
        else:
            await self.reached(0)
            renderer = await self._renderer(task)
            yield Served(await self._open_engine(), renderer)

    @asynccontextmanager
    async def serving_clients(self, policy: PolicyRef) -> AsyncIterator[ClientServed]:
        """Engine and format for a client's turn. NoPolicy; UnusableConversation for a policy without a chat format."""
        if policy.run not in ("", self._run):
            branch = await self._branch(policy.run)
            branch.follow_latest(policy)
            async with branch.serving_clients(PolicyRef(policy.kind, policy.version)) as served:
                yield served
            return
        renderers = await self._open_renderers()
        renderer = renderers.for_conversations() if renderers is not None else None
        if not isinstance(renderer, NativeRenderer):
            raise UnusableConversation("this policy has no chat format: it serves only headrace's own sessions")

        def of(turn: ClientTurn) -> ClientRenderer:
            return ClientRenderer(renderer, turn.tools)

        if policy.kind == "pinned":
            async with self.pins.use(policy.version) as engine:
                yield ClientServed(engine, of, renderer.bundle)
        else:
            await self.reached(0, TURN_S)
            yield ClientServed(await self._open_engine(), of, renderer.bundle)

    async def _branch(self, run: str) -> "Policies":
        """The policies of another run on this node, opened when the first request names that run."""
        if run not in self._branches:
            self._branches[run] = asyncio.create_task(self._open_branch(run))
        opening = self._branches[run]
        try:
            return await asyncio.shield(opening)
        except BusError:
            if self._branches.get(run) is opening:
                del self._branches[run]  # the next request tries again
            raise

    async def _open_branch(self, run: str) -> "Policies":
        branch = Policies(self._config, self._bus, run, self._id, _unannounced, self._on_refused)
        after = await branch.recover()
        self._following.append(asyncio.create_task(branch.follow(after)))
        return branch

    @asynccontextmanager
    async def holding(self, policy: PolicyRef) -> AsyncIterator[None]:
        """A pinned version of this or another run stays loaded while this context is open. NoPolicy; EngineError;
        BusError."""
        owner = self if policy.run in ("", self._run) else await self._branch(policy.run)
        async with owner.pins.use(policy.version):
            yield

    async def _find(self, version: int) -> WeightsStaged:
        """The staged file of a version. The receiver stages the versions that evaluations and promotions name.
        NoPolicy."""
        try:
            async with asyncio.timeout(STAGED_WITHIN_S), self._news:
                await self._news.wait_for(lambda: version in self._staged and Path(self._staged[version].path).exists())
        except TimeoutError:
            raise NoPolicy(f"version {version} is not staged on {self._bus.node}") from None
        return self._staged[version]

    async def _open_engine(self) -> Engine:
        """The engine of this actor, opened at its first use, because the numerics probe takes time. UnusableEngine."""
        async with self._opening:
            if self._engine is None:
                section = self._config.engine
                policy = hugging_face.of_run(self._config)
                try:
                    opened = opener(section)
                except PluginError as error:
                    raise UnusableEngine(str(error)) from None
                self._engine = await opened(
                    EngineSetup(section, policy, self._folder, self._versions, self._id, self._tokenizer)
                )
            return self._engine

    async def _tokenizer(self) -> Path | None:
        """The tokenizer.json of the run's bundle, as a file; None in a run without a bundle. EngineError."""
        try:
            renderers = await self._open_renderers()
        except NoPolicy as error:
            raise EngineError(str(error)) from None
        if renderers is None:
            return None
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / "tokenizer.json"
        path.write_text(renderers.bundle.tokenizer_json, encoding="utf-8")
        return path

    async def _renderer(self, task: Task) -> Renderer:
        """The renderer of the run's bundle for the tools of a task. NoPolicy when this node cannot open it, because in
        another format the policy would be trained on text that it did not sample."""
        renderers = await self._open_renderers()
        if renderers is None:
            raise NoPolicy(f"run {self._run} has no renderer bundle; its trainer publishes it before the first version")
        try:
            tools = schemas_of(tools_of(task))
            async with self._fetching:
                opened = renderers.opened(tools)
                return opened if opened is not None else await asyncio.to_thread(renderers.open, tools)
        except (RendererError, PluginError) as error:
            raise NoPolicy(str(error)) from None

    async def _scripted_renderer(self, task: Task) -> Renderer:
        """The run's renderer; in a run with only scripted policies, the terse format over a byte tokenizer."""
        if await self._open_renderers() is not None:
            return await self._renderer(task)
        try:
            more = tuple(tool for tool in schemas_of(tools_of(task)) if tool.name not in schemas.BY_NAME)
        except PluginError as error:
            raise NoPolicy(str(error)) from None
        return _byte_renderer(more)

    async def _open_renderers(self) -> Renderers | None:
        """The renderers of the run's bundle, fetched once; None while no bundle is published. NoPolicy when it is
        unusable."""
        async with self._fetching:
            if self._renderers is None:
                try:
                    bundle = await renderer_bundles.fetch(self._bus, self._run)
                    if bundle is not None:
                        self._renderers = await asyncio.to_thread(Renderers, bundle)
                except (renderer_bundles.BundleMismatch, MessageGone, RendererError, PluginError) as error:
                    raise NoPolicy(f"the renderer bundle of run {self._run} cannot be used: {error}") from None
            return self._renderers

    def follow_latest(self, policy: PolicyRef) -> None:
        """Start to load this run's versions when a request names its `latest`."""
        if policy.kind == "latest" and self._loading is None:
            self._loading = asyncio.create_task(self.load())
            self._following.append(self._loading)

    async def stop(self) -> None:
        """End the engine; requests in flight fail."""
        for task in self._following:
            task.cancel()
        for branch in self._branches.values():
            if branch.done() and not branch.cancelled() and branch.exception() is None:
                await branch.result().stop()
        self.pins.stop()
        if self._engine is not None:
            await self._engine.stop()


def _oracle_of(name: str, task: Task, oracle: Callable[[], Oracle]) -> Oracle:
    """The oracle that a script gets. A suite that users judge has no solutions; NoPolicy for the script `oracle`, which
    needs them."""
    try:
        return oracle()
    except UnknownSuite as error:
        if name == "oracle":
            raise NoPolicy(f"scripted:oracle writes the known solution: {error}") from None
        return Oracle(ref=task.ref, hidden={}, tests=task.tests, expected=(), solution={})


async def _unannounced(swapped: WeightsSwapped) -> None:
    """The swap of a branch is not announced, because it changes no lane of this run."""


@lru_cache(16)
def _byte_renderer(more: tuple[ToolSchema, ...]) -> Renderer:
    """A renderer for scripts, with a tokenizer of tags and single bytes. more: tools that are not in the table."""
    return TerseRenderer(Tokenizer.train((), 256 + len(schemas.tags())), (*schemas.TABLE, *more))
