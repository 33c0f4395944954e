"""The parts around a feedback actor: a test writes the records that they would write."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import msgspec

from headrace.bus.connection import Bus
from headrace.config import Config, Production
from headrace.config import Feedback as FeedbackSection
from headrace.config import Gate as GateSection
from headrace.config import Run as RunSection
from headrace.gateway.sessions import attempt_record
from headrace.messages import subjects
from headrace.messages.base import Array, Message
from headrace.messages.codec import encode
from headrace.messages.evaluation import EvalRequest, EvalResult
from headrace.messages.ledger import GroupClosed
from headrace.messages.operations import DeadLetter
from headrace.messages.product import Feedback as UserFeedback
from headrace.messages.product import (
    GateVerdict,
    OpenSession,
    Promotion,
)
from headrace.messages.rollout import PolicyRef, RolloutRequest, Span, Trajectory, Turn, TurnDone
from headrace.messages.sandbox import OpResult, SandboxCall, SandboxReply, ToolLog, WriteFiles
from headrace.messages.tasks import TaskRef
from headrace.messages.training import StepDone
from headrace.messages.weights import WeightHead
from tests.conftest import Connect
from tests.support.patience import PATIENCE_S
from tests.support.records import of

BASE = PolicyRef("pinned", 7)
"""The version that the run promotes and the branch begins at."""


def settings(folder: Path, gate: GateSection | None = None, training: bool = True, **feedback: Any) -> Config:
    return Config(
        run=RunSection(dir=str(folder)),
        production=Production(training_allowed=training),
        feedback=FeedbackSection(**({"enabled": True, "batch": 2} | feedback)),
        gate=gate or GateSection(),
    )


class Product:
    """The parts around a feedback actor: what they publish, and what it answers."""

    def __init__(self, connect: Connect, folder: Path) -> None:
        self.connect, self.run, self.folder = connect, f"r{uuid4().hex[:8]}", folder
        self.branch = f"{self.run}-feedback"
        self._buses: dict[str, Bus] = {}
        (folder / self.run).mkdir()

    async def bus(self, role: str) -> Bus:
        if role not in self._buses:
            self._buses[role] = await self.connect(role)
        return self._buses[role]

    async def version(self, version: int, run: str = "") -> None:
        run = run or self.run
        head = WeightHead(run=run, version=version, state_hash=f"h{version}", manifest_seq=1, full_version=0)
        await (await self.bus("weight_sync")).publish(subjects.WEIGHT_HEAD.at(run=run), head)

    async def promote(self, version: int, branch: str = "") -> None:
        where = subjects.EVENT.at(run=self.run, actor="operator", type="promotion")
        promotion = Promotion(run=self.run, version=version, branch=branch, reason="by hand")
        await (await self.bus("operator")).publish(where, promotion)

    async def session(self, policy: PolicyRef, user: str = "ab12", **changes: Any) -> str:
        """The id of the trajectory of a new session."""
        group = f"{user}.{uuid4().hex[:12]}"
        turn = of(
            Turn,
            prompt_ids=Array.of([1, 2], "<i4"),
            ids=Array.of([3], "<i4"),
            logprobs=Array.of([-1.0], "<f4"),
            spans=(Span(0, 2, policy.version),),
        )
        trajectory = of(
            Trajectory,
            run=self.run,
            lane="production",
            group=group,
            id=f"{group}-0-0",
            task=TaskRef("client", "default"),
            policy=policy,
            turns=(turn,),
        )
        trajectory = msgspec.structs.replace(trajectory, **changes)
        await (await self.bus("rollout")).publish(subjects.TRAJ.at(run=self.run, group=group), trajectory)
        return trajectory.id

    async def rate(self, trajectory: str, thumb: Literal["up", "down"] = "up", **changes: Any) -> int:
        user = trajectory.partition(".")[0]
        fields: dict[str, Any] = {"tenant": "default", "training_allowed": True} | changes
        given = UserFeedback(user=user, run=self.run, trajectory=trajectory, thumb=thumb, **fields)
        return await (await self.bus("gateway")).publish(subjects.FEEDBACK.at(tenant="default", user=user), given)

    async def leave_traces(self, user: str) -> RolloutRequest:
        """Records of a user where no subject names the user. Returns the request that waits in HR_TASK."""
        gateway, task = await self.bus("gateway"), TaskRef("workspace", "light")
        request = of(RolloutRequest, run=self.run, lane="production", group=f"{user}.a", task=task, policy=BASE)
        issued = attempt_record(self.run, request.group, task, 0, 0)
        await gateway.publish(subjects.LEDGER.at(run=self.run, group=request.group), issued)
        where = subjects.TASK.at(run=self.run, lane="production", suite="workspace")
        await gateway.publish(where, msgspec.structs.replace(request, prompt="my prompt"))
        await (await gateway.kv("HR_SESSION")).put(
            f"{self.run}.session.{user}.a", OpenSession(request=request, started=0.0)
        )
        lost = msgspec.structs.replace(request, group=f"{user}.b", prompt="my prompt " * 1000)
        payload, headers = encode(lost)
        letter = of(
            DeadLetter,
            stream="HR_TASK",
            stream_seq=1,
            subject=where,
            type="rollout_request",
            headers=headers | {"Nats-Msg-Id": f"{self.run}.{lost.trajectory}"},
            payload=payload,
        )
        await (await self.bus("dead_letter")).publish(subjects.DLQ.at(stream="hr_task", consumer="c"), letter)
        line = ToolLog(
            node="n",
            sandbox="s",
            run=self.run,
            lane="production",
            group=request.group,
            slot=0,
            call_id="c",
            op="exec",
            brief="cat my-file",
            ok=True,
            wall_ms=1.0,
        )
        environment = await self.bus("environment")
        await environment.publish(subjects.EVENT.at(run=self.run, actor="environment", type="tool_log"), line)

        done = TurnDone(run=self.run, trajectory=request.trajectory, index=0, results=())
        await (await self.bus("rollout")).publish(subjects.TURN.at(run=self.run, trajectory=request.trajectory), done)

        async def large(message: Message) -> SandboxReply:
            assert isinstance(message, SandboxCall)
            return SandboxReply(result=OpResult(data=os.urandom(3 << 19)))

        await environment.respond("hr.rpc.environment.rollout.n.call", large)
        call = SandboxCall(
            sandbox="s", secret="s", epoch=1, call_id="c", op=WriteFiles(files={"x": os.urandom(3 << 19)})
        )
        rollout = await self.bus("rollout")
        await rollout.request("hr.rpc.environment.rollout.n.call", call, timeout=PATIENCE_S, owner=user)
        return request

    async def event(self, wanted: Callable[[Any], bool], run: str = "", actor: str = "feedback") -> Any:
        """The first message on the run's events that fits."""
        where = subjects.EVENT.where(run=run or self.run, actor=actor)
        async for received in (await self.bus("operator")).follow("HR_EVENT", where):
            if wanted(received.message):
                return received.message

    async def said(self, kind: str) -> Any:
        return await self.event(lambda message: getattr(message, "kind", "") == kind)

    async def verdict(self, stage: str, version: int) -> GateVerdict:
        verdict_message = await self.event(
            lambda message: (
                isinstance(message, GateVerdict) and message.stage == stage and message.candidate.version == version
            )
        )
        assert isinstance(verdict_message, GateVerdict)
        return verdict_message

    async def opened(self) -> None:
        """Version 7 is promoted, and the branch begins there."""
        await self.version(7)
        await self.promote(7)
        await self.said("branch_opened")

    async def step(self, step: int) -> None:
        """The branch's trainer takes a step."""
        groups = [received.message async for received in (await self.bus("admin")).history(
            "HR_SCORE", subjects.CLOSE.where(run=self.branch)
        )]  # fmt: skip
        names = tuple(each.group for each in groups if isinstance(each, GroupClosed))[2 * step : 2 * step + 2]
        done = of(StepDone, run=self.branch, step=step, groups=names, version=step + 1, trained_slots=2)
        await (await self.bus("trainer")).publish(subjects.STEP.at(run=self.branch), done)

    async def evaluated(self, request: EvalRequest, passes: dict[str, bool]) -> None:
        """Answer a request in place of the evaluator. passes: whether each task passed."""
        passed = sum(passes.values())
        result = EvalResult(
            id=request.id,
            run=self.run,
            suite=request.suite,
            policy=request.policy,
            version=request.policy.version,
            tasks=len(passes),
            passed=passed,
            rate=passed / len(passes),
            infra_failures=0,
            passes=passes,
        )
        where = subjects.EVENT.at(run=self.run, actor="evaluator", type="eval_result")
        await (await self.bus("evaluator")).publish(where, result)
