"""Five small chat formats that differ in what is hard about real ones, over one tiny tokenizer like Qwen's."""

import re
from collections.abc import Sequence
from functools import lru_cache

from tokenizers import AddedToken
from tokenizers import Tokenizer as HuggingFace

from headrace.harness.tools.registry import TOOLS, schemas_of
from headrace.messages.rollout import RendererBundle
from headrace.rendering import schemas
from headrace.rendering.base import Renderer
from headrace.rendering.registry import Renderers
from headrace.rendering.tokenizer import Tokenizer

CHATML = """\
{%- for m in messages %}
{%- if m.role == 'system' %}{{ '<|im_start|>system\\n' + m.content }}
{%- for tool in tools or [] %}{{ '\\n' + (tool | tojson) }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for call in m.tool_calls or [] %}{% if not loop.first %}{{ '\\n' }}{% endif %}{{ '<tool_call>\\n' }}
{{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}{{ '\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

NEXT_ROLE = """\
{{- '[gMASK]<sop>' }}{% for m in messages %}
{%- if m.role == 'system' %}{{ '<|system|>\\n' + m.content }}
{%- for tool in tools or [] %}{{ '\\n' + (tool | tojson) }}{% endfor %}
{%- elif m.role == 'user' %}{{ '<|user|>\\n' + m.content }}
{%- elif m.role == 'assistant' %}{{ '<|assistant|>' }}{% if m.content %}{{ '\\n' + m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}{{ '\\n<tool_call>' + call.function.name + '\\n' }}
{%- for key, value in call.function.arguments | items %}
{{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' + value + '</arg_value>\\n' }}{% endfor %}
{{- '</tool_call>' }}{% endfor %}
{%- elif m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}{{ '<|observation|>' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

JSON_RESULT = """\
{%- for m in messages %}
{%- if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one call at once') }}{% endif %}
{%- if m.role == 'system' %}{{ '<|start_header_id|>system<|end_header_id|>\\n\\n' + m.content }}
{%- for tool in tools or [] %}{{ '\\n' + (tool | tojson(indent=4)) }}{% endfor %}{{ '<|eot_id|>' }}
{%- elif m.role == 'tool' %}{{ '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
{{- {'output': m.content} | tojson }}{{ '<|eot_id|>' }}
{%- elif m.tool_calls %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- set call = m.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}{{ '}<|eot_id|>' }}
{%- else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

PREFILLED_THINK = """\
{%- for m in messages %}
{%- if m.role == 'system' %}{{ '<|im_start|>system\\n' + m.content }}
{%- for tool in tools or [] %}{{ '\\n' + (tool | tojson) }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>\\n' + m.content | trim }}
{{- '\\n</tool_response><|im_end|>\\n' }}
{%- elif m.role == 'user' %}{{ '<|im_start|>user\\n' + m.content | trim + '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>assistant\\n<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' + m.content }}
{%- for call in m.tool_calls or [] %}{{ '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for key, value in call.function.arguments | items %}
{{- '<parameter=' + key + '>\\n' + value + '\\n</parameter>\\n' }}{% endfor %}
{{- '</function>\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""

COUNTED_IDS = """\
{%- set count = namespace(n=0) %}{% for m in messages %}
{%- if m.role == 'system' %}{{ '<|im_system|>system<|im_middle|>' + m.content }}
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>' }}
{%- elif m.role == 'tool' %}{{ '<|im_system|>tool<|im_middle|>## Return of ' + m.tool_call_id }}
{{- '\\n' + m.content + '<|im_end|>' }}
{%- else %}{{ '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' + m.content }}
{%- if m.tool_calls %}{{ '<|tool_calls_section_begin|>' }}{% for call in m.tool_calls %}
{{- '<|tool_call_begin|>functions.' + call.function.name + ':' + (count.n | string) + '<|tool_call_argument_begin|>' }}
{{- call.function.arguments | tojson }}{{ '<|tool_call_end|>' }}{% set count.n = count.n + 1 %}{% endfor %}
{{- '<|tool_calls_section_end|>' }}{% endif %}{{ '<|im_end|>' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"""

LAST_SYSTEM = """\
{{- bos_token }}{% for m in messages %}
{%- if m.role == 'user' %}{{ '[INST]' }}
{%- if loop.last and messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
{{- m.content }}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{{ '[/INST]' }}
{%- elif m.tool_calls %}{{ '[TOOL_CALLS][' }}{% for call in m.tool_calls %}{% if not loop.first %}{{ ', ' }}{% endif %}
{{- {'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id} | tojson }}{% endfor %}
{{- ']</s>' }}
{%- elif m.role == 'assistant' %}{{ m.content + '</s>' }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
{%- endif %}{% endfor %}"""
"""Like Mistral-Nemo's: the system text stands in a user's message while it is the last one, and nowhere later."""

TEMPLATES = {
    "hermes": CHATML,
    "glm": NEXT_ROLE,
    "llama3": JSON_RESULT,
    "qwen_xml": PREFILLED_THINK,
    "kimi_k2": COUNTED_IDS,
}
"""Syntax to template."""

SPECIAL = (
    "<|endoftext|> <|im_start|> <|im_end|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <|eot_id|> "
    "<|start_header_id|> <|end_header_id|> <|im_system|> <|im_user|> <|im_assistant|> <|im_middle|> "
    "<|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_end|> "
    "<|tool_call_argument_begin|>"
).split()
NOT_SPECIAL = "<think> </think> <tool_call> </tool_call> <tool_response> </tool_response> <arg_key> </arg_key>".split()
"""Added tokens that the tokenizer does not mark as special, as in Qwen3's and GLM's files."""

TOKEN = re.compile(
    r"<\|[^|>\n]{1,40}\|>|<｜[^｜>\n]{1,40}｜>|\[/?[A-Z_]{3,20}\]|\[e~\[|\]~!?b\[|</?think>|</?tool_(?:call|response)>|</?s>"
)

TEXT = "def mean(xs):\n    return sum(xs) / len(xs)  # search read_file edit_file path lines query text user result\n"


@lru_cache(1)
def tokenizer_json() -> str:
    """Of the tiny tokenizer."""
    return trained([TEXT] * 8, SPECIAL, NOT_SPECIAL)


def trained(texts: Sequence[str], special: Sequence[str], markers: Sequence[str]) -> str:
    """The tokenizer.json of a tokenizer of 400 entries besides its special tokens and its unmarked added ones."""
    backend = HuggingFace.from_str(Tokenizer.train(texts, 400, tags=["<pad>"]).dump())
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in markers])
    return str(backend.to_str())


def tokenizer_for(template: str) -> str:
    """The tokenizer.json of the tiny tokenizer with the tokens that a published template writes."""
    return with_tokens(tokenizer_json(), template)


def with_tokens(text: str, template: str) -> str:
    """A tokenizer.json with the tokens that a published template writes as further added tokens."""
    backend = HuggingFace.from_str(text)
    tokens = {*TOKEN.findall(template), "</s>", "<s>", "<|im_end|>", "<｜end▁of▁sentence｜>", "<|eot_id|>"}
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in sorted(tokens)])
    return str(backend.to_str())


def bundle(syntax: str, **changes: object) -> RendererBundle:
    """The bundle of one of the formats."""
    fields = {
        "renderer": syntax,
        "tokenizer_json": tokenizer_json(),
        "chat_template": TEMPLATES.get(syntax, ""),
        "system": "You are a coding agent.",
        "date": "2026-11-22",
        "tools": schemas.functions_json(),
    }
    return RendererBundle(**(fields | changes))  # type: ignore[arg-type]


def bundle_of_run(syntax: str) -> RendererBundle:
    """The bundle of one of the formats as a run makes it: with all of headrace's tools, some of which have more
    arguments than the terse format shows."""
    tools = schemas_of(tuple(name for name in TOOLS.names() if TOOLS.builtin(name)))
    return bundle(syntax, tools=schemas.functions_json(tools))


@lru_cache(16)
def renderer(syntax: str) -> Renderer:
    """With all tools."""
    return Renderers(bundle(syntax)).open(schemas.TABLE)
