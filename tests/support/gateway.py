"""A gateway over real HTTP and a real broker; the test writes the records that a rollout actor would write."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self

import aiohttp

from headrace.actors.gateway import Gateway
from headrace.bus.connection import Bus
from headrace.config import Config, Production, Run
from headrace.messages import subjects
from headrace.messages.codec import encode
from headrace.messages.operations import DeadLetter
from headrace.messages.product import SCOPES
from headrace.messages.rollout import RolloutRequest, SlotFailed, Trajectory
from tests.support.api_keys import made
from tests.support.patience import PATIENCE_S


class OpenGateway:
    """A gateway whose requests the test answers in place of a rollout actor."""

    def __init__(self, connect: Callable[..., Awaitable[Bus]], folder: Path, run: str, **production: Any) -> None:
        self.connect, self.folder, self.run = connect, folder, run
        self.config = Config(run=Run(dir=str(folder)), production=Production(training_allowed=True, **production))
        self.owner: dict[str, Any] = {"tenant": "default", "scopes": SCOPES, "requests_per_minute": 60_000}
        self.key = ""

    @property
    def headers(self) -> dict[str, str]:
        """With the key of every call."""
        return {"x-api-key": self.key}

    async def open(self) -> Self:
        """Start the gateway, or another one after it."""
        (self.folder / self.run).mkdir(parents=True, exist_ok=True)
        self.key = self.key or await made(await self.connect("operator"), **self.owner)
        self.gateway = Gateway(self.config, await self.connect("gateway"), self.run, "gateway-1")
        await self.gateway.start()
        self.rollout, self.admin = await self.connect("rollout"), await self.connect("admin")
        self.url = json.loads((self.folder / self.run / "gateway.json").read_text())["url"]
        return self

    async def other(self, tenant: str, **options: Any) -> str:
        """A further key, which the gateway knows."""
        return await made(await self.connect("operator"), tenant, self.gateway, **options)

    async def until(self, happened: asyncio.Event) -> None:
        """Wait for an effect of the gateway, or raise the error of a gateway that fails: no supervisor restarts it."""
        waiting = asyncio.ensure_future(happened.wait())
        await asyncio.wait((waiting, self.gateway.failed), timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        if self.gateway.failed.done():
            raise self.gateway.failed.result()
        assert waiting.done(), f"not within {PATIENCE_S:g} s"

    async def call(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """The status and the JSON of an answer."""
        sent = self.headers | {name.replace("_", "-"): value for name, value in headers.items()}
        async with aiohttp.ClientSession() as http:
            async with http.request(method, self.url + path, json=body, headers=sent) as answer:
                return answer.status, await answer.json()

    async def request(self) -> RolloutRequest:
        """The newest request of the production lane."""
        newest = await self.admin.last("HR_TASK", subjects.TASK.where(run=self.run, lane="production"))
        assert newest is not None and isinstance(newest.message, RolloutRequest)
        return newest.message

    async def finish(self, request: RolloutRequest, diff: dict[str, bytes], deleted: tuple[str, ...] = ()) -> None:
        """Publish the trajectory of a request."""
        trajectory = Trajectory(
            run=self.run,
            lane="production",
            group=request.group,
            slot=0,
            attempt=request.attempt,
            id=request.trajectory,
            task=request.task,
            family="",
            seed=0,
            policy=request.policy,
            sampling=request.sampling,
            outcome="finished",
            turns=(),
            diff=diff,
            deleted=deleted,
        )
        await self.rollout.publish(subjects.TRAJ.at(run=self.run, group=request.group), trajectory)

    async def fail(self, request: RolloutRequest, reason: str = "sandbox_lost") -> None:
        """Publish that a request's attempt failed."""
        failed = SlotFailed(
            run=self.run, lane="production", group=request.group, slot=0, attempt=request.attempt, reason=reason
        )
        await self.rollout.publish(subjects.FAIL.at(run=self.run, group=request.group), failed)

    async def dead_letter(self, request: RolloutRequest) -> None:
        """Publish a request as a dead letter, as one that no rollout actor can handle."""
        payload, headers = encode(request)
        letter = DeadLetter(
            stream="HR_TASK",
            consumer=f"rollout-{self.run}-production",
            stream_seq=1,
            subject="",
            type="rollout_request",
            reason="unknown task",
            deliveries=5,
            headers=headers,
            payload=payload,
        )
        bus = await self.connect("dead_letter")
        await bus.publish(subjects.DLQ.at(stream="hr_task", consumer="rollout"), letter)
