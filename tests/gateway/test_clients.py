"""The vendors' own SDKs over a real port: keys, formats, errors (`make test-clients`)."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.clients import Served, endpoints, two_reads

openai = pytest.importorskip("openai", reason="the extra `clients` is not installed")
anthropic = pytest.importorskip("anthropic", reason="the extra `clients` is not installed")
pydantic = pytest.importorskip("pydantic", reason="the extra `clients` is not installed")

pytestmark = [pytest.mark.anyio, pytest.mark.clients]

PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with endpoints(tmp_path, two_reads) as started:
        yield started


def openai_client(served: Served) -> Any:
    return openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=served.key, max_retries=0)


async def test_models_and_errors_in_each_dialects_words(served: Served) -> None:
    async with openai_client(served) as client:
        assert [model.id async for model in client.models.list()] == ["latest"]
        with pytest.raises(openai.BadRequestError, match="expected a tool"):
            await client.chat.completions.create(
                model="latest", messages=[{"role": "user", "content": "x"}], tool_choice="required"
            )
        with pytest.raises(openai.BadRequestError, match="an id that this gateway gave"):
            await client.responses.create(model="latest", input="x", previous_response_id="resp_1")
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="hr-wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError, match="unknown or revoked"):
            await client.models.list()
    async with anthropic.AsyncAnthropic(base_url=served.url, api_key=served.key, max_retries=0) as other:
        two_words: Any = [{"role": "user", "content": "two words"}]
        assert (await other.messages.count_tokens(model="latest", messages=two_words)).input_tokens == 2
        with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.role"):
            wrong: Any = [{"role": "robot", "content": "x"}]
            await other.messages.create(model="latest", max_tokens=1, messages=wrong)


async def test_what_a_request_asks_for_reaches_the_sampler(served: Served) -> None:
    """The SDKs' own forms of formats, forced calls, stops, samples and compaction."""
    form = pydantic.create_model("Answer", path=(str, ...))
    said: Any = [{"role": "user", "content": "x"}]
    tools: Any = [{"type": "function", "function": {"name": "read", "parameters": PARAMETERS}}]
    asked = served.sampler.asked
    async with openai_client(served) as client:
        with pytest.raises(ValueError):  # the script answers in prose
            await client.chat.completions.parse(model="latest", messages=said, response_format=form)
        assert json.loads(asked[-1][0].answer)["required"] == ["path"]
        with pytest.raises(ValueError):
            await client.responses.parse(model="latest", input=said, text_format=form)
        assert json.loads(asked[-1][0].answer)["required"] == ["path"]
        made = await client.chat.completions.create(
            model="latest", messages=said, tools=tools, tool_choice="required", stop=["z"], n=2, logprobs=True
        )
        assert len(made.choices) == 2 and made.choices[1].logprobs is not None
        request, _ = asked[-1]
        assert (request.forced, request.stops, request.samples) == (("read",), ("z",), 2)
        compacted = await client.responses.compact(model="latest", input=said)
        assert [item.type for item in compacted.output] == ["message", "compaction"]
        again: Any = [item.model_dump(exclude_none=True, warnings=False) for item in compacted.output]
        await client.responses.create(model="latest", input=[*again, *said])
        assert [message.role for message in asked[-1][0].messages] == ["user"] * 3
    async with anthropic.AsyncAnthropic(base_url=served.url, api_key=served.key, max_retries=0) as other:
        tool: Any = {"name": "read", "input_schema": PARAMETERS}
        await other.messages.create(
            model="latest", max_tokens=9, messages=said, tools=[tool], tool_choice={"type": "tool", "name": "read"},
            stop_sequences=["z"],
        )  # fmt: skip
        assert (asked[-1][0].forced, asked[-1][0].stops) == (("read",), ("z",))
