"""Every parser against the golden cases of canitoolcall: exact names and arguments, nothing run from a cut call."""

import json
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from headrace.rendering.parsers.base import Completion
from headrace.rendering.parsers.registry import SYNTAXES

FAMILIES = {
    "qwen3-hermes": "hermes",
    "qwen3-xml": "qwen_xml",
    "glm": "glm",
    "kimi": "kimi_k2",
    "deepseek": "deepseek",
    "gpt-oss": "harmony",
    "mistral": "mistral",
    "llama": "llama3",
}


def syntax_of(case: dict[str, Any]) -> str | None:
    """The syntax of a case's reference model; None for the two that headrace does not read."""
    model = case["models"][0]
    if case["family"] == "gemma4" or "Kimi-K3" in model:
        return None
    if any(version in model for version in ("DeepSeek-V3.2", "DeepSeek-V4")):
        return "dsml"
    if "Llama-4" in model:
        return "pythonic"
    return FAMILIES[case["family"]]


def cases() -> Iterator[dict[str, Any]]:
    for file in sorted(Path(str(files("canitoolcall"))).glob("_data/fixtures/*/*.jsonl")):
        yield from map(json.loads, file.read_text(encoding="utf-8").split("\n")[:-1])


def read(case: dict[str, Any], syntax: str) -> Completion:
    types = {
        tool["function"]["name"]: (tool["function"].get("parameters") or {}).get("properties", {})
        for tool in case["tools"] or ()
    }
    prompt = case.get("generation_prompt") or ""
    opened = prompt.rstrip().endswith(SYNTAXES[syntax].thinking[0])
    return SYNTAXES[syntax].read(case["raw_output"], types, opened=opened)


def right(case: dict[str, Any], syntax: str) -> bool:
    completion = read(case, syntax)
    calls = [(call.name, call.arguments) for call in completion.calls if not call.error]
    expected = case.get("expected")
    if expected is None:
        return not calls
    wanted = [(call["name"], call["arguments"]) for call in expected["tool_calls"]]
    return json.dumps(calls, sort_keys=True) == json.dumps(wanted, sort_keys=True)


@lru_cache(1)
def scores() -> dict[str, list[tuple[str, bool]]]:
    results: dict[str, list[tuple[str, bool]]] = defaultdict(list)
    for case in cases():
        if syntax := syntax_of(case):
            results[syntax].append((case["id"], right(case, syntax)))
    return results


@pytest.mark.parametrize("syntax", sorted(set(FAMILIES.values()) | {"dsml", "pythonic"}))
def test_each_syntax_reads_at_least_95_of_100_cases(syntax: str) -> None:
    wrong = [id for id, good in scores()[syntax] if not good]
    assert len(scores()[syntax]) >= 8
    assert len(wrong) <= 0.05 * len(scores()[syntax]), wrong


def test_all_syntaxes_together_read_at_least_98_of_100_cases() -> None:
    results = [result for syntax in scores().values() for result in syntax]
    wrong = [id for id, good in results if not good]
    assert len(results) == 398
    assert len(wrong) <= 0.02 * len(results), wrong
