"""The rollout actor: samples turns and Trajectories for RolloutRequests, in the same way on every lane.

It pulls a lane while it holds a lease for it. Many episodes run at once, so that the engine can batch them. An episode
is handed back when its lane is withdrawn or the actor drains; another rollout actor then continues it with its turn log
and its sandbox.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar, get_args

import msgspec

from headrace.actors.rollout import spans
from headrace.actors.rollout.client_turns import ClientTurns
from headrace.actors.rollout.episode import Episode
from headrace.actors.rollout.failures import FAILURES, Cancelled, NoEnvironment, failure
from headrace.actors.rollout.harnesses.endpoint import Endpoint
from headrace.actors.rollout.harnesses.episode import HarnessEpisode
from headrace.actors.rollout.message import MessageEpisode
from headrace.actors.rollout.pins import NoPolicy, Promoted
from headrace.actors.rollout.policies import Policies
from headrace.actors.rollout.server import EVERY_S, ServerReports
from headrace.actors.rollout.workspace_commands import WorkspaceCommands
from headrace.bus.broker.callers import callers
from headrace.bus.errors import Reject, Unrecoverable, WrongSequence
from headrace.bus.nats.consumer import Consumer
from headrace.bus.nats.received import Received
from headrace.bus.runtime import ack_waits
from headrace.bus.runtime.actor import Actor
from headrace.bus.runtime.plugins import agree
from headrace.engines.base import Engine
from headrace.engines.registry import ENGINES
from headrace.harness.mcp.tools import open_servers
from headrace.harness.tools.registry import TOOLS
from headrace.harness.tools.toolbox import tools_of, with_linter, with_search, with_tools, with_web_search
from headrace.ledger.training import suites_during
from headrace.messages.base import Message
from headrace.messages.ledger import Admission, admission_key
from headrace.messages.plugins import Plugin
from headrace.messages.product import AttemptControl, CapacityLease, Promotion, UserDropped, lease_key, promotion_key
from headrace.messages.rollout import Lane, RolloutRequest, Trajectory
from headrace.messages.sandbox import NoCapacity
from headrace.messages.subjects import FAIL, RPC, TASK, token
from headrace.messages.tasks import Oracle, Task, TaskRef
from headrace.messages.weights import WeightsSwapped
from headrace.registry import PluginError, plugins
from headrace.rendering.native.client import UnusableConversation
from headrace.rendering.registry import RENDERERS
from headrace.sandboxes.client import Sandboxes, Superseded
from headrace.search.client import SearchClient
from headrace.search.models import find, offers_search, plugin
from headrace.tasks import UnknownSuite, open_suite
from headrace.tasks.suites import suite_plugins

LANES: tuple[Lane, ...] = get_args(Lane)


class Rollout(Actor):
    """Pulls RolloutRequests, publishes TurnSampled, TurnDone, Trajectory, SlotFailed, WeightsSwapped."""

    role: ClassVar[str] = "rollout"

    async def start(self) -> None:
        """Open plugins and MCP servers, follow weights and lease, then pull. PluginError, UnknownSuite, McpError,
        SearchModelError."""
        self._policies = Policies(self.config, self.bus, self.run, self.id, self._on_swap, self._on_refused)
        self._promoted = Promoted(self._policies.holding, self._on_refused)
        self._endpoint = Endpoint(self.event)
        self._sandboxes = Sandboxes(self.bus, self.config.environment.lease_s, self.waiting)
        tasks = self.config.tasks
        self._mcp = await open_servers(tasks.mcp, Path(self.config.run.dir) / self.run)
        renderer = self.config.policy.renderer
        tools = plugins((TOOLS, (*tasks.tools, *self._mcp.names)))
        self._plugins = plugins(
            (ENGINES, (self.config.engine.kind,)), (RENDERERS, () if renderer == "auto" else (renderer,))
        )
        suites = (tasks.suite, tasks.heldout, tasks.unseen, *suites_during(self.config))
        used = (*tools, *self._plugins, *suite_plugins(suites))
        self._searcher = SearchClient(self.bus, self.run) if offers_search(self.config) else None
        model = find(self.config.search.model) if self._searcher is not None else None
        await agree(self.bus, self.run, (*used, plugin(model, self.config.search.tokens)))
        self._agreed = set(tools)
        self._suite = lru_cache(64)(partial(open_suite, root=tasks.dir))
        searching = self._searcher is not None
        section = self.config.tools

        def offered(ref: TaskRef) -> Task:
            task = with_search(with_tools(self._suite(ref.suite).task(ref.task), tasks.tools), searching)
            return with_web_search(with_linter(task, section.lint), section.web_search)

        self._task = lru_cache(64)(offered)
        self._running: dict[asyncio.Task[Trajectory | None], RolloutRequest] = {}
        self._cancelled: dict[asyncio.Task[Trajectory | None], Cancelled] = {}
        """Attempts that a user ended: the turns are published unless their data is purged."""
        self._handing_back: set[asyncio.Task[Trajectory | None]] = set()
        self._pulls: dict[Lane, Consumer] = {}
        idle_s = self.config.production.idle_s
        self._clients = ClientTurns(self.bus, self.id, self._policies.serving_clients, self._plugins, idle_s)
        self._commands = WorkspaceCommands(self._sandboxes, self.config.environment.lease_s, self._task)
        self._answering: list[Any] = []
        self._tokens = self._episodes = 0
        self._min_version = -1
        after = await self._policies.recover()
        self.spawn(self._policies.follow(after), "staged versions")
        self.spawn(self._policies.load(), "weights")
        self.every(self.config.environment.lease_s / 3, self._sandboxes.renew, "lease renewal")
        self.every(2.0, self._measure, "metrics")
        reports = ServerReports(self.config, self.bus, self.id, self.event, self.metric)
        self.every(EVERY_S, lambda: reports.publish(self._policies.engine), "the server's metrics")
        leases = await self.bus.kv("HR_LEASE")
        entry = await leases.get(lease_key(self.run, self.id))
        lease = entry[0] if entry is not None else None
        self._lanes = lease.lanes if isinstance(lease, CapacityLease) else self._own_lanes()
        for lane in LANES:
            await self._pull(lane)
        await self._serve_clients()
        for caller in callers("rollout", "control"):
            control = RPC.at(service="rollout", caller=caller, method=f"control-{token(self.run)}")
            await self.listen(control, self._on_control)
        self.spawn(self._follow_lease(), "lease")
        self.spawn(self._follow_admission(), "admission")
        self.spawn(self._follow_promotion(), "promotion")

    async def drain(self) -> None:
        """Hand back the running attempts."""
        self._hand_back(LANES)

    async def stop(self) -> None:
        """Release the sandboxes, then end the MCP servers and the engine."""
        await self._sandboxes.close()
        await self._endpoint.stop()
        await self._mcp.close()
        self._promoted.stop()
        await self._policies.stop()

    async def _on_swap(self, swapped: WeightsSwapped) -> None:
        await self.publish_event(swapped)
        self._open_lanes()

    async def _on_refused(self, version: int, why: str, again: bool) -> None:
        await self.event("load_failed", f"version {version}: {why}", "warning" if again else "error", version=version)

    async def _serve_clients(self) -> None:
        """Start or stop answering clients' turns: an actor answers while it has the production lane."""
        self._promoted.serve("production" in self._lanes)
        if "production" in self._lanes and not self._answering:
            run = token(self.run)
            handlers: dict[str, Callable[[Any], Awaitable[Message]]] = {
                "turn": self._clients.turn,
                "end": self._clients.end,
                "command": self._commands.run,
            }
            for method, handler in handlers.items():
                for caller in callers("rollout", method):
                    subject = RPC.at(service="rollout", caller=caller, method=f"{method}-{run}")
                    self._answering.append(await self.serve(subject, handler, queue="rollout"))
        elif "production" not in self._lanes:
            answering, self._answering = self._answering, []
            for subscription in answering:
                await self.unserve(subscription)

    def _own_lanes(self) -> tuple[str, ...]:
        """The lanes of an actor that has no lease: actors in [production] rollouts serve production, the others train
        and evaluate."""
        if self.config.rollout.lanes:
            return self.config.rollout.lanes
        production = self.config.production
        if production.enabled and production.rollouts:
            return ("production",) if self.id in production.rollouts else ("train", "eval")
        return LANES

    async def _pull(self, lane: Lane) -> None:
        self._pulls[lane] = await self.consume(
            TASK,
            self._handle,
            durable=f"rollout-{self.run}-{lane}",
            filter=TASK.where(run=self.run, lane=lane),
            credit=self.config.rollout.credit,
            ack_wait=ack_waits.WORK_S,
        )
        self._open_lanes()

    def _open_lanes(self) -> None:
        """Pull exactly the leased lanes; the train lane only with weights at or above its `min_version`."""
        for lane, consumer in self._pulls.items():
            behind = lane == "train" and self._policies.version < self._min_version
            consumer.resume() if lane in self._lanes and not behind else consumer.pause()

    async def _follow_lease(self) -> None:
        leases = await self.bus.kv("HR_LEASE")
        async for _, lease, _ in leases.watch(lease_key(self.run, self.id)):
            lanes = lease.lanes if isinstance(lease, CapacityLease) else self._own_lanes()
            taken = [lane for lane in LANES if lane in self._lanes and lane not in lanes]
            self._lanes = lanes
            self._open_lanes()
            await self._serve_clients()
            for lane in taken:  # first, because this actor's own pull request would get what is handed back
                await self._pulls[lane].withdrawn()
            self._hand_back(taken)

    async def _follow_admission(self) -> None:
        """Close the train lane while this actor's weights are too old for it."""
        state = await self.bus.kv("HR_ADMISSION")
        async for _, admission, _ in state.watch(admission_key(self.run)):
            if isinstance(admission, Admission):
                self._min_version = admission.min_version
                self._open_lanes()

    async def _follow_promotion(self) -> None:
        """Keep the promoted version loaded while this actor serves the product."""
        state = await self.bus.kv("HR_PRODUCT")
        async for _, promotion, _ in state.watch(promotion_key(self.run)):
            if isinstance(promotion, Promotion):
                self._promoted.promote(promotion.policy)

    def _hand_back(self, lanes: Sequence[Lane]) -> None:
        for work, request in self._running.items():
            if request.lane in lanes:
                self._handing_back.add(work)
                work.cancel()

    async def _handle(self, received: Received[RolloutRequest]) -> None:
        request = received.message
        # A broker that is killed may forget a delivery and repeat it to the actor that works on it: both have one end.
        work = next((work for work, running in self._running.items() if running == request), None)
        if work is None:
            work = asyncio.create_task(self._attempt(request, self._task_of(request)))
            self._running[work] = request
        try:
            trajectory = await asyncio.shield(work)
        except asyncio.CancelledError:
            if work in self._cancelled:
                await self._fail(request, self._cancelled[work])
            elif work in self._handing_back:
                await self._republish(request)
            else:
                work.cancel()
                await asyncio.wait([work])
                raise
        except (Superseded, WrongSequence) as error:
            # Another actor runs this attempt now and acknowledges its request.
            received.settled = True
            await self.event("superseded", str(error), "warning", trajectory=request.trajectory)
        except NoCapacity as error:
            await self._wait_on(request, error)
        except FAILURES as error:
            await self._fail(request, error)
        else:
            if trajectory is not None and work in self._running:
                self._episodes += 1
                self._tokens += sum(len(turn.ids) for turn in trajectory.turns)
        finally:
            self._running.pop(work, None)
            self._handing_back.discard(work)
            self._cancelled.pop(work, None)

    async def _on_control(self, message: Message) -> None:
        """Cancel a production attempt, cut a client's turn, release a held sandbox, or all of a user, if this actor has
        them."""
        if isinstance(message, AttemptControl) and message.run == self.run:
            if message.turn:
                self._clients.cut(message.turn)
            if message.user:
                await self._clients.forget(message.user)
                await self._sandboxes.release_all_held(f"{message.user}.")
            for work, request in self._running.items():
                wanted = request.group == message.group or _is_of(request, message.user)
                if wanted and request.lane == "production":
                    # A cancellation is sent until the run has ended, also while its turns are being published.
                    if message.user or work not in self._cancelled:
                        self._cancelled[work] = Cancelled(purged=bool(message.user))
                        work.cancel()
            if message.workspace:
                await self._sandboxes.release_held(message.workspace)
            if message.user and not any(_is_of(request, message.user) for request in self._running.values()):
                where = RPC.at(service="feedback", caller="rollout", method="dropped")
                await self.bus.emit(where, UserDropped(user=message.user, actor=f"rollout.{self.id}"))

    def _task_of(self, request: RolloutRequest) -> Task:
        """The request's task. Reject: the suite or the task does not exist."""
        try:
            return self._task(request.task)
        except UnknownSuite as error:
            raise Reject(f"unknown task: {error}") from None

    async def _attempt(self, request: RolloutRequest, task: Task) -> Trajectory | None:
        """Run an attempt to its Trajectory; None when an earlier rollout actor has published it."""
        episode = self._episode(request, task, await self._plugins_of(task))
        resume = await episode.resume_state()
        if resume.finished:
            return None
        if request.policy.kind == "latest" and request.policy.run in ("", self.run):
            # The request was pulled before the first version, or just before the lane was paused. It waits here,
            # because a redelivery would count as a failed delivery.
            version = max(0, request.min_version) if request.lane == "train" else 0
            with self.waiting(f"version {version} for {request.trajectory}"):
                await self._policies.reached(version)

        async with self._serving(request, task, episode) as (engine, renderer):
            try:
                with spans.agent(request):
                    return await episode.run(resume, engine, renderer)
            except asyncio.CancelledError:
                work = asyncio.current_task()
                cancelled = self._cancelled.get(work) if work is not None else None
                if cancelled is None or cancelled.purged or not isinstance(episode, Episode):
                    raise
                if (trajectory := await episode.cancelled(renderer)) is None:
                    raise cancelled from None
                return trajectory

    @asynccontextmanager
    async def _serving(
        self, request: RolloutRequest, task: Task, episode: Episode | MessageEpisode
    ) -> AsyncIterator[tuple[Engine, Any]]:
        """The engine and the format of an attempt; a harness has the format of clients' turns. NoPolicy."""

        def oracle() -> Oracle:
            return self._suite(request.task.suite).oracle(request.task.task)

        if not isinstance(episode, HarnessEpisode):
            async with self._policies.serving(request.policy, task, oracle) as served:
                yield served
        elif request.policy.kind == "scripted":
            raise NoPolicy(f"scripts act in headrace's own agent alone, and {request.harness} was asked for")
        else:
            try:
                async with self._policies.serving_clients(request.policy) as clients:
                    yield clients.engine, clients
            except UnusableConversation as error:
                raise NoPolicy(f"no harness can act: {error}") from None

    async def _plugins_of(self, task: Task) -> tuple[Plugin, ...]:
        """The plugins of an attempt. A tool that only the task names is compared with the run's at its first use.
        NoPolicy."""
        try:
            tools = plugins((TOOLS, tools_of(task)))
            await agree(self.bus, self.run, [tool for tool in tools if tool not in self._agreed])
        except PluginError as error:
            raise NoPolicy(str(error)) from None
        except Unrecoverable as error:
            self.fail(error)
            raise
        self._agreed.update(tools)
        return (*self._plugins, *tools)

    def _episode(self, request: RolloutRequest, task: Task, used: Sequence[Plugin]) -> Episode | MessageEpisode:
        if not task.sandbox:
            return MessageEpisode(request, task, bus=self.bus, rollout=self.id, plugins=used)
        kind: Callable[..., Episode] = Episode
        if request.harness:
            serve = self._policies.serving_clients
            kind = partial(HarnessEpisode, config=self.config, endpoint=self._endpoint, serve=serve)
        return kind(
            request,
            task,
            bus=self.bus,
            sandboxes=self._sandboxes,
            rollout=self.id,
            lease_s=self.config.environment.lease_s,
            waits=self.config.rollout,
            searcher=self._searcher,
            plugins=used,
        )

    async def _wait_on(self, request: RolloutRequest, error: NoCapacity) -> None:
        """Hand back a request that got no sandbox, because a request behind it in the queue may own the capacity that
        it waits for. The request fails once it has waited for `wait_s`, or for `node_wait_s` while no node answers."""
        waited_s, silent_s = request.waited_s + error.waited_s, self._sandboxes.silent_s
        waits = self.config.rollout
        if min(waited_s, silent_s) >= waits.node_wait_s:
            why: Exception = NoEnvironment(
                f"no environment node of run {self.run} answered for {silent_s:.0f} s ([rollout] node_wait_s): start "
                f"one with `headrace actor environment --config TOML --run {self.run}`"
            )
        elif waited_s >= waits.wait_s:
            why = NoCapacity(
                f"no environment node had capacity for {waited_s:.0f} s ([rollout] wait_s): add a node, raise "
                "[environment] max_vms or lower [rollout] credit"
            )
        else:
            await self._republish(msgspec.structs.replace(request, waited_s=waited_s))
            return
        await self._fail(request, why)

    async def _republish(self, request: RolloutRequest) -> None:
        """Hand a request back: publish it again with a higher hand-over count, before the old one is acknowledged."""
        again = msgspec.structs.replace(request, handovers=request.handovers + 1)
        subject = TASK.at(run=request.run, lane=request.lane, suite=token(request.task.suite))
        await self.bus.publish(subject, again, msg_id=f"{request.run}.{request.trajectory}.h{again.handovers}")
        await self.event("handed_back", request.trajectory, lane=request.lane, handovers=again.handovers)

    async def _fail(self, request: RolloutRequest, error: Exception) -> None:
        """Publish a SlotFailed for an attempt that ended without a Trajectory; its issuer may issue the slot again."""
        failed = failure(request, error, self.id)
        subject = FAIL.at(run=request.run, group=request.group)
        await self.bus.publish(subject, failed, msg_id=f"{request.run}.{request.trajectory}.{failed.reason}")
        await self.event("slot_failed", str(error), "warning", reason=failed.reason, trajectory=request.trajectory)

    async def _measure(self) -> None:
        version = self._policies.version
        self.status = f"version {version}, {len(self._running)} running" if version >= 0 else "no version yet"
        await self.metric(
            episodes=self._episodes,
            sampled_tokens=self._tokens,
            running=len(self._running),
            sandboxes=len(self._sandboxes),
            version=version,
        )


def _is_of(request: RolloutRequest, user: str | None) -> bool:
    """Whether a request is one of a user, by hash."""
    return request.group.partition(".")[0] == user
