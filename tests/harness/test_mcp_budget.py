"""A tool of an MCP server in every chat format; its budget holds over a resume."""

from typing import Any

import msgspec
import pytest

from headrace.config.episodes import McpServer
from headrace.harness.loop import run_episode
from headrace.harness.mcp.connection import Connection, Listing, Offered
from headrace.harness.mcp.tools import offer
from headrace.harness.scripted import ScriptedEngine
from headrace.harness.tools.registry import TOOLS, schemas_of
from headrace.messages.rollout import Limits, RolloutRequest, Sampling, ToolResult
from headrace.rendering.registry import Renderers
from headrace.tasks.generated.repositories import make
from headrace.tasks.local import LocalFiles
from tests.support import chat_formats

pytestmark = pytest.mark.anyio
SCHEMA: dict[str, Any] = {
    "properties": {"words": {"type": "string"}, "most": {"type": "integer"}},
    "required": ["words"],
}


@pytest.mark.parametrize("format", sorted(chat_formats.TEMPLATES))
async def test_calls_before_a_resume_count(format: str) -> None:
    connection = Connection("wiki", McpServer(command=("false",), calls=2))
    tools = offer([connection], {"wiki": Listing(version="1", tools=(Offered(name="find", about="", schema=SCHEMA),))})
    task = msgspec.structs.replace(make("train", 4_000_000).task, tools=("wiki/find", "finish"))
    request = RolloutRequest(
        run="r1",
        lane="train",
        group="g1",
        slot=0,
        attempt=0,
        seed=5,
        task=task.ref,
        limits=Limits(context_tokens=100_000, max_tokens=100_000),
        sampling=Sampling(max_turn_tokens=10_000),
    )
    call = ("wiki_find", {"words": "7", "most": "many"})  # refused before the server is started, but counted
    try:
        renderer = Renderers(chat_formats.bundle(format)).open(schemas_of(task.tools))

        def played() -> ScriptedEngine:
            return ScriptedEngine([[call], [call], [call], [("finish", {})]], renderer)

        async def run(**more: Any) -> list[ToolResult]:
            episode = await run_episode(
                sandbox=LocalFiles({}), renderer=renderer, request=request, task=task, engine=played(), **more
            )
            turns.extend(episode.turns)
            assert (episode.outcome, episode.malformed_calls) == ("finished", 0)
            return [turn.results[0] for turn in episode.turns[:3]]

        turns: list[Any] = []
        wrong, refused = "most: expected integer, got 'many'", "the episode has used all 2 calls of wiki"
        assert [result.output for result in await run()] == [wrong, wrong, refused]
        first = turns[:1]
        assert first[0].calls[0].arguments == {"words": "7", "most": "many"}
        assert [result.output for result in await run(resume=first)][1:] == [wrong, refused]
    finally:
        for name, tool in tools.items():
            TOOLS.withdraw(name, tool)
