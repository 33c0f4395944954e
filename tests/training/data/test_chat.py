"""Conversations of a file get the ids that reinforcement learning gets for the same conversation."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from headrace.messages.rollout import ToolCall
from headrace.rendering import schemas
from headrace.rendering.native.client import ClientRenderer
from headrace.rendering.native.conversation import answered
from headrace.rendering.native.renderer import NativeRenderer
from headrace.rendering.registry import Renderers
from headrace.training.data.base import complaint
from headrace.training.data.chat import ChatReader
from headrace.training.data.opening import open_chat
from tests.support.chat_formats import TEMPLATES, bundle, bundle_of_run, renderer

TASK, FOUND = "fix mean() <|im_end|> in kit/core.py", "kit/core.py:3: return sum(xs) </tool_call>"
CALLS = [("search", {"query": "def mean"}), ("edit_file", {"path": "kit/core.py", "lines": "3", "text": "  x = 'é'\n"})]
FILE = Path("data.jsonl")


def conversation(count: int) -> dict[str, Any]:
    """Turns of one call each, in OpenAI's form, with the system text and the tools of a task."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": bundle("hermes").system},
        {"role": "user", "content": TASK},
    ]
    for at, (name, arguments) in enumerate(CALLS[:count]):
        function = {"name": name, "arguments": json.dumps(arguments)}
        messages.append(
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": f"c{at}", "type": "function", "function": function}],
            }
        )
        messages.append({"role": "tool", "tool_call_id": f"c{at}", "content": FOUND})
    messages.append({"role": "assistant", "content": "mean() is right now"})
    return {"messages": messages, "tools": [tool.function() for tool in schemas.TABLE]}


QUICK = ("hermes", "qwen_xml")


@pytest.mark.parametrize(
    "syntax", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in sorted(TEMPLATES)]
)
def test_a_conversation_with_calls_has_the_ids_of_reinforcement_learning(syntax: str) -> None:
    native = renderer(syntax)
    assert isinstance(native, NativeRenderer)
    ids, weights = native.prompt(TASK), [0.0] * len(native.prompt(TASK))
    history = []
    for at, call in enumerate(CALLS):
        written = native.turn([call], before=at)
        history.append(answered([ToolCall(id="0", name=call[0], arguments=call[1])], [FOUND]))
        read = native.delta(history, stopped=written[-1])
        ids += [*written, *read]
        weights += [1.0] * len(written) + [0.0] * len(read)
    last = native.turn([], "mean() is right now", before=2)
    document = ChatReader(native).encode(json.dumps(conversation(2)).encode(), FILE)
    assert native.tokenizer.decode(document.ids) == native.tokenizer.decode([*ids, *last])
    assert document.ids == [*ids, *last]
    assert document.weights == weights + [1.0] * len(last)


def test_the_bundle_of_a_run_reads_conversations_with_their_own_tools_and_without() -> None:
    """A run's bundle holds more arguments of some tools than the table of the terse format."""
    bundle = bundle_of_run("hermes")
    reader = open_chat(bundle)
    native = renderer("hermes")
    assert isinstance(native, NativeRenderer)
    line = json.dumps(conversation(2)).encode()
    assert reader.encode(line, FILE).ids == ChatReader(native).encode(line, FILE).ids
    message = Renderers(bundle).open(())  # of a task without a sandbox
    messages = [{"role": "user", "content": TASK}, {"role": "assistant", "content": "4"}]
    messages.insert(0, {"role": "system", "content": bundle.system})
    document = reader.encode(json.dumps({"messages": messages}).encode(), FILE)
    assert document.ids == [*message.prompt(TASK), *message.tokenizer.encode("4"), message.stop_ids[0]]


def test_thinking_is_a_target_where_the_template_writes_it() -> None:
    native = renderer("qwen_xml")
    assert isinstance(native, NativeRenderer)
    plain, line = conversation(1), conversation(1)
    line["messages"][2]["reasoning_content"] = "where is mean?\n"
    line["messages"][4]["reasoning_content"] = "<|im_end|> it was line 3"
    document = ChatReader(native).encode(json.dumps(line).encode(), FILE)
    assert document.ids != ChatReader(native).encode(json.dumps(plain).encode(), FILE).ids
    client = ClientRenderer(native, ())
    turns = [
        [id for id, _ in group]
        for learned, group in itertools.groupby(
            zip(document.ids, document.weights, strict=True), key=lambda pair: pair[1]
        )
        if learned
    ]
    prompt = native.prompt(TASK)
    first, last = (client.parse(turn, prompt=prompt) for turn in turns)
    assert (first.thinking.strip(), [call.name for call in first.calls]) == ("where is mean?", ["search"])
    assert (last.thinking.strip(), last.content.strip()) == ("<|im_end|> it was line 3", "mean() is right now")


def test_thinking_that_the_template_does_not_write_is_refused() -> None:
    native = renderer("hermes")
    assert isinstance(native, NativeRenderer)
    line = conversation(1)
    line["messages"][4]["reasoning_content"] = "it was line 3"
    with pytest.raises(ValueError, match="the chat template of this policy shows no thinking of this turn"):
        ChatReader(native).encode(json.dumps(line).encode(), FILE)
    line["messages"][1]["reasoning_content"] = "x"
    with pytest.raises(ValueError, match=r"of an assistant alone, got that of user at messages\[1\]"):
        ChatReader(native).check(json.dumps(line).encode(), FILE)


def test_a_message_with_weight_0_is_shown_and_not_learned() -> None:
    native = renderer("hermes")
    assert isinstance(native, NativeRenderer)
    line = conversation(1)
    line["messages"][2]["weight"] = 0
    document = ChatReader(native).encode(json.dumps(line).encode(), FILE)
    learned = [id for id, weight in zip(document.ids, document.weights, strict=True) if weight]
    assert native.tokenizer.decode(learned) == "mean() is right now<|im_end|>"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"messages": [{"role": "user", "content": 3}]},
            r"expected `str \| array \| null`, got `int` - at `\$.messages",
        ),
        ({"messages": [{"role": "user", "content": "x"}]}, "expected at least one message of an assistant, got none"),
        ({"messages": [{"role": "tool", "content": "x"}]}, r"expected a call before .* got none at messages\[0\]"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, r"a user's message before an assistant's"),
        ({"tools": [{"function": {"description": "x"}}]}, "missing required field `name`"),
        ({"tools": [{"function": {"name": "x"}, "functions": []}]}, r"unknown field `functions` - at `\$.tools"),
        ({"train": False}, "unknown field `train`"),
        (
            {"messages": [{"role": "assistant", "function_call": {}}]},
            r"unknown field `function_call` - at `\$.messages",
        ),
        ({"messages": [{"role": "assistant", "reasoning": "x"}]}, r"unknown field `reasoning` - at `\$.messages"),
    ],
)
def test_a_conversation_that_is_not_right_says_what_was_expected(change: dict[str, Any], words: str) -> None:
    native = renderer("hermes")
    assert isinstance(native, NativeRenderer)
    with pytest.raises(ValueError) as error:
        ChatReader(native).check(json.dumps(conversation(1) | change).encode(), FILE)
    assert re.search(words, complaint(error.value)), complaint(error.value)
