"""An agent on Anthropic's SDK: `anthropic_sdk.py stream|whole URL KEY` writes files with a tool until the model is
done."""

import sys
from pathlib import Path
from typing import Any

import anthropic

TOOL = {
    "name": "write",
    "description": "Write a file.",
    "input_schema": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "text": {"type": "string"}},
        "required": ["path", "text"],
    },
}


def agent(client: anthropic.Anthropic, stream: bool) -> str:
    """The last answer."""
    messages: list[Any] = [{"role": "user", "content": "write two files"}]
    while True:
        asked: dict[str, Any] = {"model": "latest", "system": "Be brief.", "messages": messages, "tools": [TOOL]}
        asked["max_tokens"] = 1000
        if stream:
            with client.messages.stream(**asked) as events:
                message: Any = events.get_final_message()
        else:
            message = client.messages.create(**asked)
        calls = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            assert message.stop_reason == "end_turn"
            return str(message.content[0].text)
        assert message.stop_reason == "tool_use"
        messages.append({"role": "assistant", "content": [block.model_dump() for block in message.content]})
        for call in calls:
            Path(call.input["path"]).write_text(call.input["text"])
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "written"} for call in calls]
        messages.append({"role": "user", "content": results})


kind, url, key = sys.argv[1:]
print(agent(anthropic.Anthropic(base_url=url, api_key=key), kind == "stream"))
