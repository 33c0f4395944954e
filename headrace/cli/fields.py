"""Builds the tables of all messages and their fields, from the structs and their docstrings, for docs/wire.md."""

import ast
import inspect
import re
import textwrap
from types import ModuleType
from typing import Any

import msgspec

from headrace.messages import (
    base,
    evaluation,
    judging,
    ledger,
    operations,
    plugins,
    product,
    rollout,
    search,
    tasks,
    training,
    weights,
)
from headrace.messages.base import Message
from headrace.messages.sandbox import calls
from headrace.messages.sandbox import operations as sandbox_operations
from headrace.messages.subjects import SUBJECTS

MODULES = (
    rollout,
    tasks,
    calls,
    sandbox_operations,
    judging,
    ledger,
    training,
    weights,
    evaluation,
    product,
    search,
    operations,
    plugins,
)
_NO_DEFAULT = "required"


def table() -> str:
    """All structs as Markdown: first the messages, by type name, then the structs that messages contain."""
    lines = ["## Messages", ""]
    parts = ["## Parts of messages", ""]
    for module in MODULES:
        for cls in _structs(module):
            if issubclass(cls, Message):
                lines += _section(cls, f"{cls.type_name}/{cls.type_version}")
            else:
                parts += _section(cls, cls.__name__)
    parts += _section(base.Array, "Array")
    return "\n".join([*lines, *parts]).rstrip() + "\n"


def _structs(module: ModuleType) -> list[type[msgspec.Struct]]:
    """The structs that a module defines, or the modules of a package."""
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, msgspec.Struct)
        and f"{value.__module__}.".startswith(f"{module.__name__}.")
    ]


def _section(cls: type[msgspec.Struct], name: str) -> list[str]:
    lines = [f"### `{name}`", "", _flat(cls.__doc__ or ""), ""]
    tag = cls.__struct_config__.tag
    if tag is not None:
        lines += [f'Field `{cls.__struct_config__.tag_field}` is `"{tag}"`.', ""]
    if issubclass(cls, Message):
        places = [f"`{_shown(each.template)}`" for each in SUBJECTS.values() if cls.type_name in each.types]
        if places:
            lines += [f"On {', '.join(places)}.", ""]
    fields = msgspec.structs.fields(cls)
    if not fields:
        return [*lines, "No fields.", ""]
    texts, types = _annotations(cls)
    positional = cls.__struct_config__.array_like
    lines += ["| field | type | default | |", "|---|---|---|---|"]
    for index, field in enumerate(fields):
        shown = f"{index}: {field.encode_name}" if positional else field.encode_name
        default = _NO_DEFAULT if field.required else f"`{_default(field)}`"
        kind = types.get(field.name, "").replace("|", "\\|")
        lines.append(f"| `{shown}` | `{kind}` | {default} | {_flat(texts.get(field.name, ''))} |")
    return [*lines, ""]


def _default(field: Any) -> str:
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if isinstance(value, msgspec.Struct):
        return "{}"
    if value is None or isinstance(value, bool):
        return {None: "nil", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return f'"{value}"'
    empty: dict[type, str] = {bytes: "empty", tuple: "[]", dict: "{}"}
    return empty.get(type(value), repr(value))


def _shown(template: str) -> str:
    return re.sub(r"\{(\w+)\}", r"<\1>", template)


def _annotations(cls: type) -> tuple[dict[str, str], dict[str, str]]:
    """Docstring and written type of every field, from the source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    body = tree.body[0].body  # type: ignore[attr-defined]
    texts: dict[str, str] = {}
    types: dict[str, str] = {}
    for index, node in enumerate(body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            types[node.target.id] = ast.unparse(node.annotation)
            after = body[index + 1] if index + 1 < len(body) else None
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                texts[node.target.id] = str(after.value.value)
    return texts, types


def _flat(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().replace("|", "\\|")
