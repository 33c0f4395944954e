"""The gateway: users speak HTTP, the house speaks messages.

    POST   /v1/sessions                {user, suite, task, prompt?, files?}   -> 202 {session}
    GET    /v1/sessions/ID?wait=S      state, turns so far, changed files; waits up to S seconds for news
    POST   /v1/sessions/ID/feedback    {thumb: up|down, comment?}
    DELETE /v1/users/USER              forget a user everywhere
    GET    /healthz                    {run, version, active, waiting}; 503 until a policy is served
    GET    /metrics

A session is a RolloutRequest like any other, on the lane `production`: same rollout actor, same sandbox, same tools.
"""

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from aiohttp import web

from headrace.actors.gateway_sessions import Session, UserKeys
from headrace.bus.actor import Actor
from headrace.messages import subjects
from headrace.messages.ledger import SlotIssued
from headrace.messages.operations import Ack
from headrace.messages.product import Feedback, Promotion, PurgeUser, Traffic
from headrace.messages.rollout import (
    Limits,
    PolicyRef,
    RolloutRequest,
    Sampling,
    SlotFailed,
    Trajectory,
    TurnDone,
    TurnSampled,
)
from headrace.messages.tasks import TaskRef
from headrace.messages.weights import WeightsSwapped

MAX_BODY = 32 << 20
KEPT_BYTES = 512 << 10
"""A request with more bytes of files than this can't be tried again after a restart of the gateway."""


class BadRequest(Exception):
    """The user's request can't be used; the text says what to send instead."""


class Gateway(Actor):
    """HTTP in, RolloutRequests out; turns and trajectories in, answers out."""

    role: ClassVar[str] = "gateway"

    async def start(self) -> None:
        """Rebuild sessions (open ones from HR_STATE, finished ones from their trajectories), then open the port."""
        folder = Path(self.config.run.dir) / self.run
        self.keys = UserKeys(folder / "user.key")
        self.sessions: dict[str, Session] = {}
        self.promoted = PolicyRef()
        self.version = -1
        self.requests: list[float] = []
        production = {"run": self.run, "group": "*.*"}
        self.open_requests = await self.bus.kv("HR_STATE")
        for key, (request, _) in (await self.open_requests.items(f"{self.run}.session.*.*")).items():
            if isinstance(request, RolloutRequest):
                self.sessions[key.removeprefix(f"{self.run}.session.")] = Session(request, time.time())
        self.spawn(self.follow_turns(), "turns")
        self.spawn(self.follow_ends(subjects.TRAJ.where(**production), "HR_TRAJ"), "trajectories")
        self.spawn(self.follow_ends(subjects.FAIL.where(**production), "HR_LEDGER"), "failures")
        self.spawn(self.follow_promotions(), "promotions")
        self.spawn(self.follow_versions(), "versions")
        self.every(1.0, self.publish_traffic, "traffic")
        await self.listen_http(folder / "gateway.json")

    async def listen_http(self, address_file: Path) -> None:
        """Serve on the configured port, or a free one, and say where."""
        app = web.Application(client_max_size=MAX_BODY)
        app.add_routes(
            [
                web.post("/v1/sessions", self.guarded(self.create)),
                web.get("/v1/sessions/{session}", self.guarded(self.read)),
                web.post("/v1/sessions/{session}/feedback", self.guarded(self.thumb)),
                web.delete("/v1/users/{user}", self.guarded(self.forget)),
                web.get("/healthz", self.guarded(self.health)),
                web.get("/metrics", self.metrics_page),
            ]
        )
        self.runner = web.AppRunner(app, access_log=None)
        await self.runner.setup()
        site = web.TCPSite(self.runner, self.config.production.host, self.config.production.port)
        await site.start()
        host, port = self.runner.addresses[0][:2]
        address_file.write_text(json.dumps({"url": f"http://{host}:{port}"}))
        await self.event("listening", f"http://{host}:{port}", port=port)

    async def stop(self) -> None:
        """Close the port; sessions go on without us and are found again."""
        await self.runner.cleanup()

    @staticmethod
    def guarded(
        handler: Callable[[web.Request], Awaitable[dict[str, Any]]],
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        """JSON out, and one sentence for what the caller did wrong."""

        async def respond(request: web.Request) -> web.Response:
            try:
                answer = await handler(request)
            except BadRequest as error:
                return web.json_response({"error": str(error)}, status=400)
            except KeyError:
                return web.json_response({"error": "there is no such session"}, status=404)
            ready = answer.get("version", 0) >= 0
            return web.json_response(answer, status=202 if request.method == "POST" else 200 if ready else 503)

        return respond

    async def body(self, request: web.Request) -> dict[str, Any]:
        """The request's JSON object."""
        try:
            value = await request.json()
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise BadRequest("the body must be a JSON object") from None
        if not isinstance(value, dict):
            raise BadRequest("the body must be a JSON object")
        return value

    async def create(self, request: web.Request) -> dict[str, Any]:
        """A new session."""
        body = await self.body(request)
        user, suite, task = (str(body.get(key, "")) for key in ("user", "suite", "task"))
        files = body.get("files", {})
        if not user or not suite or not task:
            raise BadRequest("a session needs user, suite and task (and may bring prompt and files)")
        if not isinstance(files, dict) or not all(isinstance(text, str) for text in files.values()):
            raise BadRequest("files maps paths to texts")
        group = f"{self.keys.hash(self.config.production.tenant, user)}.{secrets.token_hex(6)}"
        limits = self.config.limits
        rollout = RolloutRequest(
            run=self.run,
            lane="production",
            group=group,
            slot=0,
            attempt=0,
            task=TaskRef(suite=suite, task=task),
            seed=secrets.randbits(31),
            policy=self.promoted,
            sampling=Sampling(max_turn_tokens=limits.max_turn_tokens),
            limits=Limits(
                max_turns=limits.max_turns,
                max_tokens=limits.max_tokens,
                context_tokens=limits.context_tokens,
                wall_s=limits.wall_s,
                max_parallel_calls=limits.max_parallel_calls,
            ),
            isolation="episode",
            prompt=str(body.get("prompt", "")),
            files={path: text.encode() for path, text in files.items()},
        )
        self.sessions[group] = Session(rollout, time.time())
        if sum(map(len, rollout.files.values())) <= KEPT_BYTES:
            await self.open_requests.put(self.key(group), rollout)
        self.requests.append(time.monotonic())
        await self.issue(rollout)
        return {"session": group}

    async def issue(self, request: RolloutRequest) -> None:
        """Ledger first, then the request: what was asked for is never forgotten."""
        issued = SlotIssued(
            run=self.run,
            lane="production",
            group=request.group,
            index=0,
            slot=0,
            attempt=request.attempt,
            group_size=1,
            task=request.task,
            seed=request.seed,
            min_version=0,
        )
        await self.bus.publish(
            subjects.LEDGER.at(run=self.run, group=request.group), issued, msg_id=f"issued.{request.trajectory}"
        )
        subject = subjects.TASK.at(run=self.run, lane="production", suite=subjects.token(request.task.suite))
        await self.bus.publish(subject, request, msg_id=f"request.{request.trajectory}")

    async def read(self, request: web.Request) -> dict[str, Any]:
        """A session's state, at once or after the next change."""
        session = self.sessions[request.match_info["session"]]
        wait = min(float(request.query.get("wait", 0) or 0), 60.0)
        if wait > 0 and not session.over:
            changed = session.changed
            try:
                async with asyncio.timeout(wait):
                    await changed.wait()
            except TimeoutError:
                pass
        return session.view()

    async def thumb(self, request: web.Request) -> dict[str, Any]:
        """A user's judgement on a finished session."""
        session = self.sessions[request.match_info["session"]]
        body = await self.body(request)
        if body.get("thumb") not in {"up", "down"}:
            raise BadRequest("thumb is 'up' or 'down'")
        if session.state != "finished":
            raise BadRequest("a thumb needs a finished session")
        user = session.request.group.partition(".")[0]
        feedback = Feedback(
            tenant=self.config.production.tenant,
            user=user,
            run=self.run,
            trajectory=session.trajectory,
            thumb=body["thumb"],
            training_allowed=self.config.production.training_allowed,
            comment=str(body.get("comment", ""))[:2000],
        )
        subject = subjects.FEEDBACK.at(tenant=subjects.token(feedback.tenant), user=user)
        await self.bus.publish(subject, feedback, msg_id=f"thumb.{session.trajectory}.{feedback.thumb}")
        return {"session": session.request.group, "thumb": feedback.thumb}

    async def forget(self, request: web.Request) -> dict[str, Any]:
        """Purge a user from every stream that can hold the user's data."""
        user = self.keys.hash(self.config.production.tenant, request.match_info["user"])
        for group in [group for group in self.sessions if group.startswith(f"{user}.")]:
            del self.sessions[group]
            await self.open_requests.delete(self.key(group))
        subject = subjects.RPC.at(service="feedback", method="purge")
        answer = await self.bus.request(subject, PurgeUser(user=user), timeout=30.0)
        if not isinstance(answer, Ack) or not answer.ok:
            raise BadRequest(getattr(answer, "detail", "the purge was not done"))
        return {"purged": answer.detail}

    async def health(self, request: web.Request) -> dict[str, Any]:
        """What is served, and how loaded it is."""
        return {
            "run": self.run,
            "version": self.version,
            "active": self.count("running"),
            "waiting": self.count("queued"),
        }

    async def metrics_page(self, request: web.Request) -> web.Response:
        """Prometheus exposition."""
        states = ("queued", "running", "finished", "failed")
        lines = ["# TYPE headrace_sessions gauge"]
        lines += [f'headrace_sessions{{state="{state}"}} {self.count(state)}' for state in states]
        return web.Response(text="\n".join(lines) + "\n")

    def key(self, group: str) -> str:
        """Where an open request is kept in HR_STATE."""
        return f"{self.run}.session.{group}"

    def count(self, state: str) -> int:
        """Sessions in a state."""
        return sum(session.state == state for session in self.sessions.values())

    async def publish_traffic(self) -> None:
        """Load of the last second, for the scavenger."""
        now = time.monotonic()
        self.requests = [moment for moment in self.requests if now - moment < 10.0]
        traffic = Traffic(
            region=self.config.bus.region,
            run=self.run,
            active=self.count("running"),
            waiting=self.count("queued"),
            requests_per_s=len(self.requests) / 10.0,
            capacity=len(self.config.production.rollouts),
        )
        await self.bus.emit(subjects.TRAFFIC.at(region=subjects.token(traffic.region)), traffic)

    async def follow_turns(self) -> None:
        """Show users what happens while it happens."""
        async for received in self.bus.follow("HR_TURN", subjects.TURN.where(run=self.run, trajectory="*.*")):
            record = received.message
            if isinstance(record, TurnSampled | TurnDone):
                session = self.sessions.get(record.trajectory.rsplit("-", 2)[0])
                if session is not None and not session.over:
                    session.on_turn(record)

    async def follow_ends(self, filter: str, stream: str) -> None:
        """Trajectories end sessions; failures of our own parts are tried again, then said."""
        async for received in self.bus.follow(stream, filter):
            record = received.message
            if not isinstance(record, Trajectory | SlotFailed):
                continue
            session = self.sessions.get(record.group)
            if session is None and isinstance(record, Trajectory):
                session = self.sessions[record.group] = Session(asked_by(record), received.time - record.wall_s)
            if session is None or session.over:
                continue
            if isinstance(record, Trajectory):
                session.on_trajectory(record, received.time)
            elif record.attempt == session.request.attempt:
                await self.again(session, record)
            if session.over:
                await self.open_requests.delete(self.key(record.group))

    async def again(self, session: Session, failed: SlotFailed) -> None:
        """Another attempt, or the end."""
        if failed.attempt + 1 >= self.config.curriculum.attempts:
            session.on_failure(failed.reason)
            return
        session.request = msgspec.structs.replace(session.request, attempt=failed.attempt + 1)
        session.state, session.turns = "queued", []
        await self.issue(session.request)

    async def follow_promotions(self) -> None:
        """New sessions get the newest version that passed the gate."""
        async for received in self.bus.follow(
            "HR_EVENT", subjects.EVENT.where(run=self.run, actor="feedback", type="promotion")
        ):
            if isinstance(received.message, Promotion):
                self.promoted = PolicyRef(kind="pinned", version=received.message.version)

    async def follow_versions(self) -> None:
        """The newest version that an engine serves: before the first there is nothing to offer."""
        async for received in self.bus.follow(
            "HR_EVENT", subjects.EVENT.where(run=self.run, actor="rollout", type="weights_swapped")
        ):
            if isinstance(received.message, WeightsSwapped):
                self.version = max(self.version, received.message.version)


def asked_by(trajectory: Trajectory) -> RolloutRequest:
    """The request behind a finished session of a gateway before this one."""
    return RolloutRequest(
        run=trajectory.run,
        lane="production",
        group=trajectory.group,
        slot=trajectory.slot,
        attempt=trajectory.attempt,
        task=trajectory.task,
        seed=trajectory.seed,
        policy=trajectory.policy,
    )
