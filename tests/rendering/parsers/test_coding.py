"""22 cases of code in calls that parsers of other engines get wrong: markers in values, indentation, cut turns."""

from typing import Any

import pytest

from headrace.rendering.parsers.base import Completion, Part
from headrace.rendering.parsers.registry import SYNTAXES

EDIT = {"path": {"type": "string"}, "text": {"type": "string"}, "line": {"type": "integer"}}
TYPES: dict[str, dict[str, Any]] = {"edit": EDIT, "run": {"command": {"type": "string"}}, "finish": {}}
Calls = list[tuple[str, dict[str, Any]]]


def xml(path: str, text: str) -> str:
    return (
        f"<tool_call>\n<function=edit>\n<parameter=path>\n{path}\n</parameter>\n<parameter=text>\n{text}\n</parameter>\n"
        "</function>\n</tool_call>"
    )


def glm(path: str, text: str) -> str:
    return (
        f"<tool_call>edit\n<arg_key>path</arg_key>\n<arg_value>{path}</arg_value>\n"
        f"<arg_key>text</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    )


def dsml(path: str, text: str) -> str:
    value = '<｜DSML｜parameter name="{}" string="true">{}</｜DSML｜parameter>\n'
    body = value.format("path", path) + value.format("text", text)
    return f'<｜DSML｜function_calls>\n<｜DSML｜invoke name="edit">\n{body}</｜DSML｜invoke>\n</｜DSML｜function_calls>'


HERMES_RUN = '<tool_call>\n{"name": "run", "arguments": {"command": "ls"}}\n</tool_call>'
INDENTED = "        if x:\n\t\treturn 1\n    "
HTML = "<div>\n  <p>a &amp; b</p>\n</div>"
GENERIC = "List<int> xs = new List<int>();\nif (a < b && c > d) {}"

CASES: list[tuple[str, str, str, bool, Calls]] = [
    # A call that thinking only mentions does not run.
    ("hermes", "mention, closed", f"<think>maybe {HERMES_RUN}?</think>\nNo.", False, []),
    ("hermes", "mention, opened by the prompt", f"maybe {HERMES_RUN}?\n</think>\nNo.", True, []),
    ("hermes", "mention, then the call", f"not {HERMES_RUN}</think>{HERMES_RUN}", True, [("run", {"command": "ls"})]),
    ("qwen_xml", "thinking that is cut", f"<think>\n{xml('a', 'b')}", False, []),
    # Prose that looks like markup is not a call.
    ("hermes", "generics in prose", f"Use {GENERIC} and {HTML}.", False, []),
    ("qwen_xml", "markup in prose", f"Write `<parameter=x>` or {HTML} here.", False, []),
    ("llama3", "JSON in prose", '{"name": "Ada", "parameters": "none"}', False, []),
    ("pythonic", "a list that is no calls", "[1, 2, 3]", False, []),
    # Values are taken as they are.
    ("qwen_xml", "indentation", xml("a.py", INDENTED), False, [("edit", {"path": "a.py", "text": INDENTED})]),
    ("qwen_xml", "markup", xml("a.html", HTML), False, [("edit", {"path": "a.html", "text": HTML})]),
    ("glm", "generics", glm("A.cs", GENERIC), False, [("edit", {"path": "A.cs", "text": GENERIC})]),
    ("dsml", "indentation", dsml("a.py", INDENTED), False, [("edit", {"path": "a.py", "text": INDENTED})]),
    ("qwen_xml", "a number as text", xml("007", "1.0"), False, [("edit", {"path": "007", "text": "1.0"})]),
    # Closing markers inside values do not end them.
    (
        "qwen_xml",
        "</parameter> in code",
        xml("a.py", "print('</parameter>')\nx = '</function>'"),
        False,
        [("edit", {"path": "a.py", "text": "print('</parameter>')\nx = '</function>'"})],
    ),
    (
        "glm",
        "</arg_value> in code",
        glm("a.py", "print('</arg_value>', '</tool_call>')"),
        False,
        [("edit", {"path": "a.py", "text": "print('</arg_value>', '</tool_call>')"})],
    ),
    (
        "hermes",
        "</tool_call> in a string",
        '<tool_call>\n{"name": "edit", "arguments": {"path": "a", "text": "</tool_call>\\n<tool_call>{}"}}</tool_call>',
        False,
        [("edit", {"path": "a", "text": "</tool_call>\n<tool_call>{}"})],
    ),
    (
        "harmony",
        "<|call|> in a string",
        '<|channel|>commentary to=functions.run <|constrain|>json<|message|>{"command": "echo \'<|call|>\'"}<|call|>',
        False,
        [("run", {"command": "echo '<|call|>'"})],
    ),
    (
        "kimi_k2",
        "a raw newline in a string",
        '<|tool_call_begin|>functions.run:0<|tool_call_argument_begin|>{"command": "a\nb"}<|tool_call_end|>',
        False,
        [("run", {"command": "a\nb"})],
    ),
    # A call that is cut is never run, the whole ones before it are.
    ("hermes", "cut", f'{HERMES_RUN}\n<tool_call>\n{{"name": "run", "argum', False, [("run", {"command": "ls"})]),
    ("qwen_xml", "cut", xml("a.py", "x = 1")[: -len("\n</parameter>\n</function>\n</tool_call>")], False, []),
    ("deepseek", "cut", '<｜tool▁call▁begin｜>run<｜tool▁sep｜>{"command": "rm -r /tmp/', False, []),
    (
        "mistral",
        "cut",
        '[TOOL_CALLS]run[ARGS]{"command": "ls"}[TOOL_CALLS]edit[ARGS]{"path"',
        False,
        [("run", {"command": "ls"})],
    ),
]


@pytest.mark.parametrize(("syntax", "what", "text", "opened", "calls"), CASES, ids=lambda value: str(value)[:30])
def test_code_in_calls(syntax: str, what: str, text: str, opened: bool, calls: Calls) -> None:
    completion = SYNTAXES[syntax].read(text, TYPES, opened=opened)
    assert [(call.name, call.arguments) for call in completion.calls if not call.error] == calls
    if what == "cut":
        assert completion.calls[-1].error
    assert outside(text, completion) == completion.content


def outside(text: str, completion: Completion) -> str:
    """The text without the characters of thinking and of calls."""
    rest, at = "", 0
    for part in completion.parts:
        assert at <= part.start < part.end <= len(text)
        rest, at = rest + text[at : part.start], part.end
    return rest + text[at:]


def test_harmony_names_the_characters_of_each_message() -> None:
    thought = "<|channel|>analysis<|message|>look<|end|>"
    call = '<|start|>assistant<|channel|>commentary to=functions.run<|message|>{"command": "ls"}<|call|>'
    said = "<|start|>assistant<|channel|>final<|message|>done"
    completion = SYNTAXES["harmony"].read(thought + call + said, TYPES)
    assert completion.parts == (
        Part("thinking", 0, len(thought)),
        Part("call", len(thought), len(thought + call)),
    )


def test_there_are_22_cases() -> None:
    assert len(CASES) == 22
