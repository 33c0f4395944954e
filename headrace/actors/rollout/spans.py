"""The spans of an attempt by OpenTelemetry's GenAI conventions: the agent, each generation, each tool call.

A trace store that reads these conventions shows an attempt as a conversation. The conventions are in development, so
their version is pinned (`tracing.SCHEMA`), and a test compares the names here with the package of that version.
Content is not in the spans: it is in the Trajectory, which the attributes name.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from headrace.bus.runtime import tracing
from headrace.engines.base import Sample, Sampler, SampleRequest
from headrace.harness.tools.toolbox import Toolbox
from headrace.messages.rollout import RolloutRequest, ToolCall, ToolResult
from headrace.messages.sandbox import Sandbox
from headrace.messages.tasks import Task

OPERATION, PROVIDER = "gen_ai.operation.name", "gen_ai.provider.name"
CONVERSATION = "gen_ai.conversation.id"
"""On every span of an attempt: the id of its trajectory."""
AGENT, MODEL = "gen_ai.agent.name", "gen_ai.request.model"
TEMPERATURE, MOST_TOKENS = "gen_ai.request.temperature", "gen_ai.request.max_tokens"
INPUT_TOKENS, OUTPUT_TOKENS = "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"
FINISH = "gen_ai.response.finish_reasons"
TOOL, TOOL_CALL = "gen_ai.tool.name", "gen_ai.tool.call.id"


@contextmanager
def agent(request: RolloutRequest) -> Iterator[tracing.TraceSpan]:
    """The span of one attempt on one rollout actor."""
    attributes = {
        OPERATION: "invoke_agent",
        PROVIDER: "headrace",
        AGENT: "headrace",
        CONVERSATION: request.trajectory,
        "hr.run": request.run,
        "hr.lane": request.lane,
        "hr.group": request.group,
        "hr.trajectory": request.trajectory,
        "hr.task": f"{request.task.suite}/{request.task.task}",
    }
    with tracing.span("invoke_agent headrace", attributes=attributes) as span:
        yield span


async def sample(engine: Sampler, request: SampleRequest, conversation: str) -> Sample:
    """One generation in a span. conversation: id of the trajectory. EngineError."""
    model = request.policy.kind
    attributes: dict[str, tracing.Value] = {
        OPERATION: "chat",
        PROVIDER: "headrace",
        CONVERSATION: conversation,
        MODEL: model,
        TEMPERATURE: request.sampling.temperature,
        MOST_TOKENS: request.sampling.max_turn_tokens,
        INPUT_TOKENS: len(request.ids),
    }
    with tracing.span(f"chat {model}", "client", attributes=attributes) as span:
        made = await engine.sample(request)
        answer: dict[str, tracing.Value] = {
            OUTPUT_TOKENS: len(made.ids),
            FINISH: (made.stop,),
            "hr.policy_version": max((each.version for each in made.spans), default=-1),
        }
        span.set(**answer)
    return made


class TracedEngine:
    """An engine whose generations are spans of one conversation."""

    def __init__(self, engine: Sampler, conversation: str) -> None:
        self._engine, self._conversation = engine, conversation

    async def sample(self, request: SampleRequest) -> Sample:
        """`Sampler.sample`."""
        return await sample(self._engine, request, self._conversation)

    async def close(self, session: str) -> None:
        """`Sampler.close`."""
        await self._engine.close(session)


class TracedToolbox(Toolbox):
    """Tools whose calls are spans."""

    async def run(self, call: ToolCall, sandbox: Sandbox, task: Task, prefix: str = "") -> ToolResult:
        """`Toolbox.run`. A call of an unknown tool has no span, because its name is the policy's text."""
        name = call.name if call.name in self.names else "unknown"
        attributes = {
            OPERATION: "execute_tool",
            TOOL: name,
            TOOL_CALL: call.id,
            CONVERSATION: prefix.partition("/")[0],
        }
        with tracing.span(f"execute_tool {name}", attributes=attributes) as span:
            result = await super().run(call, sandbox, task, prefix)
            if not result.ok:
                span.set(**{"error.type": "tool_error"})
        return result
