"""Sampled tokens by kind, counted by hand from the pieces that a turn is made of."""

import pytest

from headrace.messages.product import ClientTool
from headrace.messages.rollout import TokenKinds
from headrace.rendering.base import Renderer
from headrace.rendering.native.client import ClientRenderer
from headrace.rendering.native.renderer import NativeRenderer
from headrace.rendering.terse import TerseRenderer
from headrace.rendering.tokenizer import Tokenizer
from tests.support import chat_formats

THOUGHT, CALL, TEXT = "the sum, in é🙂", '{"name": "finish", "arguments": {"message": "🙂"}}', "done 🙂"


def tag(renderer: Renderer, text: str) -> int:
    id = renderer.tokenizer.tag(text)
    assert id is not None
    return id


def bytewise(renderer: Renderer, text: str) -> list[int]:
    """Ids of one character each, as no tokenizer encodes the whole text: more of them, and characters in parts."""
    return [id for character in text for id in renderer.tokenizer.encode(character)]


@pytest.mark.parametrize("opened", [False, True], ids=["opened by the policy", "opened by the prompt"])
def test_a_format_with_thinking_counts_it_with_its_markers(opened: bool) -> None:
    renderer = chat_formats.renderer("hermes")
    mark = tag(renderer, "<think>")
    thinking = [*([] if opened else [mark]), *bytewise(renderer, THOUGHT), tag(renderer, "</think>")]
    call = [tag(renderer, "<tool_call>"), *bytewise(renderer, CALL), tag(renderer, "</tool_call>")]
    text = bytewise(renderer, TEXT)
    ids = [*thinking, *text, *call, *call, *renderer.stop_ids[:1]]
    parsed = renderer.parse(ids, prompt=[mark] if opened else [])
    assert (parsed.thinking, parsed.text, [made.name for made in parsed.calls]) == (THOUGHT, TEXT, ["finish"] * 2)
    assert parsed.kinds == TokenKinds(thinking=len(thinking), calls=2 * len(call))
    assert len(renderer.tokenizer.encode(THOUGHT)) < len(thinking) - 2, "sampled ids are counted, not encoded ones"
    cut = renderer.parse(thinking[:-1], prompt=[mark] if opened else [])
    assert cut.kinds == TokenKinds(thinking=len(thinking) - 1, calls=0), (
        "thinking that is not closed is all of the turn"
    )


def test_a_turn_without_thinking_has_none() -> None:
    renderer = chat_formats.renderer("llama3")
    call = bytewise(renderer, '{"name": "finish", "parameters": {}}')
    assert renderer.parse([*call, *renderer.stop_ids[:1]]).kinds == TokenKinds(thinking=0, calls=len(call))
    assert renderer.parse(bytewise(renderer, TEXT)).kinds == TokenKinds(thinking=0, calls=0)


def test_the_terse_format_counts_closed_thoughts_and_the_tags_of_calls() -> None:
    renderer = TerseRenderer(Tokenizer.train(["def f(a):\n    return a\n"], 320))
    encode = renderer.tokenizer.encode
    thinking, call = encode("<think>a <search/> b</think>"), renderer.turn([("finish", {"message": "é🙂"})])[:-1]
    ids = [*thinking, *encode("plain é"), *call, *renderer.turn([("finish", {})])]
    assert renderer.parse(ids).kinds == TokenKinds(thinking=len(thinking), calls=len(call) + 1)
    assert renderer.parse(renderer.turn([("finish", {})], thought="look")).kinds == TokenKinds(thinking=0, calls=1)


def test_a_client_turn_is_counted_with_the_client_tools() -> None:
    native = chat_formats.renderer("hermes")
    assert isinstance(native, NativeRenderer)
    renderer = ClientRenderer(native, [ClientTool(name="finish", description="", parameters={})])
    thinking = [tag(native, "<think>"), *bytewise(native, THOUGHT), tag(native, "</think>")]
    call = [tag(native, "<tool_call>"), *bytewise(native, CALL), tag(native, "</tool_call>")]
    ids = [*thinking, *call, *native.stop_ids[:1]]
    assert renderer.kinds(ids, renderer.parse(ids, prompt=[])) == TokenKinds(thinking=len(thinking), calls=len(call))
