"""Any completion is a record and an answer: no parser raises, every call encodes, the time is linear in the text."""

import json
import time
from typing import Any

import msgspec
import pytest

from headrace.rendering.base import Renderer
from headrace.rendering.parsers.base import MOST_CALLS, Completion, Syntax
from headrace.rendering.parsers.registry import SYNTAXES
from headrace.rendering.parsers.values import MOST_DEPTH
from headrace.rendering.schemas import TABLE, tags
from headrace.rendering.terse import TerseRenderer
from headrace.rendering.tokenizer import Tokenizer
from tests.support import chat_formats
from tests.support.completions import call, completions

TYPES: dict[str, Any] = {tool.name: tool.properties for tool in TABLE} | {
    "search": {"query": {"type": "string"}, "x": {"type": ["integer", "null"]}, "lines": {"anyOf": [{"type": "array"}]}}
}


def check(completion: Completion) -> None:
    """All of it encodes, and decodes to an equal completion; an error stands in every call that has no name."""
    for codec in (msgspec.msgpack, msgspec.json):
        assert codec.decode(codec.encode(completion), type=Completion) == completion
    assert len(completion.calls) <= MOST_CALLS + 1
    for each in completion.calls:
        assert "cannot be read (" not in each.error, each.error
        json.dumps(each.arguments, allow_nan=False).encode()


def fuzz(seed: int, count: int) -> int:
    calls = 0
    for number, (syntax, text) in enumerate(completions(seed, count)):
        completion = SYNTAXES[syntax].read(text, TYPES, opened=number % 7 == 0)
        check(completion)
        ends = [0, *(place for part in completion.parts for place in part[1:]), len(text)]
        assert ends == sorted(ends), "parts are in order and do not overlap"
        calls += sum(not each.error for each in completion.calls)
    return calls


def test_a_few_hundred_completions_are_records() -> None:
    assert fuzz(1, 330) > 50


@pytest.mark.slow
def test_a_hundred_thousand_completions_are_records() -> None:
    assert fuzz(2, 100_000) > 10_000


def renderer_of(format: str) -> Renderer:
    if format == "terse":
        return TerseRenderer(Tokenizer.train([chat_formats.TEXT], 700, tags=tags()))
    return chat_formats.renderer(format)


@pytest.mark.parametrize("format", [*chat_formats.TEMPLATES, "terse"])
def test_a_renderer_makes_a_tool_call_of_each(format: str) -> None:
    renderer = renderer_of(format)
    for _, text in completions(3, 8, only=format):
        parsed = renderer.parse(renderer.tokenizer.encode(text))
        assert parsed.calls
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(parsed), type=type(parsed)) == parsed


JSON = ("hermes", "llama3", "kimi_k2", "deepseek", "mistral", "harmony", "pythonic")


@pytest.mark.parametrize("syntax", JSON)
@pytest.mark.parametrize(
    ("value", "reads"),
    [
        ('"\\ud83d\\ude00"', "\U0001f600"),
        ('"\\ud83d"', "half of a surrogate pair"),
        ('["\\ude00\\ud83d"]', "half of a surrogate pair"),
        ('{"\\ud83d": 1}', "half of a surrogate pair"),
        ("[" * (MOST_DEPTH + 1) + "]" * (MOST_DEPTH + 1), "nested deeper than"),
        ("1e999", "no JSON number"),
        ("9" * 30, "more than 64 bits"),
        ('"a\\u0000b"', "a\0b"),
        ("[1, 2.5]", [1, 2.5]),
    ],
)
def test_a_value_is_json_or_the_call_says_why_not(syntax: str, value: str, reads: Any) -> None:
    (read,) = SYNTAXES[syntax].read(call(syntax, "search", [("query", value)]), TYPES).calls
    if isinstance(reads, str) and " " in reads:
        assert reads in read.error and "query" in read.error
    else:
        assert (read.error, read.arguments) == ("", {"query": reads})


@pytest.mark.parametrize(
    "value", ['b"x"', "{1}", "{1: 2}", "1j", "...", "f'{x}'", "a" + ".b" * 900, "x", "0x" + "f" * 5000, "-" * 900 + "1"]
)
def test_python_that_is_no_json_value_is_an_error(value: str) -> None:
    (read,) = SYNTAXES["pythonic"].read(f"[search(query={value})]", TYPES).calls
    assert read.error and not read.arguments
    (named,) = SYNTAXES["pythonic"].read(f"[f{'.b' * 900}()]", TYPES).calls
    assert not named.error and named.name.count(".") == 900


@pytest.mark.parametrize("name", ['["search"]', "1", "null", "{}", '"\\ud83d"'])
def test_a_name_that_is_no_text_is_an_error(name: str) -> None:
    texts = {
        "hermes": f'<tool_call>{{"name": {name}, "arguments": {{}}}}</tool_call>',
        "llama3": f'{{"name": {name}, "parameters": {{}}}}',
        "mistral": f'[TOOL_CALLS][{{"name": {name}, "arguments": {{}}}}]',
    }
    for syntax, text in texts.items():
        read = SYNTAXES[syntax].read(text, TYPES).calls
        assert [bool(each.error) for each in read] == [True] or (syntax, name) == ("llama3", '"\\ud83d"'), (
            syntax,
            read,
        )


@pytest.mark.parametrize("arguments", ["[1]", "1", "null", '"[1]"', '"x"', '{"query": "a", "query": "b"}'])
def test_arguments_that_are_no_object_are_an_error(arguments: str) -> None:
    text = f'<tool_call>{{"name": "search", "arguments": {arguments}}}</tool_call>'
    assert [bool(each.error) for each in SYNTAXES["hermes"].read(text, TYPES).calls] == [True]


@pytest.mark.parametrize("syntax", [each for each in SYNTAXES if each != "harmony"])
def test_a_call_that_thinking_mentions_never_runs(syntax: str) -> None:
    parser = SYNTAXES[syntax]
    begin, end = parser.thinking
    made = call(syntax, "search", [("query", '"a"')])
    for text, count in (
        (f"First. {begin}maybe {made}?{end} No.", 0),
        (f"{begin}one{end}{begin}maybe {made}?{end} No.", 0),
        (f"{begin}one{end} then {begin}maybe {made}", 0),
        (f"{begin}one{end}{begin}two {made}{end}{made}", 1),
    ):
        read = parser.read(text, TYPES)
        assert [each.name for each in read.calls if not each.error] == ["search"] * count, text
        assert "maybe" not in read.content
        assert "".join(text[a:b] for _, a, b in read.parts).count(begin) == text.count(begin)
    if syntax not in ("llama3", "pythonic"):  # there a whole turn is the call
        inside = call(syntax, "search", [("query", f'"{begin}x{end}"')])
        assert parser.read(f"{made}{inside}", TYPES).calls[1].arguments == {"query": f"{begin}x{end}"}


def test_terse_thinking_that_is_never_closed_holds_no_call() -> None:
    renderer = renderer_of("terse")
    (made,) = renderer.parse(renderer.tokenizer.encode('<think>maybe <search query="a"/>')).calls
    assert made.error


def test_a_parser_that_raises_is_an_error_that_the_policy_reads() -> None:
    class Raising(Syntax):
        name = "raising"

        def find(self, text: str, types: Any) -> Any:
            return iter((1 // 0,))

    (read,) = Raising().read("x", TYPES).calls
    assert "ZeroDivisionError" in read.error


def test_a_turn_with_too_many_calls_says_so() -> None:
    read = SYNTAXES["hermes"].read(call("hermes", "finish", []) * (MOST_CALLS + 9), TYPES)
    assert len(read.calls) == MOST_CALLS + 1 and "at most" in read.calls[-1].error
    assert all(not each.error for each in read.calls[:-1])


PIECES = (
    "</arg_value><arg_key>", "</arg_value>", "<tool_call>f", "<invoke name=", "<function=", "<parameter=",
    "<think></think>", "<tool_call>", "<｜tool▁call▁begin｜><｜tool▁call▁end｜>", "[TOOL_CALLS]f[ARGS]{",
    "</parameter>", " ", "\n", "{", '"', "<|channel|>x<|message|>{<|call|>", "<think><tool_call></think>",
    "</tool_call>", "<｜DSML｜function_calls>", "a(", "[",
)  # fmt: skip
HEADS = {
    "glm": "<tool_call>f<arg_key>x</arg_key><arg_value>",
    "qwen_xml": "<function=f><parameter=x>",
    "minimax": '<minimax:tool_call><invoke name="f"><parameter name="x">',
    "dsml": '<｜DSML｜invoke name="f"><｜DSML｜parameter name="x" string="true">',
    "deepseek": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    "mistral": "[TOOL_CALLS]f",
}


def seconds(syntax: str, text: str) -> float:
    """The processor time of one reading."""
    start = time.process_time()
    SYNTAXES[syntax].read(text, TYPES)
    return time.process_time() - start


@pytest.mark.parametrize("syntax", list(SYNTAXES))
def test_the_time_grows_with_the_text_and_not_with_its_square(syntax: str) -> None:
    for piece in PIECES:
        for tail in ("", "x", "</tool_call>x"):
            small, large = (f"{HEADS.get(syntax, '')}{piece * count}{tail}" for count in (250, 4000))
            # 16 times the text. Below half a millisecond the clock decides.
            assert any(seconds(syntax, large) < 80 * max(seconds(syntax, small), 0.0005) for _ in range(3)), (
                piece,
                tail,
            )
