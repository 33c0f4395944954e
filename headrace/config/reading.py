"""From TOML and overrides to a Config. What can't be used is refused with the key, what was expected and the line."""

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.config.base import ConfigError
from headrace.config.tree import Config


def _line_of(text: str, path: str) -> int:
    """The line on which a dotted key is written, 0 when it can't be told."""
    *sections, key = re.sub(r"\[\.\.\.\]|\[\d+\]", "", path).split(".")
    wanted, current = ".".join(sections), ""
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*\[([^\[\]]+)\]", line)
        if header:
            current = header.group(1).strip()
            if not wanted and current == key:
                return number
        elif current == wanted and re.match(rf"\s*{re.escape(key)}\s*=", line):
            return number
    return 0


def parse(text: str, name: str = "config", overrides: Sequence[str] = ()) -> Config:
    """A Config from TOML text, then ``section.key=value`` overrides. ConfigError names key, expectation and line."""
    try:
        raw: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name} is not valid TOML: {error}") from None
    for entry in overrides:
        _override(raw, entry)
    try:
        return msgspec.convert(raw, Config)
    except msgspec.ValidationError as error:
        message = str(error)
        where = re.search(r" - at `\$\.?(.*)`$", message)
        path = where.group(1) if where else ""
        what = message[: where.start()] if where else message
        unknown = re.search(r"unknown field `(\w+)`", what)
        if unknown:
            path = f"{path}.{unknown.group(1)}" if path else unknown.group(1)
            what = f"unknown key{_suggestion(path)}"
        line = _line_of(text, path)
        raise ConfigError(f"{name}{f', line {line}' if line else ''}: {path or 'top level'}: {what}") from None


def _override(raw: dict[str, Any], entry: str) -> None:
    """Set one dotted key; the value is TOML where it parses as such and a plain string otherwise."""
    path, equals, value = entry.partition("=")
    section, dot, key = path.strip().partition(".")
    if not equals or not dot:
        raise ConfigError(f"an override is written section.key=value, not {entry!r}")
    try:
        parsed = tomllib.loads(f"x = {value}")["x"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    raw.setdefault(section, {})[key] = parsed


def _suggestion(path: str) -> str:
    """A hint at the keys that the section of an unknown one does have."""
    *sections, key = path.split(".")
    section: type[Any] = Config
    for part in sections:
        section = type(getattr(section(), part, None))
    names = getattr(section, "__struct_fields__", ())
    return f"; [{'.'.join(sections) or 'top'}] knows {', '.join(names)}" if names and key not in names else ""


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """A Config from a TOML file, or from the JSON in which a run keeps what it really ran with; an empty path means
    all defaults."""
    if not str(path):
        return parse("", "defaults", overrides)
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{file}: there is no such file; deploy/demo.toml is a good start") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from None
    if file.suffix == ".json":
        try:
            return msgspec.json.decode(text, type=Config)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{file}: {error}") from None
    return parse(text, str(file), overrides)
