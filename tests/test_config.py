"""A bad configuration names the key, what was expected, and the line."""

from pathlib import Path

import pytest

from headrace.config import Config, ConfigError, load, parse

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"


def test_defaults_are_a_whole_configuration() -> None:
    config = parse("")
    assert config == Config()
    assert config.curriculum.group_size >= 2


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[run]\nseed = 1\n\n[bus]\nurll = 'x'\n", ["line 5", "bus.urll", "unknown key", "url"]),
        ("[run]\nseed = 'a'\n", ["line 2", "run.seed", "Expected `int`"]),
        ("[nope]\n", ["line 1", "nope", "unknown key"]),
        ("[curriculum]\non_stale = 'maybe'\n", ["line 2", "curriculum.on_stale"]),
        ("[run\n", ["not valid TOML", "line 1"]),
    ],
)
def test_mistakes_are_named(text: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "x.toml")
    for part in ["x.toml", *parts]:
        assert part in str(caught.value)


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such file; deploy/demo\.toml"):
        load(tmp_path / "none.toml")


def test_overrides_win_and_are_checked() -> None:
    config = parse("[run]\nseed = 1\n", overrides=["run.seed=7", "environment.backend=process"])
    assert (config.run.seed, config.environment.backend) == (7, "process")
    with pytest.raises(ConfigError, match="section"):
        parse("", overrides=["seed=7"])
    with pytest.raises(ConfigError, match=r"run\.sed"):
        parse("", overrides=["run.sed=7"])


@pytest.mark.parametrize("path", sorted(DEPLOY.glob("*.toml")), ids=lambda path: path.name)
def test_every_shipped_configuration_is_valid(path: Path) -> None:
    assert isinstance(load(path), Config)
