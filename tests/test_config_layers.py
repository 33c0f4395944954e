"""`headrace check --explain`: each layer wins over those below it, and the answer names it."""

from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.config import Config, ConfigError, Section, load
from headrace.config.episodes import McpServer
from headrace.config.explaining import explain, meanings
from headrace.config.reading import keys
from headrace.config.training import Phase

TEXT = "# a comment\n[curriculum]\nsteps = 3\n\n[feedback]\nbatch = 5\n"
VARIABLE = "HEADRACE_SET_CURRICULUM__STEPS"


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "run.toml").write_text(TEXT)
    return str(tmp_path / "run.toml")


def test_each_layer_wins_over_those_below(file: str) -> None:
    environment = {VARIABLE: "5"}
    default = explain("curriculum.steps", environment={})
    assert (default.value, default.source) == (40, "default")
    written = explain("curriculum.steps", file, environment={})
    assert (written.value, written.source) == (3, f"{file}, line 3")
    variable = explain("curriculum.steps", file, environment=environment)
    assert (variable.value, variable.source) == (5, f"environment variable {VARIABLE}")
    override = explain("curriculum.steps", file, ["curriculum.steps=7"], environment)
    assert (override.value, override.source) == (7, "--set curriculum.steps=7")


def test_every_key_has_a_type_and_a_meaning() -> None:
    for section, name, _, default in keys():
        explained = explain(f"{section}.{name}", environment={})
        assert explained.value == default and len(explained.type) > 3 and len(explained.meaning) > 10, explained


def test_every_key_has_a_docstring_of_its_own() -> None:
    # headrace.launch has sections for other files, and they are imported only where other tests ran before.
    sections = [kind for kind in Section.__subclasses__() if kind.__module__.startswith("headrace.config.")]
    sections.remove(Config)
    assert {McpServer, Phase} < set(sections), "tables within sections are among them"
    missing = [
        f"{section.__name__}.{name}"
        for section in sections
        for name in section.__struct_fields__
        if len(meanings(section).get(name, "")) <= 10
    ]
    assert missing == []


def test_the_command_prints_value_source_type_and_meaning(
    file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "9")
    assert main(["check", file, "--explain", "environment.warm"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("environment.warm = 1\n  from     default\n  type     integer, at least 0, at most")
    assert "Clones of the light template that are kept ready" in said
    assert main(["check", file, "--explain", "environment.wram"]) == 2
    assert "the nearest is environment.warm" in capsys.readouterr().err
    assert load(file).curriculum.steps == 9, "commands read the environment"


def test_a_wrong_variable_is_named(file: str) -> None:
    for variable, sentence in (
        (VARIABLE, f"{VARIABLE} curriculum.steps: expected `int`, got `str`"),
        ("HEADRACE_SET_CURRICULUM__STEP", "HEADRACE_SET_CURRICULUM__STEP curriculum.step: unknown key"),
        ("HEADRACE_SET_STEPS", "HEADRACE_SET_STEPS expected section.key=value"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            load(file, environment={variable: "many"})
