"""Sessions of clients in all three dialects become a training step in exact mode: the sampler's numbers come back."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.feedback.world import RUN, Product, Taught, Users, ask, configuration, product
from headrace.config import Feedback, Gate
from headrace.engines.base import Sample, SampleRequest
from headrace.engines.embedded.engine import EmbeddedEngine
from headrace.messages.ledger import GroupClosed
from headrace.messages.rollout import Trajectory
from headrace.messages.subjects import CLOSE, STEP, TRAJ
from headrace.messages.training import StepDone, StepFailed

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(300)]

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


async def test_a_step_on_clients_sessions_has_mismatch_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: dict[str, list[tuple[SampleRequest, Sample]]] = {}
    sample = EmbeddedEngine.sample

    async def recorded(engine: EmbeddedEngine, request: SampleRequest) -> Sample:
        result = await sample(engine, request)
        taken.setdefault(request.session.partition("-0-0/")[0], []).append((request, result))
        return result

    monkeypatch.setattr(EmbeddedEngine, "sample", recorded)
    taught = Taught(tests=0.0, tokens=20_000)
    feedback = Feedback(enabled=True, batch=3, user_cap=0)
    config = configuration(tmp_path, 1, feedback, Gate(canary=(0.25,), sessions=1000), taught)
    async with product(tmp_path, config, taught) as running, Users.of(running) as users:
        sessions = await dialects(users)
        step = await trained(running)
        running.check()
        ended = {
            received.message.group: received.message
            async for received in running.bus.history("HR_TRAJ", TRAJ.where(run=RUN, group="*.*"))
            if isinstance(received.message, Trajectory)
        }
        closings = [
            received.message async for received in running.bus.history("HR_SCORE", CLOSE.where(run=running.branch))
        ]
    assert {each.group for each in closings if isinstance(each, GroupClosed)} == {*sessions} == {*step.groups}
    assert step.exact and step.max_abs_dlp == 0.0 and step.trained_slots == len(sessions), step
    for session in sessions:
        turns = ended[session].turns
        assert len(turns) == len(taken[session]) > 0
        context: list[int] = []
        for turn, (request, result) in zip(turns, taken[session], strict=True):
            context += map(int, turn.prompt_ids.tolist())
            assert tuple(context) == request.ids, "the engine read what the record says"
            assert tuple(turn.ids.tolist()) == result.ids and turn.logprobs.tolist() == list(result.logprobs)
            context += map(int, turn.ids.tolist())
    assert sorted(len(ended[session].turns) for session in sessions) == [1, 1, 2]
