"""Documents say what is so: the map lists every module, the README every command it shows."""

import importlib.util
import re
from pathlib import Path

from headrace.cli import parser

ROOT = Path(__file__).resolve().parent.parent


def test_the_map_lists_every_module() -> None:
    spec = importlib.util.spec_from_file_location("modules", ROOT / "docs" / "modules.py")
    assert spec is not None and spec.loader is not None
    modules = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(modules)
    assert modules.page() == modules.PAGE.read_text(), "run `make docs`"


def test_commands_in_the_readme_parse() -> None:
    text = (ROOT / "README.md").read_text().replace("\\\n", " ")
    shown = [line.split("#")[0].split() for line in text.splitlines() if re.match(r"\s+headrace [a-z]", line)]
    assert len(shown) > 5
    for words in shown:
        parser().parse_args(words[1:])


def test_make_targets_in_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for target in re.findall(r"`?make ([a-z-]+)", (ROOT / "README.md").read_text()):
        assert target in targets
