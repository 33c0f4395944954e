"""Conversations of clients: what a policy samples is something that its client can send back."""

import json

import pytest

from headrace.actors.rollout.client_turns import outline
from headrace.messages.base import Array
from headrace.messages.product import ClientCall, ClientMessage, ClientTool
from headrace.messages.rollout import ToolCall, Turn
from headrace.rendering.native.client import ClientRenderer, UnusableConversation
from headrace.rendering.native.renderer import NativeRenderer
from tests.support.chat_formats import TEMPLATES, renderer

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


ARGUMENTS = {"command": "ls </tool_call>", "l": ["a", 1, {'k"<|im_end|>': 'v "q"'}], "o": {"x": [True, None]}, "n": 3}

QUOTED = ("hermes", "kimi_k2", "llama3")


@pytest.mark.parametrize("syntax", TEMPLATES)
def test_arguments_of_every_type_are_written_as_they_are_read(syntax: str) -> None:
    native = renderer(syntax)
    assert isinstance(native, NativeRenderer)
    given = {key: value for key, value in ARGUMENTS.items() if syntax in QUOTED or key != "n"}  # those add texts alone
    kinds = {"command": "string", "l": "array", "o": "object", "n": "integer"}
    properties = {name: {"type": kind} for name, kind in kinds.items()}
    client = ClientRenderer(native, [ClientTool(name="bash", parameters={"type": "object", "properties": properties})])
    question = ClientMessage(role="user", text="go on")
    call = ClientCall(id="c1", name="bash", arguments=json.dumps(given))
    ids = client.turn([question, ClientMessage(role="assistant", calls=(call,))], "")
    added = set(native.tokenizer.tags.values())
    plain = ClientCall(id="c1", name="bash", arguments=json.dumps(dict.fromkeys(given, "1")))
    shown = client.turn([question, ClientMessage(role="assistant", calls=(plain,))], "")
    assert [id for id in ids if id in added] == [id for id in shown if id in added]
    (read,) = client.parse(ids, prompt=client.start([question])).calls
    assert not read.error and dict(read.arguments) == given


def test_a_turn_of_several_calls_is_refused_where_the_template_shows_one() -> None:
    """The second call vanished, and its result stayed."""
    native = renderer("llama3")
    assert isinstance(native, NativeRenderer) and not native.parallel
    calls = tuple(ClientCall(id=id, name="bash", arguments='{"command": "ls"}') for id in ("c1", "c2"))
    results = [ClientMessage(role="tool", call_id=call.id, text="x") for call in calls]
    history = [ClientMessage(role="user", text="go"), ClientMessage(role="assistant", calls=calls), *results]
    with pytest.raises(UnusableConversation, match="message 1 makes 2 calls"):
        ClientRenderer(native, TOOLS).start(history)


@pytest.mark.parametrize("syntax", TEMPLATES)
@pytest.mark.parametrize("names", [("bash",), ("bash", "browse")])
def test_a_forced_turn_begins_with_a_call(syntax: str, names: tuple[str, ...]) -> None:
    """The arguments do not matter. The policy writes the rest as it writes a call that it chose."""
    native = renderer(syntax)
    assert isinstance(native, NativeRenderer)
    client = ClientRenderer(native, [*TOOLS, ClientTool(name="browse")])
    said = [ClientMessage(role="user", text="list the files")]
    opening, begun = client.start(said), client.forced(said, names)
    for name in names:
        for arguments in ("{}", '{"command": "ls"}'):
            call = ClientCall(id="0", name=name, arguments=arguments)
            turn = client.turn([*said, ClientMessage(role="assistant", calls=(call,))])
            assert begun and turn[: len(begun)] == begun
            (read,) = client.parse(turn, prompt=opening).calls
            assert (read.name, read.arguments, read.error) == (name, json.loads(arguments), "")


@pytest.mark.parametrize("syntax", TEMPLATES)
def test_what_follows_a_recorded_turn_needs_no_text_before_it(syntax: str) -> None:
    native = renderer(syntax)
    assert isinstance(native, NativeRenderer)
    client = ClientRenderer(native, TOOLS)
    calls = tuple(ClientCall(id=f"c{at}", name="bash", arguments='{"command": "ls"}') for at in range(2))
    turns = [
        Turn(
            index=at,
            segment=0,
            prompt_ids=Array.of([1], "<i4"),
            ids=Array.of([1], "<i4"),
            logprobs=Array.of([0.0], "<f4"),
            calls=tuple(ToolCall(id=c.id, name=c.name, arguments=json.loads(c.arguments)) for c in made),
        )
        for at, made in enumerate((calls[:1], (), calls[1:]))
    ]
    history = [
        ClientMessage(role="user", text="list the files"),
        ClientMessage(role="assistant", text="I look.", calls=calls[:1]),
        ClientMessage(role="tool", text="a.py", call_id="c0"),
        ClientMessage(role="assistant", text="One."),
        ClientMessage(role="user", text="again"),
        ClientMessage(role="assistant", calls=calls[1:]),
    ]
    new = [ClientMessage(role="tool", text="b.py", call_id="c1")]
    short = outline(turns)
    whole = client.delta([*history, *new], len(history), stopped=None)
    assert client.delta([*short, *new], len(short), stopped=None) == whole
