"""The spans of an attempt follow the GenAI conventions of the pinned version."""

import asyncio

import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as pinned
from opentelemetry.semconv.schemas import Schemas

from headrace.actors.rollout import spans
from headrace.bus.runtime import tracing
from headrace.harness.loop import run_episode
from headrace.harness.prompt import toolbox_for
from headrace.messages.rollout import PolicyRef, RolloutRequest
from headrace.rendering import schemas
from headrace.rendering.terse import TerseRenderer
from headrace.rendering.tokenizer import Tokenizer
from headrace.tasks.generated.repositories import make
from headrace.tasks.local import LocalFiles
from tests.bus.runtime.test_tracing import Collector
from tests.bus.runtime.test_tracing import collector as collector
from tests.harness.conftest import Played
from tests.support.spans import orphans, received

pytestmark = pytest.mark.anyio


async def test_an_attempt_is_a_conversation_of_turns_and_tool_calls(collector: Collector) -> None:
    made = make("train", 77)
    renderer = TerseRenderer(Tokenizer.train((), 256 + len(schemas.tags())))
    request = RolloutRequest(
        run="r1", lane="train", group="g1", slot=0, attempt=0, task=made.task.ref, seed=5, policy=PolicyRef()
    )
    turns = [renderer.turn([("read_file", {"path": "nowhere.py"})]), renderer.turn([("finish", {})])]
    with spans.agent(request):
        await run_episode(
            engine=spans.TracedEngine(Played(turns, renderer.stop_ids), request.trajectory),
            sandbox=LocalFiles(made.task.files),
            renderer=renderer,
            request=request,
            task=made.task,
            toolbox=toolbox_for(made.task, None, 4000, kind=spans.TracedToolbox),
        )
    await asyncio.to_thread(tracing.shutdown)
    seen = [received(span) for span in collector.spans]
    assert not orphans(seen) and {span.attributes[spans.CONVERSATION] for span in seen} == {request.trajectory}
    (agent,) = (span for span in seen if span.name == "invoke_agent headrace")
    assert not agent.parent and {span.parent for span in seen if span is not agent} == {agent.id}
    chats = [span for span in seen if span.name == "chat latest"]
    assert [span.attributes[spans.OUTPUT_TOKENS] for span in chats] == [str(len(turn)) for turn in turns]
    assert {span.attributes["hr.policy_version"] for span in chats} == {"3"}
    tools = {span.attributes[spans.TOOL_CALL]: span for span in seen if span.name.startswith("execute_tool ")}
    assert tools["0.0"].name == "execute_tool read_file" and tools["0.0"].attributes["error.type"] == "tool_error"
    assert tools["1.0"].name == "execute_tool finish" and "error.type" not in tools["1.0"].attributes


def test_names_are_those_of_the_pinned_conventions() -> None:
    used_names = {value for name, value in vars(spans).items() if name.isupper() and str(value).startswith("gen_ai.")}
    published = {value for name, value in vars(pinned).items() if name.startswith("GEN_AI_")}
    assert len(used_names) > 10 and used_names <= published
    assert tracing.SCHEMA == Schemas.V1_44_0.value
