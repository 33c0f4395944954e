"""The gateway: receives users' requests over HTTP; each session is a RolloutRequest of the lane `production`.

    POST   /v1/sessions                {user, suite, task, prompt?, files?}   -> 202 {session}
                                       without `suite`: a client's session (gateway/endpoints.py)
    GET    /v1/sessions/ID?wait=S      state, turns, failed attempts, result; waits up to S seconds for a change
    POST   /v1/sessions/ID/feedback    {thumb | diff | undo | reward, comment?}; /reward is the same
    DELETE /v1/users/USER              purge a user's data everywhere -> {purged, certificate}
    GET    /healthz                    {run, version, active, waiting}; 503 until a policy is served
    /v1/agents ...                     headrace's own agent in a lasting workspace (gateway/agents/endpoints.py)

Every route but /healthz needs an API key, also for programs of this machine (gateway/tenants/admission.py).

Sessions use the same rollout actors, sandboxes and tools as training. Every session ends: with its Trajectory, with the
failure of its last attempt, with the dead letter of its request, or after `SESSION_S`. The user gets the reason, and
the session no longer counts in the traffic that the scavenger sees.

Open sessions are stored in HR_SESSION and their attempts in the ledger. A gateway that starts reads both and continues
each session from its last attempt in the ledger, so no attempt is issued twice.
"""

import asyncio
import json
import secrets
import time
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from aiohttp import web

from headrace.bus.errors import BusError, WrongSequence
from headrace.bus.runtime.actor import Actor
from headrace.gateway.agents.opening import open_agents
from headrace.gateway.agents.store import GatewayParts, Order
from headrace.gateway.endpoints import Endpoints
from headrace.gateway.forgetting import Forgetting
from headrace.gateway.http import HEALTH, HttpRefused, Listener, answer, read_json, wait_seconds
from headrace.gateway.requests import NewRating, NewSession
from headrace.gateway.serving import ClientServing
from headrace.gateway.sessions import Run, Sessions, asked_by, attempt_record
from headrace.gateway.signals.follow_ups import FollowUps
from headrace.gateway.signals.ratings import Ratings
from headrace.gateway.split import Split
from headrace.gateway.tenants.admission import Admission, check_own, keyed
from headrace.gateway.tenants.keys import ApiKeys, Following
from headrace.gateway.traffic import TrafficReports
from headrace.gateway.user_keys import UserKeys
from headrace.ledger.issuer import Issuer
from headrace.ledger.lost_attempts import REASON, lost_attempt
from headrace.ledger.requests import limits_of, settings_of
from headrace.ledger.state import RunState
from headrace.messages import subjects
from headrace.messages.base import Message
from headrace.messages.operations import DeadLetter
from headrace.messages.product import ApiKey, Feedback, OpenSession, Scope, gate_key, promotion_key
from headrace.messages.rollout import RolloutRequest, Sampling, SlotFailed, Trajectory, TurnDone, TurnSampled
from headrace.messages.tasks import TaskRef
from headrace.messages.weights import WeightsSwapped
from headrace.request_names import RequestNames
from headrace.tasks import UnknownSuite, open_suite
from headrace.tasks.workspace import LIGHT, WORKSPACE

KEPT_BYTES = 512 << 10
"""Files of more bytes are not stored with their session, so the session has no retry after a gateway's restart."""
SESSION_S = 3600.0
"""Seconds after which a session that has not ended fails with the reason `timed_out`."""


class Gateway(Actor):
    """Turns HTTP requests into RolloutRequests, and turns, trajectories, failures and dead letters into answers."""

    role: ClassVar[str] = "gateway"

    async def start(self) -> None:
        """Recover the open sessions, follow the streams, then open the port."""
        folder = Path(self.config.run.dir) / self.run
        self.keys, self.api_keys = UserKeys(), ApiKeys()
        following = Following(self.bus, self.api_keys, self.keys, self.event)
        await following.read()
        self.sessions = Sessions()
        self.split = Split()
        self.ratings = Ratings(self.bus)
        self.follow_ups = FollowUps(self.config, self.spawn, self.event)
        self.version = -1
        self.traffic = TrafficReports(self.bus, self.config, self.run, self.id, self.sessions.runs)
        self._state = RunState(self.run)
        self._issuer = Issuer(self.bus, self._state, lambda issued: self.sessions.runs[issued.group].request)
        self._suite = lru_cache(64)(partial(open_suite, root=self.config.tasks.dir))
        self._incomplete: set[str] = set()
        """Groups of recovered sessions whose files are gone."""
        self._kept = await self.bus.kv("HR_SESSION")
        forgetting = Forgetting(self.bus, self.run, self.id, self.keys, self.ratings, self._drop)
        await forgetting.recover()
        shared = (self.bus, self.config, self.run, self.keys, self.split)
        parts = GatewayParts(*shared, self.sessions, self._open, self.event, self.spawn)
        self.clients = ClientServing(parts, self.ratings, self.traffic)
        await self.clients.start()
        after = await self._recover()
        group = {"run": self.run, "group": "*.*"}
        self.spawn(self._follow_turns(), "turns")
        self.spawn(self._follow_ends("HR_TRAJ", subjects.TRAJ.where(**group), 1), "trajectories")
        self.spawn(self._follow_ends("HR_LEDGER", subjects.FAIL.where(**group), after + 1), "failures")
        self.spawn(self._follow_ends("HR_DLQ", subjects.DLQ.where(stream="*"), 1), "dead letters")
        for key in (promotion_key(self.run), gate_key(self.run)):
            self.spawn(self._follow_split(key), key)
        self.spawn(self._follow_versions(), "versions")
        self.spawn(self.traffic.follow(), "traffic")
        self.every(5.0, self._end_overdue, "session deadlines")
        self.every(5.0, self.clients.end_idle, "idle sessions of clients")
        self.every(5.0, lambda: self.metric(**self.sessions.turns), "figures")
        self.spawn(following.follow(), "API keys")
        production = self.config.production
        admission = Admission(self.api_keys, RequestNames((production.host,), production.public_urls))
        self.turns = Endpoints(self.clients, self._report, production.turns_at_once)
        self.agents, routes = await open_agents(parts, self.ratings, self.follow_ups)
        self.spawn(self.clients.follow(self._take_up), "stored sessions and agents")
        self.spawn(forgetting.follow(), "the deny-list")
        self._listener = Listener(
            [
                web.post("/v1/sessions", keyed(self._create)),
                web.get("/v1/sessions/{session}", keyed(self._read)),
                web.post("/v1/sessions/{session}/feedback", keyed(self._feedback)),
                web.post("/v1/sessions/{session}/reward", keyed(self._feedback)),
                web.delete("/v1/sessions/{session}", keyed(self.turns.close)),
                web.delete("/v1/users/{user}", keyed(forgetting.delete)),
                web.get(HEALTH, self._health),
                *self.turns.routes(),
                *routes,
            ],
            admission.admit,
            self._report,
        )
        url = await self._listener.start(production.host, production.port)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "gateway.json").write_text(json.dumps({"url": url}))
        await self.event("listening", url)

    async def stop(self) -> None:
        """Close the port. Open sessions continue without a gateway; the next one recovers them."""
        if hasattr(self, "_listener"):
            await self._listener.stop()
            await self.follow_ups.close()

    async def _recover(self) -> int:
        """Continue every open session from its state in the ledger. Returns the ledger's last sequence before that."""
        after = await self.bus.last_seq("HR_LEDGER")
        for key, (value, _) in (await self._kept.items(f"{self.run}.session.*.*")).items():
            if isinstance(value, OpenSession):
                session, complete = Run(value.request, value.started), value.complete
            elif isinstance(value, RolloutRequest):  # written by an earlier version
                session, complete = Run(value, time.time()), True
            else:
                continue
            group = key.removeprefix(f"{self.run}.session.")
            self.sessions.runs[group] = session
            if not complete:
                self._incomplete.add(group)
            await self._continue(session)
        return after

    async def _continue(self, session: Run) -> None:
        """Issue the first attempt, publish the request of a running attempt again, or handle a recorded failure."""
        group = session.request.group
        filters = (subjects.LEDGER.at(run=self.run, group=group), subjects.FAIL.at(run=self.run, group=group))
        failed: SlotFailed | None = None
        async for received in self.bus.history("HR_LEDGER", *filters):
            self._state.apply(received.message, received.seq)
            if isinstance(received.message, SlotFailed):
                failed = received.message
        entry = self._state.groups.get(group)
        if entry is None:
            await self._issue(session)
            return
        last = entry.slots[0].last
        session.request = msgspec.structs.replace(session.request, attempt=last.number)
        if last.failed:
            detail = failed.detail if failed is not None and failed.attempt == last.number else ""
            await self._retry(session, last.failed, detail)
        else:
            await self._issuer.request([last.issued])

    # Requests

    def _take_up(self, key: str, entry: Message | None, revision: int) -> None:
        """An entry of HR_SESSION that another gateway may have stored. The end of a session comes with its records."""
        group = key.removeprefix(self._key(""))
        if isinstance(entry, OpenSession) and group not in self.sessions.runs:
            self.sessions.runs[group] = Run(entry.request, entry.started)
            self.sessions.runs[group].elsewhere = True
        elif group.count(".") == 2:
            self.agents.apply(key, entry, revision)

    async def _session(self, request: web.Request, key: ApiKey, scope: Scope = "agents") -> Run | None:
        """The session of headrace's own agent that a request names; None for another id. HttpRefused with 403."""
        if (id := request.match_info["session"]) not in self.sessions.runs:
            await self.clients.caught_up()
        session = self.sessions.runs.get(id)
        if session is not None:
            check_own(self.config.production.tenant, key, scope)
        return session

    async def _create(self, request: web.Request, key: ApiKey) -> web.StreamResponse:
        """Open a session. 400: the body is invalid; 404: there is no such suite or task."""
        asked = await read_json(request, NewSession)
        if not asked.suite:
            return await self.turns.open(request, key)
        check_own(self.config.production.tenant, key, "agents")
        task = TaskRef(suite=asked.suite, task=asked.task)
        try:
            self._suite(task.suite).task(task.task)
        except UnknownSuite as error:
            raise HttpRefused(404, str(error)) from None
        group = f"{self.keys.hash(self.config.production.tenant, asked.user)}.{secrets.token_hex(6)}"
        await self._begin(
            group,
            task,
            policy=self.split.policy(group),
            prompt=asked.prompt,
            files={path: text.encode() for path, text in asked.files.items()},
        )
        return answer({"session": group}, 202)

    async def _open(self, order: Order) -> None:
        """Begin a run of an agent."""
        limits = self.config.production.limits
        await self._begin(
            order.group,
            TaskRef(WORKSPACE, order.image or LIGHT),
            policy=order.policy,
            prompt=order.prompt,
            files=order.files,
            workspace=order.workspace,
            limits=limits_of(limits),
            sampling=Sampling(max_turn_tokens=limits.max_turn_tokens),
        )

    async def _begin(self, group: str, task: TaskRef, **changes: Any) -> None:
        """Open a session and issue its first attempt."""
        settings = settings_of(self.config, temperature=1.0)
        settings = msgspec.structs.replace(settings, isolation="episode", **changes)
        first = attempt_record(self.run, group, task, secrets.randbits(31), 0)
        session = self.sessions.runs[group] = Run(settings.request(first), time.time())
        self.traffic.begun()
        try:
            await self._keep(session)
            await self._issue(session)
        except BusError as error:
            await self._end(session, "bus_error", str(error))
            raise

    async def _read(self, request: web.Request, key: ApiKey) -> web.StreamResponse:
        """A session's state, at once or after the next change."""
        session, wait = await self._session(request, key), wait_seconds(request)
        if session is None:
            return await self.turns.view(request, key)
        if wait > 0 and not session.over:
            changed = session.changed
            try:
                async with asyncio.timeout(wait):
                    await changed.wait()
            except TimeoutError:
                pass
        return answer(session.view())

    async def _feedback(self, request: web.Request, key: ApiKey) -> web.StreamResponse:
        """Record a user's judgement of a finished session."""
        session = await self._session(request, key, "feedback")
        if session is None:
            return await self.turns.rate(request, key)
        given = await read_json(request, NewRating)
        if session.state != "finished":
            raise HttpRefused(400, f"feedback needs a finished session; this one is {session.state}")
        user = session.request.group.partition(".")[0]
        feedback = Feedback(
            tenant=self.config.production.tenant,
            user=user,
            run=self.run,
            trajectory=session.trajectory,
            thumb=given.given,
            signal=given.signal,
            reward=given.reward,
            training_allowed=self.config.production.training_allowed,
            comment=given.comment,
        )
        outcome = await self.ratings.publish(feedback)
        return answer(outcome | {"session": session.request.group, "thumb": feedback.thumb}, 202)

    async def _drop(self, user: str) -> None:
        """Remove what this gateway holds of a user, by hash."""
        for group in [group for group in self.sessions.runs if group.startswith(f"{user}.")]:
            self.sessions.runs.pop(group).on_failure("purged")
            await self._kept.delete(self._key(group))
        await self.clients.forget(user)
        await self.agents.forget(user)

    async def _health(self, request: web.Request) -> web.Response:
        """The version that is served, and the load."""
        load = {"active": self._count("running"), "waiting": self._count("queued")}
        health = {"run": self.run, "version": self.version} | load
        return answer(health, 200 if self.version >= 0 else 503)

    # Sessions

    def _key(self, group: str) -> str:
        """The key of an open session in HR_SESSION."""
        return f"{self.run}.session.{group}"

    def _count(self, state: str) -> int:
        return sum(session.state == state and not session.elsewhere for session in self.sessions.runs.values())

    async def _keep(self, session: Run) -> None:
        """Store an open session in HR_SESSION, so that the next gateway recovers it."""
        request = session.request
        complete = sum(map(len, request.files.values())) <= KEPT_BYTES
        if not complete:
            request = msgspec.structs.replace(request, files={})
        await self._kept.put(
            self._key(request.group), OpenSession(request=request, started=session.started, complete=complete)
        )

    async def _issue(self, session: Run) -> None:
        """Write the session's attempt to the ledger, then publish its request."""
        request = session.request
        issued = attempt_record(self.run, request.group, request.task, request.seed, request.attempt)
        try:
            await self._issuer.issue([issued])
        except WrongSequence as error:  # another gateway of this run issued this attempt first
            await self.event("superseded", str(error), "warning", trajectory=request.trajectory)

    async def _retry(self, session: Run, reason: str, detail: str) -> None:
        """Issue the next attempt, or end the session when no attempt is left."""
        request = session.request
        if reason == "cancelled" or request.attempt + 1 >= self.config.curriculum.attempts:
            await self._end(session, reason, detail)
        elif session.elsewhere:
            session.on_retry(reason, detail)
        elif request.group in self._incomplete:
            await self._end(session, "files_lost", f"attempt {request.attempt} failed: {reason}")
        else:
            session.on_retry(reason, detail)
            await self._issue(session)

    async def _end(self, session: Run, reason: str, detail: str) -> None:
        """End a session without a result."""
        session.on_failure(reason, detail)
        if session.elsewhere:
            return
        await self.event("session_failed", detail, "warning", reason=reason, trajectory=session.request.trajectory)
        await self._discard(session.request.group)

    async def _discard(self, group: str) -> None:
        """Delete the stored state of an open session."""
        self._incomplete.discard(group)
        self._state.groups.pop(group, None)
        await self._kept.delete(self._key(group))

    async def _end_overdue(self) -> None:
        """End the sessions that are older than `SESSION_S`, so that no user waits without end."""
        for session in [*self.sessions.runs.values()]:
            if not session.over and time.time() - session.started > SESSION_S:
                await self._end(session, "timed_out", f"no result within {SESSION_S:g} s")

    async def _follow_turns(self) -> None:
        """Add turns to their sessions, so that users can read them while the agent works."""
        async for received in self.bus.follow("HR_TURN", subjects.TURN.where(run=self.run, trajectory="*.*")):
            record = received.message
            if isinstance(record, TurnSampled | TurnDone):
                session = self.sessions.runs.get(record.trajectory.rsplit("-", 2)[0])
                if session is not None:
                    session.on_turn(record)

    async def _follow_ends(self, stream: str, filter: str, start: int) -> None:
        """Handle the records that end an attempt."""
        async for received in self.bus.follow(stream, filter, start=start):
            match received.message:
                case Trajectory() as trajectory:
                    await self._on_trajectory(trajectory, received.time)
                case SlotFailed() as failed:
                    session = self.sessions.runs.get(failed.group)
                    if session is not None and session.at(failed.attempt):
                        self._state.fail(failed.group, 0, failed.attempt, failed.reason)
                        await self._retry(session, failed.reason, failed.detail)
                case DeadLetter() as letter:
                    await self._on_dead_letter(letter)

    async def _on_trajectory(self, trajectory: Trajectory, time_s: float) -> None:
        # A client's session is the clients', and its attempts in a group that is trained on are nobody's here.
        if trajectory.lane != "production" or trajectory.capture is not None:
            return
        session = self.sessions.runs.get(trajectory.group)
        if session is None:
            session = self.sessions.runs[trajectory.group] = Run(asked_by(trajectory), time_s - trajectory.wall_s)
        if session.on_trajectory(trajectory, time_s):
            await self._discard(trajectory.group)

    async def _on_dead_letter(self, letter: DeadLetter) -> None:
        """A request that no rollout actor could handle ends its session: another attempt would end the same way."""
        lost = lost_attempt(letter)
        if lost is None or lost.run != self.run or letter.stream != "HR_TASK":
            return
        session = self.sessions.runs.get(lost.group)
        if session is not None and session.at(lost.attempt):
            await self._end(session, REASON, letter.reason)

    async def _follow_split(self, key: str) -> None:
        """Follow a value in HR_PRODUCT by which the feedback actor sets the version of new sessions."""
        state = await self.bus.kv("HR_PRODUCT")
        async for _, value, _ in state.watch(key):
            self.split.apply(value)

    async def _follow_versions(self) -> None:
        """Track the newest version that an engine serves."""
        where = subjects.EVENT.where(run=self.run, actor="rollout", type="weights_swapped")
        async for received in self.bus.follow("HR_EVENT", where):
            if isinstance(received.message, WeightsSwapped):
                self.version = max(self.version, received.message.version)
