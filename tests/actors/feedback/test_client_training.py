"""Sessions of clients in all three dialects become a training step in exact mode: the sampler's numbers come back."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.feedback.world import PASSED, RUN, TOOL, Product, Taught, Users, ask, configuration, product
from headrace.config import AgentLimits, Feedback, Gate
from headrace.engines.base import Sample, SampleRequest
from headrace.engines.embedded.engine import EmbeddedEngine
from headrace.messages.ledger import GroupClosed
from headrace.messages.rollout import TokenKinds, Trajectory
from headrace.messages.subjects import CLOSE, STEP, TRAJ
from headrace.messages.training import StepDone, StepFailed

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(300)]

Taken = dict[str, list[tuple[SampleRequest, Sample]]]
"""Session to what the engine was asked for and what it sampled, turn by turn."""
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": ask(1)}]},
    "/v1/responses": {"input": ask(2)},
    "/v1/messages": {"messages": [{"role": "user", "content": ask(3)}], "max_tokens": 24},
}


async def dialects(users: Users) -> list[str]:
    """One session per dialect, that of chat completions with two turns; all rated. Their ids."""
    sessions = []
    for path, body in BODIES.items():
        reply, session = await post(users, path, body)
        if "choices" in reply:
            said = {"role": "assistant", "content": reply["choices"][0]["message"]["content"]}
            more = [*body["messages"], said, {"role": "user", "content": ask(4)}]
            _, again = await post(users, path, {"messages": more})
            assert again == session
        sessions.append(session)
    for number, session in enumerate(sessions):
        await users.rate(session, number % 2 == 0)
    return sessions


async def post(users: Users, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The answer to a turn, and its session."""
    async with users.http.post(f"{users.product.url}{path}", json={"model": "latest"} | body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json(), answer.headers["X-Headrace-Session"]


async def trained(running: Product) -> StepDone:
    """The branch's first step."""
    async for received in running.bus.follow("HR_STEP", STEP.at(run=running.branch)):
        if isinstance(received.message, StepDone | StepFailed):
            assert isinstance(received.message, StepDone), received.message
            return received.message
    raise AssertionError


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Taken:
    taken: Taken = {}
    sample = EmbeddedEngine.sample

    async def recorded(engine: EmbeddedEngine, request: SampleRequest) -> Sample:
        result = await sample(engine, request)
        taken.setdefault(request.session.partition("-0-0/")[0], []).append((request, result))
        return result

    monkeypatch.setattr(EmbeddedEngine, "sample", recorded)
    return taken


async def ended(running: Product) -> dict[str, Trajectory]:
    """The trajectories of the product's sessions, by session."""
    return {
        received.message.group: received.message
        async for received in running.bus.history("HR_TRAJ", TRAJ.where(run=RUN, group="*.*"))
        if isinstance(received.message, Trajectory)
    }


def recorded_as_sampled(trajectory: Trajectory, taken: list[tuple[SampleRequest, Sample]]) -> None:
    """The record holds what the engine read and sampled, id for id and bit for bit."""
    assert len(trajectory.turns) == len(taken) > 0
    context: list[int] = []
    for turn, (request, result) in zip(trajectory.turns, taken, strict=True):
        context += map(int, turn.prompt_ids.tolist())
        assert tuple(context) == request.ids, "the engine read what the record says"
        assert tuple(turn.ids.tolist()) == result.ids and turn.logprobs.tolist() == list(result.logprobs)
        context += map(int, turn.ids.tolist())


async def test_a_step_on_clients_sessions_has_mismatch_zero(tmp_path: Path, taken: Taken) -> None:
    taught = Taught(tests=0.0, tokens=20_000)
    feedback = Feedback(enabled=True, batch=3, user_cap=0)
    config = configuration(tmp_path, 1, feedback, Gate(canary=(0.25,), sessions=1000), taught)
    async with product(tmp_path, config, taught) as running, Users.of(running) as users:
        sessions = await dialects(users)
        step = await trained(running)
        running.check()
        trajectories = await ended(running)
        closings = [
            received.message async for received in running.bus.history("HR_SCORE", CLOSE.where(run=running.branch))
        ]
    assert {each.group for each in closings if isinstance(each, GroupClosed)} == {*sessions} == {*step.groups}
    assert step.exact and step.max_abs_dlp == 0.0 and step.trained_slots == len(sessions), step
    for session in sessions:
        recorded_as_sampled(trajectories[session], taken[session])
    assert sorted(len(trajectories[session].turns) for session in sessions) == [1, 1, 2]


async def chat_session(users: Users, number: int) -> str:
    """A session of chat completions whose first turn has two calls, both answered; empty when it has another."""
    tool = {"type": "function", "function": {"name": TOOL.name, "parameters": TOOL.parameters}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": ask(number)}]
    reply, session = await post(users, "/v1/chat/completions", {"messages": messages, "tools": [tool]})
    choice = reply["choices"][0]
    calls = choice["message"].get("tool_calls") or []
    if len(calls) != 2:
        return ""
    assert choice["finish_reason"] == "tool_calls" and calls[0]["id"] != calls[1]["id"]
    messages += [choice["message"], *({"role": "tool", "tool_call_id": c["id"], "content": PASSED} for c in calls)]
    _, again = await post(users, "/v1/chat/completions", {"messages": messages, "tools": [tool]})
    assert again == session
    return session


async def messages_session(users: Users, number: int) -> str:
    """The same in Anthropic's dialect: one message of the user holds both results."""
    body: dict[str, Any] = {"max_tokens": 64, "tools": [{"name": TOOL.name, "input_schema": TOOL.parameters}]}
    messages: list[dict[str, Any]] = [{"role": "user", "content": ask(number)}]
    reply, session = await post(users, "/v1/messages", body | {"messages": messages})
    calls = [block for block in reply["content"] if block["type"] == "tool_use"]
    if len(calls) != 2:
        return ""
    assert reply["stop_reason"] == "tool_use" and calls[0]["id"] != calls[1]["id"]
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": PASSED} for call in calls]
    messages += [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": results}]
    _, again = await post(users, "/v1/messages", body | {"messages": messages})
    assert again == session
    return session


async def two(open_session: Callable[[Users, int], Awaitable[str]], users: Users) -> list[str]:
    """Two sessions with parallel calls. The policy is sampled: about half of its first turns are as it was taught."""
    sessions: list[str] = []
    for number in range(24):
        if session := await open_session(users, number):
            sessions.append(session)
        if len(sessions) == 2:
            return sessions
    raise AssertionError("of 24 first turns at most one had two calls")


async def test_a_step_on_parallel_calls_of_clients_has_mismatch_zero(tmp_path: Path, taken: Taken) -> None:
    taught = Taught(tests=1.0, tokens=60_000, parallel=1.0)
    feedback = Feedback(enabled=True, batch=4, user_cap=0)
    config = configuration(tmp_path, 1, feedback, Gate(canary=(0.25,), sessions=1000), taught)
    clients = msgspec.structs.replace(config.production, limits=AgentLimits(max_turn_tokens=48))
    config = msgspec.structs.replace(config, production=clients)
    async with product(tmp_path, config, taught) as running, Users.of(running) as users:
        sessions = [*await two(chat_session, users), *await two(messages_session, users)]
        for number, session in enumerate(sessions):
            await users.rate(session, number % 2 == 0)
        step = await trained(running)
        running.check()
        trajectories = await ended(running)
    assert {*step.groups} == {*sessions} and step.exact and step.max_abs_dlp == 0.0, step
    assert step.trained_slots == len(sessions)
    for session in sessions:
        trajectory = trajectories[session]
        recorded_as_sampled(trajectory, taken[session])
        first, last = trajectory.turns
        assert [call.name for call in first.calls] == [TOOL.name] * 2
        assert [(result.call_id, result.output) for result in first.results] == [
            (call.id, PASSED) for call in first.calls
        ]
        assert first.kinds == TokenKinds(thinking=0, calls=len(first.ids) - 2), "all but the line break and the stop id"
        assert len(last.prompt_ids) > 0
