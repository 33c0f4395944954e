"""[engine.options]: an engine reads a type of its own, and what it does not have is refused before the run."""

from typing import Any

import pytest

from headrace.config import Config, ConfigError
from headrace.config.reading import parse
from headrace.engines import registry
from headrace.engines.sglang.options import SglangOptions
from headrace.launch.checks import model
from headrace.registry import PluginError

SERVER = "[engine]\nkind = 'KIND'\nexact = false\n[engine.options]\n"


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("url = 'http://x'", ""),
        ("adress = 'http://x'", "engine.options.adress"),
        ("url = 3", "Expected `str`"),
        ("servers = 0\nurl = 'http://x'", ">= 1"),
        ("swap = 'sideways'\nurl = 'http://x'", "Invalid enum value"),
        ("start_s = -1.0\nurl = 'http://x'", "> 0"),
        ("", "engine.options: expected either url"),
    ],
)
def test_options_are_checked_in_the_engines_own_type_before_the_run(kind: str, line: str, words: str) -> None:
    config = parse(SERVER.replace("KIND", kind) + line)
    if not words:
        assert model.refuse(config) is None  # type: ignore[func-returns-value]
        return
    with pytest.raises(ConfigError, match=words):
        model.refuse(config)


def test_an_engine_without_options_takes_none() -> None:
    with pytest.raises(ConfigError, match="takes no options, got url"):
        model.refuse(parse("[engine.options]\nurl = 'http://x'"))


def test_only_sglang_has_the_options_of_sglang() -> None:
    table: dict[str, Any] = {"url": "http://x", "weights": "auto"}
    options = registry.ENGINES.options("sglang", table, "engine.options")
    assert isinstance(options, SglangOptions) and options.weights == "auto"
    with pytest.raises(PluginError, match=r"engine.options.weights"):
        registry.ENGINES.options("vllm", table, "engine.options")


def test_an_option_is_set_on_the_command_line() -> None:
    overrides = ("engine.kind=sglang", "engine.options.args=['--a']", "engine.options.servers=2")
    config: Config = parse("", overrides=overrides)
    assert config.engine.options == {"args": ["--a"], "servers": 2}
