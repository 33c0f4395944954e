"""Writes chosen keys as TOML, each with its reason as a comment."""

import json
from collections.abc import Sequence

from headrace.recipes.choosing import Value

WIDTH = 120


def toml(values: Sequence[Value], head: str) -> str:
    """The file. head: comment lines before the first section."""
    sections: dict[str, list[str]] = {}
    for key, value, reason in values:
        section, _, name = key.rpartition(".")
        text = f"{name} = {_value(value)}"
        lines = [f"{text:<40} # {reason}"]
        if len(lines[0]) > WIDTH:
            lines = [f"# {reason[0].upper()}{reason[1:]}.", *text.splitlines()]
        sections.setdefault(section, []).extend(lines)
    parts = ["\n".join(f"# {line}".rstrip() for line in head.splitlines())]
    parts += ["\n".join([f"[{section}]", *lines]) for section, lines in sections.items()]
    return "\n\n".join(parts) + "\n"


def _value(value: object) -> str:
    """A value in TOML: lists on one line, lists of lists on a line each."""
    if isinstance(value, tuple):
        inner = [_value(each) for each in value]
        if value and isinstance(value[0], tuple):
            return "[\n" + "".join(f"    {each},\n" for each in inner) + "]"
        return f"[{', '.join(inner)}]"
    return repr(value) if isinstance(value, float) else json.dumps(value)
