"""Explains one key of the configuration: its value, the layer that set it, its type and range, and its meaning.

Layers, the last wins: defaults, the TOML file, the environment (`HEADRACE_SET_SECTION__KEY`), `--set`.
"""

import ast
import difflib
import functools
import inspect
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headrace.config.base import WORDS, ConfigError, Section
from headrace.config.reading import from_environment, keys, line_of, load


class Explanation(NamedTuple):
    """A key with its value, the layer that set it, its type, default and meaning."""

    key: str
    value: Any
    source: str
    type: str
    default: Any
    meaning: str


def explain(
    key: str, path: str = "", overrides: Sequence[str] = (), environment: Mapping[str, str] = os.environ
) -> Explanation:
    """Explain `section.key` in a configuration. ConfigError names the nearest key if there is no such key."""
    existing = {f"{section}.{name}": (kind, default) for section, name, kind, default in keys()}
    if key not in existing:
        near = difflib.get_close_matches(key, existing, 1, 0.0)
        raise ConfigError(f"there is no key {key!r}; the nearest is {near[0]}")
    config = load(path, overrides, environment)
    section, _, name = key.partition(".")
    kind, default = existing[key]
    values: Section = getattr(config, section)
    where = "default" if getattr(values, name) == default else "default of a run with policy.checkpoint"
    return Explanation(
        key,
        getattr(values, name),
        _source(key, path, overrides, environment) or where,
        described(msgspec.inspect.type_info(kind)),
        default,
        meanings(type(values))[name],
    )


def _source(key: str, path: str, overrides: Sequence[str], environment: Mapping[str, str]) -> str:
    """The highest layer that sets a key; empty where none does."""
    for entry in reversed(overrides):
        if entry.partition("=")[0].strip() == key:
            return f"--set {entry}"
    for variable, entry in from_environment(environment):
        if entry.partition("=")[0] == key and not path.endswith(".json"):
            return f"environment variable {variable}"
    if path.endswith(".json"):
        return f"{path}, the recorded configuration of a run"
    if path:
        text = Path(path).read_text(encoding="utf-8")
        raw = tomllib.loads(text)
        section, _, name = key.partition(".")
        if name in raw.get(section, {}):
            line = line_of(text, key) or line_of(text, section)
            return f"{path}{f', line {line}' if line else ''}"
    return ""


def described(kind: msgspec.inspect.Type) -> str:
    """A type and its range in words."""
    match kind:
        case msgspec.inspect.BoolType():
            return "true or false"
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
            word = "integer" if isinstance(kind, msgspec.inspect.IntType) else "number"
            low = (
                f"at least {kind.ge:g}" if kind.ge is not None else f"above {kind.gt:g}" if kind.gt is not None else ""
            )
            high = (
                f"at most {kind.le:,}" if kind.le is not None else f"below {kind.lt:,}" if kind.lt is not None else ""
            )
            return ", ".join(part for part in (word, low, high) if part)
        case msgspec.inspect.StrType():
            return WORDS.get(kind.pattern or "", "text")
        case msgspec.inspect.LiteralType():
            return " or ".join(map(repr, kind.values))
        case msgspec.inspect.VarTupleType() | msgspec.inspect.ListType():
            return f"list of: {described(kind.item_type)}"
        case msgspec.inspect.TupleType():
            return "list of exactly: " + "; ".join(described(item) for item in kind.item_types)
        case msgspec.inspect.DictType():
            return f"table of: {described(kind.value_type)}"
        case msgspec.inspect.UnionType():
            return ", or ".join(described(item) for item in kind.types)
        case msgspec.inspect.StructType():
            return f"table with {', '.join(field.name for field in kind.fields)}"
        case msgspec.inspect.Metadata():
            return described(kind.type)
    return type(kind).__name__.removesuffix("Type").lower()


@functools.cache
def meanings(section: type[msgspec.Struct]) -> dict[str, str]:
    """The docstring under each key, by the source of a section's type or of a table's within it."""
    [tree] = ast.parse(inspect.getsource(section)).body
    assert isinstance(tree, ast.ClassDef)
    name = ""
    above = section.__base__
    texts = dict(meanings(above)) if above is not None and issubclass(above, Section) and above is not Section else {}
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif name and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            texts[name] = re.sub(r"\s+", " ", str(node.value.value))
    return texts
