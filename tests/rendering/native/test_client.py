"""Conversations of clients: what a policy samples is something that its client can send back."""

import json

from headrace.messages.product import ClientCall, ClientMessage, ClientTool
from headrace.rendering.native.client import ClientRenderer
from headrace.rendering.native.renderer import NativeRenderer
from tests.support.chat_formats import renderer

TOOLS = [ClientTool(name="bash", parameters={"type": "object", "properties": {"command": {"type": "string"}}})]


def test_a_call_that_could_not_be_sent_back_is_none() -> None:
    native = renderer("hermes")
    assert isinstance(native, NativeRenderer)
    client = ClientRenderer(native, TOOLS)
    prompt = client.start([ClientMessage(role="user", text="list the files")])
    written = "\n".join(
        f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        for call in (
            {"name": "", "arguments": {}},
            {"name": "a b", "arguments": {}},
            {"name": "bash", "arguments": {"a b": "1"}},
            {"name": "bash", "arguments": {"command": "ls"}},
        )
    )
    calls = client.parse(native.tokenizer.encode(written), prompt=prompt).calls
    assert [bool(call.error) for call in calls] == [True, True, True, False]
    # The one that is left goes through the next prompt.
    sent = tuple(
        ClientCall(id=str(at), name=call.name, arguments=json.dumps(call.arguments))
        for at, call in enumerate(calls)
        if not call.error
    )
    assert client.start(
        [ClientMessage(role="user", text="list the files"), ClientMessage(role="assistant", calls=sent)]
    )
