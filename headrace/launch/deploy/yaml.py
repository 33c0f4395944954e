"""Writes plain data as YAML: mappings, lists and scalars, with every text quoted, so that no value changes its type."""

import json
from collections.abc import Mapping, Sequence
from typing import Any


def document(value: Mapping[str, Any]) -> str:
    """A YAML document."""
    return "\n".join(_lines(value)) + "\n"


def documents(values: Sequence[Mapping[str, Any]]) -> str:
    """Several documents, separated."""
    return "---\n".join(document(value) for value in values)


def _lines(value: Any) -> list[str]:
    if isinstance(value, Mapping) and value:
        out: list[str] = []
        for key, entry in value.items():
            name = str(key) if str(key).replace("_", "").replace("-", "").isalnum() else json.dumps(str(key))
            out += _entry(f"{name}:", entry, "  ")
        return out
    if isinstance(value, list) and value:
        out = []
        for entry in value:
            inner = _lines(entry)
            out += [f"- {inner[0]}", *(f"  {line}" for line in inner[1:])]
        return out
    if isinstance(value, str) and "\n" in value:
        return ["|", *(f"  {line}" if line else "" for line in value.rstrip("\n").split("\n"))]
    return [json.dumps(value)]


def _entry(head: str, value: Any, indent: str) -> list[str]:
    lines = _lines(value)
    if isinstance(value, Mapping | list) and value:
        return [head, *(indent + line for line in lines)]
    return [f"{head} {lines[0]}", *lines[1:]]
