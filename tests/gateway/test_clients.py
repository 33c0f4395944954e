"""The three dialects, read and written by their vendors' own clients, over a real port (`make test-clients`)."""

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
RESULTS = {"a.py": "one", "b.py": "two"}


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with endpoints(tmp_path, two_reads) as started:
        yield started


def openai_client(served: Served) -> Any:
    return openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=served.key, max_retries=0)


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_completions(served: Served, stream: bool) -> None:
    tools: Any = [{"type": "function", "function": {"name": "read", "parameters": PARAMETERS}}]
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Read both files."}]
    async with openai_client(served) as client:
        while True:
            if stream:
                async with client.chat.completions.stream(
                    model="latest", messages=messages, tools=tools, stream_options={"include_usage": True}
                ) as events:
                    completion: Any = await events.get_final_completion()
            else:
                completion = await client.chat.completions.create(model="latest", messages=messages, tools=tools)
            message = completion.choices[0].message
            assert completion.usage.total_tokens == completion.usage.prompt_tokens + completion.usage.completion_tokens
            if not message.tool_calls:
                break
            assert completion.choices[0].finish_reason == "tool_calls" and len(message.tool_calls) == 2
            messages.append(message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
            for call in message.tool_calls:
                path = json.loads(call.function.arguments)["path"]
                messages.append({"role": "tool", "tool_call_id": call.id, "content": RESULTS[path]})
    assert message.content == "They say one and two."
    request, caller = served.sampler.asked[-1]
    assert [said.role for said in request.messages] == ["system", "user", "assistant", "tool", "tool"]
    assert [call.id for call in request.messages[2].calls] == [said.call_id for said in request.messages[3:]]
    assert caller.key.tenant == "acme" and caller.key.training


@pytest.mark.parametrize("stream", [False, True])
async def test_responses(served: Served, stream: bool) -> None:
    tools: Any = [
        {"type": "function", "name": "read", "parameters": PARAMETERS, "strict": False},
        {"type": "web_search"},
    ]
    items: list[Any] = [{"role": "user", "content": "Read both files."}]
    async with openai_client(served) as client:
        while True:
            asked: dict[str, Any] = {"model": "latest", "input": items, "tools": tools, "instructions": "Be brief."}
            asked |= {"prompt_cache_key": "s-1", "store": False, "include": ["reasoning.encrypted_content"]}
            if stream:
                async with client.responses.stream(**asked) as events:
                    response: Any = await events.get_final_response()
            else:
                response = await client.responses.create(**asked)
            assert response.status == "completed"
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                break
            assert len(calls) == 2
            for item in response.output:
                items.append(item.model_dump(exclude_none=True, exclude={"parsed_arguments"}))
            for call in calls:
                path = json.loads(call.arguments)["path"]
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": RESULTS[path]})
    assert response.output_text == "They say one and two."
    request, caller = served.sampler.asked[-1]
    assert [said.role for said in request.messages] == ["system", "user", "assistant", "tool", "tool"]
    assert len(request.messages[2].calls) == 2 and request.messages[2].text == "I read both."
    assert [tool.name for tool in request.tools] == ["read"] and not caller.session and not caller.name, (
        "a key of caches is no session"
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_messages(served: Served, stream: bool) -> None:
    tools: Any = [{"name": "read", "input_schema": PARAMETERS}]
    messages: list[Any] = [{"role": "user", "content": "Read both files."}]
    async with anthropic.AsyncAnthropic(base_url=served.url, api_key=served.key, max_retries=0) as client:
        while True:
            asked: Any = {"model": "latest", "system": "Be brief.", "messages": messages, "tools": tools}
            asked |= {"max_tokens": 100}
            if stream:
                async with client.messages.stream(**asked) as events:
                    message: Any = await events.get_final_message()
            else:
                message = await client.messages.create(**asked)
            calls = [block for block in message.content if block.type == "tool_use"]
            if not calls:
                break
            assert message.stop_reason == "tool_use" and len(calls) == 2
            messages.append({"role": "assistant", "content": [block.model_dump() for block in message.content]})
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": RESULTS[call.input["path"]]}
                for call in calls
            ]
            messages.append({"role": "user", "content": results})
        counted = await client.messages.count_tokens(
            model="latest", messages=[{"role": "user", "content": "two words"}]
        )
    assert message.content[0].text == "They say one and two." and message.stop_reason == "end_turn"
    assert counted.input_tokens == 2
    request, _ = served.sampler.asked[-1]
    assert [said.role for said in request.messages] == ["system", "user", "assistant", "tool", "tool"]


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
