"""Documents say what is so: the map lists every module, every file that a page names exists."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from headrace.messages.base import TYPES
from tests.support.paths import ROOT


def script(name: str) -> ModuleType:
    """A script of docs/, imported."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATED = ("messages.md", "modules.md", "errors.md")
"""Pages that are not committed."""


def test_the_generated_pages_name_every_message_module_and_error() -> None:
    messages, modules, errors = (script(name).page() for name in ("messages", "modules", "errors"))
    assert all(f"### `{kind.type_name}/{kind.type_version}`" in messages for kind in TYPES.values())
    assert "- `registry.py`: " in modules and modules.count("\n- `") > 500
    assert "| `config_error` | 2 | `config.base.ConfigError` | " in errors


def test_the_tables_of_subjects_and_roles_are_current() -> None:
    for page, table in script("subjects").PAGES.items():
        assert table() == page.read_text(), "run `make docs`"


def test_the_table_of_listeners_is_current() -> None:
    assert script("listeners").table() == (ROOT / "docs" / "listeners.md").read_text(), "run `make docs`"


def test_keys_commands_and_figures_are_current() -> None:
    configuration, commands, evidence = script("configuration"), script("commands"), script("evidence")
    assert configuration.page() == configuration.PAGE.read_text(), "run `make docs`"
    assert commands.page() == commands.PAGE.read_text(), "run `make docs`"
    assert evidence.evidence() == evidence.PAGE.read_text(), "run `make docs`"
    assert evidence.readme() == evidence.README.read_text(), "run `make docs`"


def test_the_readme_fits_a_few_screens() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 130
    assert all(
        (ROOT / "docs" / "images" / f"{part}-{scheme}.png").stat().st_size <= 400_000
        for part in ("live", "curve")
        for scheme in ("light", "dark")
    )


def test_files_that_documents_name_exist() -> None:
    folders = ("", "headrace", "tests", "docs")
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        if page.name in GENERATED:
            continue
        text = page.read_text()
        named = re.findall(r"(?<![\w/.-])((?:docs|deploy|tests|benchmarks|headrace|examples)/[\w./-]*\w)", text)
        named += re.findall(r"`([\w-]+/[\w/.-]+\.(?:py|md|toml|mjs|jinja))`", text)
        for name in named:
            assert any((ROOT / folder / name).exists() for folder in folders), f"{page.name} names {name}"


def test_tests_that_documents_name_exist() -> None:
    """A page that names the test of a claim is wrong as soon as that test has another name."""
    pages = {page.name: page.read_text() for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))}
    laws, _, promises = pages["laws.md"].partition("## What operators are promised")
    for table, count in ((laws, 12), (promises, 15)):
        rows = [line for line in table.splitlines() if line.startswith("|")][2:]
        assert len(rows) == count and all("::test_" in row for row in rows)
    for name, text in pages.items():
        for file, test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text):
            assert f"def {test}(" in (ROOT / file).read_text(), f"{name} names {file}::{test}"


def test_the_architecture_is_one_page() -> None:
    assert len((ROOT / "docs" / "architecture.md").read_text().splitlines()) <= 70


def test_every_results_file_states_its_conditions() -> None:
    """Each measurement of benchmarks/results names its commit, date and CPU, in the file or in each of its parts."""

    def stated(value: object) -> bool:
        if not isinstance(value, dict):
            return False
        conditions = value.get("conditions")
        return bool(conditions and conditions["commit"] and conditions["date"] and conditions["cpu"]) or (
            bool(value) and all(map(stated, value.values()))
        )

    files = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    assert len(files) > 20
    assert [file.name for file in files if not stated(json.loads(file.read_text()))] == []


def test_every_answered_study_has_one_line_and_pages_cite_lines_that_exist() -> None:
    page = ROOT / "benchmarks" / "results" / "studies.md"
    rows = [line.strip("| ").split(" | ") for line in page.read_text().splitlines() if line.startswith("| ")][1:]
    names = [row[0] for row in rows]
    assert names == sorted(set(names)) and {len(row) for row in rows} == {4}
    assert [row[0] for row in rows if not re.match(r"20\d\d-\d\d-\d\d", row[3])] == []
    assert [name for name in names if (ROOT / "benchmarks" / f"{name}.py").exists()] == []
    pages = {path.name: path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))}
    cited = [name for text in pages.values() for name in re.findall(r"benchmarks/results/studies\.md,\s+(\w+)", text)]
    shown = re.findall(r"^\| (\w+) \| .*\?", pages["evidence.md"].partition("## Answered studies")[2], re.MULTILINE)
    assert len(shown) > 20 and shown == names and set(cited) <= set(names)


def test_forbidden_words_stay_out_of_clean_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert script("words").main([]) == 0, capsys.readouterr().out


def test_the_word_list_finds_a_metaphor_and_a_missing_subject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = script("words")
    monkeypatch.setattr(words, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "A house of books.\nThe run ends. Who asked last holds it.\nWhat is a run? A hand-over hands it on.\n"
    )
    assert [(finding.line, finding.text) for finding in words.findings(page)] == [
        (1, "house"),
        (1, "books"),
        (2, "Who asked last holds it."),
    ]
