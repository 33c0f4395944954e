"""Completions that a policy could sample: calls of every syntax with values of every kind, broken in every way."""

import random
from collections.abc import Iterator

from headrace.rendering.parsers.registry import SYNTAXES

VALUES = (
    '"ls"', '"\\ud83d"', '"\\ud83d\\ude00"', '"\\ude00\\ud83d"', '"a\\u0000b"', '"\\r\\n\\t\\f"', "null",
    "true", "[]", "{}", "0", "-1", "1e999", "NaN", "Infinity", "-Infinity", "1.5", "9" * 30, "9" * 5000,
    "0x" + "f" * 5000, '{"a": 1, "a": 2}', "[" * 70 + "]" * 70, "[" * 3000, '{"a":' * 70 + "1" + "}" * 70,
    'b"x"', "{1}", "{1: 2}", "1j", "...", "(1, 2)", "f'{x}'", "'a' 'b'", "r'\\d'", "'\\d'", "a" + ".b" * 900,
    "-" * 900 + "1", "1" + "+1" * 900, "lambda: 0", "x", "", " ", "[1, [2, {}]]", "'" + "x" * 3000 + "'",
    '"</tool_call>"', '"<think>"', '{"name": ["search"]}', "'''a\nb'''", "__import__('os')", "0777",
)  # fmt: skip
NAMES = (
    "terminal", "search", "read_file", "finish", "no_tool", "", "a.b", "term\\ud83dinal", "x" * 300, "search\n",
    "ünï", "0", "a" + ".b" * 900, "functions.search", "search:3", "functions.search:1", "<x>", '"', "\0",
    "None", "f(", "edit_file",
)  # fmt: skip
KEYS = (
    "command",
    "query",
    "path",
    "lines",
    "text",
    "x",
    "",
    "\\ud83d",
    "a b",
    "0",
    "**kw",
    '"',
    "<",
    "glob",
    "session",
)
MARKERS = (
    "<tool_call>", "</tool_call>", "<think>", "</think>", "[THINK]", "[/THINK]",
    "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<function=",
    "</function>", "<parameter=", "</parameter>", "<invoke name=", "</invoke>", "<arg_key>", "</arg_key>",
    "<arg_value>", "</arg_value>", "<minimax:tool_call>", "<|python_tag|>", "<|channel|>", "<|message|>",
    "<|call|>", "<|end|>", "<|start|>", "to=functions.", "{", "}", "[", "]", '"', "'", "\\", "\n", ":", ",",
    "(", ")", "=", "\0", "\ufffd", "\u2028", "\x85", "<turn>", "<search query=\"", "\"/>", "```json\n",
    "</｜DSML｜parameter>", "<｜DSML｜invoke name=\"", " " * 50,
)  # fmt: skip


def call(syntax: str, name: str, pairs: list[tuple[str, str]]) -> str:
    """One call as the syntax writes it. pairs: argument names and values, as JSON or Python source."""
    members = ", ".join(f'"{key}": {value}' for key, value in pairs)
    plain = [(key, value[1:-1] if value.startswith('"') else value) for key, value in pairs]
    match syntax:
        case "hermes":
            return f'<tool_call>\n{{"name": "{name}", "arguments": {{{members}}}}}\n</tool_call>'
        case "llama3":
            return f'{{"name": "{name}", "parameters": {{{members}}}}}'
        case "kimi_k2":
            return f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{{{members}}}<|tool_call_end|>"
        case "deepseek":
            return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{{{members}}}<｜tool▁call▁end｜>"
        case "mistral":
            return f"[TOOL_CALLS]{name}[ARGS]{{{members}}}"
        case "harmony":
            return f"<|channel|>commentary to=functions.{name}<|constrain|>json<|message|>{{{members}}}<|call|>"
        case "pythonic":
            return f"[{name}({', '.join(f'{key}={value}' for key, value in pairs)})]"
        case "qwen_xml":
            inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in plain)
            return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"
        case "glm":
            inner = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in plain)
            return f"<tool_call>{name}\n{inner}</tool_call>"
        case "minimax":
            inner = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in plain)
            return f'<minimax:tool_call>\n<invoke name="{name}">\n{inner}</invoke>\n</minimax:tool_call>'
        case "dsml":
            value = '<｜DSML｜parameter name="{}" string="{}">{}</｜DSML｜parameter>\n'
            inner = "".join(value.format(key, "false" if value == "x" else "true", text) for key, text in plain)
            inner = f'<｜DSML｜invoke name="{name}">\n{inner}</｜DSML｜invoke>\n'
            return f"<｜DSML｜function_calls>\n{inner}</｜DSML｜function_calls>"
    return f"<{name} {' '.join(f'{key}={value}' for key, value in pairs)}/>"  # terse


def completions(seed: int, count: int, only: str = "") -> Iterator[tuple[str, str]]:
    """(syntax, completion) pairs, the same for the same seed. only: one syntax."""
    rng = random.Random(seed)
    syntaxes = [only] if only else list(SYNTAXES)
    for number in range(count):
        syntax = syntaxes[number % len(syntaxes)]
        pieces: list[str] = []
        for _ in range(rng.randrange(1, 4)):
            pairs = [(rng.choice(KEYS), rng.choice(VALUES)) for _ in range(rng.randrange(4))]
            made = call(syntax, rng.choice(NAMES), pairs)
            if rng.random() < 0.2:
                made = f"<think>{made}</think>"
            pieces.append(made)
            pieces += [rng.choice(("", "Now.", "\n", rng.choice(MARKERS)))]
        text = "".join(pieces)
        for _ in range(rng.choice((0, 0, 1, 3))):
            at = rng.randrange(len(text) + 1)
            kind = rng.randrange(4)
            if kind == 0:
                text = text[:at]
            elif kind == 1:
                text = text[:at] + rng.choice(MARKERS) + text[at:]
            elif kind == 2:
                text = text[:at] + text[at + rng.randrange(1, 20) :]
            else:
                text = text[:at] + text[max(0, at - 30) : at] * rng.randrange(2, 40) + text[at:]
        yield syntax, text
