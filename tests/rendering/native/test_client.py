"""Conversations of clients: what a policy samples is something that its client can send back."""

import json

import pytest

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


@pytest.mark.parametrize("syntax", ["hermes", "glm", "qwen_xml", "kimi_k2"])
def test_results_follow_the_order_of_the_calls(syntax: str) -> None:
    """Clients send them as their tools end, and only one of these formats names the call in a result."""
    native = renderer(syntax)
    assert isinstance(native, NativeRenderer)
    client = ClientRenderer(native, TOOLS)
    question = ClientMessage(role="user", text="read both")
    calls = tuple(ClientCall(id=id, name="bash", arguments=json.dumps({"command": id})) for id in ("c1", "c2", "c3"))
    turn = ClientMessage(role="assistant", calls=calls)
    results = [ClientMessage(role="tool", call_id=call.id, text=f"result {call.id}") for call in calls]
    again = [ClientMessage(role="user", text="again"), turn, *results]
    ordered = [question, turn, *results, *again]
    ended = [question, turn, results[2], results[0], results[1], *again[:2], *reversed(results)]
    assert client.start(ended) == client.start(ordered)
    assert client.delta(ended, 7, stopped=None) == client.delta(ordered, 7, stopped=None)
    text = native.tokenizer.decode(client.delta(ended, 7, stopped=None))
    assert text.index("result c1") < text.index("result c2") < text.index("result c3")
