"""Reads a Config from TOML and overrides. An error is one sentence: file, line, key, expected and actual value."""

import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec

from headrace.config import checkpoints
from headrace.config.base import WORDS, ConfigError
from headrace.config.rules import problems
from headrace.config.tree import Config

_PATTERN = re.compile(r"Expected `str` matching regex (.*)$", re.DOTALL)
INSTEAD = {
    "trainer.context_ranks": "trainer.mesh.context = N",
    "trainer.expert_ranks": "trainer.mesh.expert = N",
    "trainer.nodes": "trainer.node_ranks = N, the processes of a node; for a copy on each, trainer.mesh.replicate = N",
    "trainer.ranks": "trainer.mesh.shard = N",
}
"""The line to write instead of a key that many configurations had."""
PREFIX = "HEADRACE_SET_"
"""Prefix of the environment variables that set a key: HEADRACE_SET_SECTION__KEY=value, in capitals."""
_SHOWN = 60
"""Characters of a wrong value that an error shows."""


def from_environment(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """The variables that set keys, each with its override ``section.key=value``, sorted."""
    variables = sorted((name, value) for name, value in environment.items() if name.startswith(PREFIX))
    return [(name, f"{name.removeprefix(PREFIX).lower().replace('__', '.')}={value}") for name, value in variables]


def parse(
    text: str, name: str = "config", overrides: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Config:
    """A Config from TOML text, then the variables of `environment` that set keys, then ``section.key=value`` overrides.
    ConfigError names line, key and expectation."""
    try:
        raw: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name} is not valid TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{name} is not usable TOML: it is nested too deeply") from None
    overridden = {_override(raw, entry, variable): variable for variable, entry in from_environment(environment or {})}
    overridden |= {_override(raw, entry): "--set" for entry in overrides}
    checkpoints.protect(raw)

    def refuse(path: str, what: str) -> ConfigError:
        key = re.sub(r"\[[^\]]*\]", "", path)
        if key in overridden:
            return ConfigError(f"{overridden[key]} {path}: {what}")
        line = line_of(text, path) or line_of(text, path.rpartition(".")[0])  # an inline table has its own line
        return ConfigError(f"{name}{f', line {line}' if line else ''}: {path or 'top level'}: {what}")

    try:
        config = msgspec.convert(raw, Config)
    except msgspec.ValidationError as error:
        raise refuse(*_explain(str(error), raw)) from None
    except (OverflowError, RecursionError, ValueError) as error:
        raise ConfigError(f"{name}: a value is out of every range: {error}") from None
    for path, what in problems(config):
        raise refuse(path, what)
    return config


def _explain(message: str, raw: dict[str, Any]) -> tuple[str, str]:
    """The path of the wrong value, and a text with the expected and the actual value."""
    where = re.search(r" - at `(?:key in )?\$\.?(.*)`$", message, re.DOTALL)
    path = where.group(1) if where else ""
    what = message[: where.start()] if where else message
    unknown = re.search(r"unknown field `(.*)`", what, re.DOTALL)
    if unknown:
        path = f"{path}.{unknown.group(1)}" if path else unknown.group(1)
        return path, f"unknown key{_suggestion(path)}"
    pattern = _PATTERN.search(what)
    if pattern:
        words = next((words for regex, words in WORDS.items() if repr(regex) == pattern.group(1)), "")
        what = f"expected {words or what}"
    if what.startswith("Invalid enum value"):
        section, _, key = path.partition(".")
        kind = next((kind for name, field, kind, _ in keys() if (name, field) == (section, key)), None)
        choices = [repr(choice) for choice in get_args(kind) if isinstance(choice, str)]
        what = f"expected {' or '.join(choices) or 'another value'}"
    what = what[:1].lower() + what[1:]
    if ", got" in what:
        return path, what
    return path, f"{what}, got {_shown(_value_at(raw, path))}"


def _value_at(raw: Any, path: str) -> Any:
    """The value under a path such as ``processes.groups[0]``; `_MISSING` if there is none."""
    for part in re.findall(r"[^.\[\]]+|\[[^\]]*\]", path):
        try:
            raw = raw[int(part[1:-1])] if part.startswith("[") else raw[part]
        except (KeyError, IndexError, TypeError, ValueError):
            return _MISSING
    return raw


_MISSING = object()


def _shown(value: Any) -> str:
    """A value as an error shows it, cut to `_SHOWN` characters."""
    if value is _MISSING:
        return "another value"
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"


def line_of(text: str, path: str) -> int:
    """The line on which a dotted key is written; 0 if the text does not have it."""
    *sections, key = re.sub(r"\[[^\]]*\]", "", path).split(".")
    wanted, current = ".".join(sections), ""
    entry = re.search(r"\[(\d+)\]\.[^.\[]*$", path)  # of an array of tables: [[section.key]]
    left = int(entry.group(1)) + 1 if entry else 0
    last = re.search(r"\[(\d+)\]$", path)
    before = int(last.group(1)) if last else 0
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*\[{1,2}([^\[\]]+)\]", line)
        if header:
            current = header.group(1).strip()
            left -= current == wanted
            if not wanted and current == key:
                return number
            if current == f"{wanted}.{key}" and not entry:
                if not before:
                    return number
                before -= 1
        elif current == wanted and left <= 0 and re.match(rf"\s*{re.escape(key)}\s*=", line):
            return number
    return 0


def _override(raw: dict[str, Any], entry: str, origin: str = "--set") -> str:
    """Set one dotted key and return it. origin: `--set`, or the environment variable. A value that is valid TOML is
    read as TOML, any other as a string."""
    path, equals, value = entry.partition("=")
    path = path.strip()
    *sections, key = path.split(".")
    if not equals or not sections or not all((*sections, key)):
        raise ConfigError(f"{origin} expected section.key=value, got {entry!r}")
    try:
        table = tomllib.loads(f"x = {value}")
        parsed = table["x"] if len(table) == 1 else value.strip()
    except (tomllib.TOMLDecodeError, RecursionError):
        parsed = value.strip()
    keys: Any = raw
    for section in sections:
        keys = keys.setdefault(section, {})
        if not isinstance(keys, dict):
            raise ConfigError(f"{origin} {path}: expected [{section}] to be a section, got {_shown(keys)}")
    keys[key] = parsed
    return path


def _suggestion(path: str) -> str:
    """A hint: the line to write instead, or the keys of the unknown key's section."""
    if path in INSTEAD:
        return f" since [trainer] mesh replaced it: write {INSTEAD[path]}"
    *sections, key = path.split(".")
    section: type[Any] = Config
    for part in sections:
        section = type(getattr(section(), part, None))
    names = getattr(section, "__struct_fields__", ())
    return f"; [{'.'.join(sections) or 'top'}] has {', '.join(names)}" if names and key not in names else ""


def load(path: str | Path, overrides: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> Config:
    """A Config from a TOML file, or from the JSON file in which a run records its configuration; an empty path means
    all defaults. environment: its HEADRACE_SET_ variables are applied; this process's environment by default. They are
    not applied to a recorded configuration. ConfigError."""
    environment = os.environ if environment is None else environment
    if not str(path):
        return parse("", "defaults", overrides, environment)
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{file}: there is no such file; start from deploy/demo.toml") from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from None
    if file.suffix == ".json":
        try:
            return msgspec.json.decode(text, type=Config)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ConfigError(f"{file}: {error}") from None
    return parse(text, str(file), overrides, environment)


def keys() -> Iterator[tuple[str, str, Any, Any]]:
    """Section, key, type and default of every key of the configuration, without the tables [harnesses.NAME], whose
    names are the user's."""
    defaults = Config()
    for section in msgspec.structs.fields(Config):
        if section.name == "harnesses":
            continue
        for field in msgspec.structs.fields(type(getattr(defaults, section.name))):
            yield section.name, field.name, field.type, getattr(getattr(defaults, section.name), field.name)
