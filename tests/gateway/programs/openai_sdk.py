"""An agent on OpenAI's SDK: `openai_sdk.py chat|responses URL KEY` writes files with a tool until the model is done."""

import json
import sys
from pathlib import Path
from typing import Any

import openai

FUNCTION: dict[str, Any] = {
    "name": "write",
    "description": "Write a file.",
    "parameters": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "text": {"type": "string"}},
        "required": ["path", "text"],
    },
}


def write(arguments: str) -> str:
    """Run the tool."""
    asked = json.loads(arguments)
    Path(asked["path"]).write_text(asked["text"])
    return "written"


def chat(client: openai.OpenAI, stream: bool) -> str:
    """The last answer."""
    messages: list[Any] = [{"role": "user", "content": "write two files"}]
    tools: Any = [{"type": "function", "function": FUNCTION}]
    while True:
        asked: dict[str, Any] = {"model": "latest", "messages": messages, "tools": tools}
        if stream:
            with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as events:
                completion: Any = events.get_final_completion()
        else:
            completion = client.chat.completions.create(**asked)
        choice, usage = completion.choices[0], completion.usage
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        if not choice.message.tool_calls:
            assert choice.finish_reason == "stop"
            return str(choice.message.content)
        assert choice.finish_reason == "tool_calls"
        messages.append(choice.message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
        for call in choice.message.tool_calls:
            result = write(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def responses(client: openai.OpenAI, stream: bool) -> str:
    """The last answer."""
    items: list[Any] = [{"role": "user", "content": "write two files"}]
    while True:
        asked: dict[str, Any] = {"model": "latest", "input": items, "instructions": "Be brief.", "store": False}
        asked |= {"tools": [{"type": "function", "strict": False} | FUNCTION, {"type": "web_search"}]}
        if stream:
            with client.responses.stream(**asked) as events:
                response: Any = events.get_final_response()
        else:
            response = client.responses.create(**asked)
        assert response.status == "completed"
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return str(response.output_text)
        items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]
        for call in calls:
            result = write(call.arguments)
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


loop, kind, url, key = {"chat": chat, "responses": responses}[sys.argv[1]], *sys.argv[2:]
print(loop(openai.OpenAI(base_url=f"{url}/v1", api_key=key), kind == "stream"))
