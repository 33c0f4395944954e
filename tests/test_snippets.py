"""Snippets of the documents work: commands have these arguments, TOML is accepted, Python runs, keys and targets exist.

Everything that runs without a broker is run. The rest, commands that need a run, a cluster or a GPU, is parsed.
"""

import argparse
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from headrace.algorithms.advantages import Attempt
from headrace.algorithms.registry import ADVANTAGES, LOSSES
from headrace.algorithms.rewards import REWARDS, Judged
from headrace.cli.main import UsageError, main, parser
from headrace.config import Config, ConfigError, parse
from headrace.engines.registry import ENGINES
from headrace.harness.tools.registry import TOOLS
from headrace.judging.checkers import CHECKERS, Message
from headrace.judging.rubrics.rubric import check
from headrace.messages.judging import Score
from headrace.messages.rollout import Trajectory
from headrace.messages.tasks import Criterion
from headrace.registry import SEAMS, Registry, admit
from headrace.rendering.bundle import terse_bundle
from headrace.rendering.registry import RENDERERS
from headrace.rendering.tokenizer import Tokenizer
from headrace.tasks.suites import SUITES
from headrace.training.data.registry import READERS
from headrace.vmhost.backends.registry import BACKENDS
from tests.support.paths import ROOT
from tests.test_docs import GENERATED, script

examples = script("messages").examples

PAGES = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in GENERATED)]
SEAM_REGISTRIES: dict[str, Registry[Any]] = {
    "my_tools": TOOLS,
    "my_rewards": REWARDS,
    "my_suites": SUITES,
    "my_checkers": CHECKERS,
    "my_renderers": RENDERERS,
    "my_advantages": ADVANTAGES,
    "my_losses": LOSSES,
    "my_readers": READERS,
    "my_machines": BACKENDS,
    "my_engines": ENGINES,
}
"""The modules of docs/extending.md, and where headrace looks their parts up."""


SOURCES = ("headrace/*.py", "benchmarks/*.py", "examples", "deploy", "tests/support/*.py", "web", "Makefile")


class Snippet(NamedTuple):
    """A piece of a page: a line of a block, a block, or `inline` code."""

    where: str
    text: str


@cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@pytest.fixture
def one_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Replaces all pages by one with this text."""

    def replace(text: str) -> None:
        (tmp_path / "page.md").write_text(text)
        monkeypatch.setattr(sys.modules[__name__], "PAGES", [tmp_path / "page.md"])
        text_of.cache_clear()

    return replace


def fenced(language: str) -> list[Snippet]:
    """All blocks of a language."""
    blocks = re.compile(rf"^```{language}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [Snippet(page.name, block) for page in PAGES for block in blocks.findall(text_of(page))]


def indented() -> Iterator[Snippet]:
    """All blocks that are indented by four spaces, without a list's continuation lines."""
    for page in PAGES:
        for block in re.findall(r"(?:^\n|\A)((?:^ {4}.*\n|^\n(?= {4}))+)", text_of(page), re.MULTILINE):
            yield Snippet(page.name, re.sub(r"^ {4}", "", block, flags=re.MULTILINE))


def command_lines() -> list[Snippet]:
    """The command lines of all blocks, continued lines joined, comments removed, `a && b` as two."""
    lines = []
    for block in [*indented(), *fenced("console")]:
        for line in re.sub(r"\\\n\s*", " ", block.text).splitlines():
            for part in re.sub(r"(^|\s)#.*", "", line).split("&&"):
                lines.append(Snippet(block.where, part.strip().removeprefix("$ ")))
    return lines


def inline(pattern: str) -> list[Snippet]:
    """The inline code that matches, blocks left out."""
    spans = []
    for page in PAGES:
        prose = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
        prose = re.sub(r"^ {4}.*$", "", prose, flags=re.MULTILINE)
        spans += [
            Snippet(page.name, " ".join(code.split()))
            for code in re.findall(r"`([^`]+)`", prose)
            if re.match(pattern, code)
        ]
    return spans


@cache
def command_parser() -> argparse.ArgumentParser:
    return parser()


def flags_of(words: list[str]) -> set[str]:
    """The options of the command that the words name. KeyError for an unknown command."""
    at = command_parser()
    for word in words:
        below = [action for action in at._actions if isinstance(action, argparse._SubParsersAction)]
        if not below:
            break
        at = below[0].choices[word]
    return set(at._option_string_actions)


def problem_of(words: list[str], mention: bool) -> str:
    """The error of the parser, empty without one. A mention in a sentence may leave out required arguments."""
    values = {"N": "1", "A": "1", "B": "2", "KIND": "systemd"}
    words = [values.get(word, word).removesuffix("...") for word in words]
    try:
        command_parser().parse_args(words)
    except UsageError as error:
        if not mention or not re.search("required|expected (at least )?one argument", str(error)):
            return str(error)
        try:
            unknown = {word for word in words if word.startswith("-")} - flags_of(words)
        except KeyError as missing:
            return f"no command {missing}"
        return f"no option {', '.join(sorted(unknown))}" if unknown else ""
    return ""


def wrong_lines() -> list[str]:
    """The `headrace` lines of blocks that the command line refuses."""
    problems = []
    for line in command_lines():
        if not re.match("headrace [a-z]", line.text):
            continue
        words = shlex.split(line.text)[1:]
        # `headrace weights log | show | diff A B` lists the commands of a group
        first, *others = " ".join(words).split(" | ")
        several = [first.split(), *([words[0], *other.split()] for other in others)] if others else [words]
        problems += [f"{line}: {why}" for each in several if (why := problem_of(each, mention=bool(others)))]
    return problems


def wrong_mentions() -> list[str]:
    """The commands in sentences that do not exist or lack an option."""
    return [
        f"{mention}: {why}"
        for mention in inline(r"headrace [a-z]")
        if (why := problem_of(shlex.split(re.sub(r"[\[\]]", "", mention.text))[1:], mention=True))
    ]


def wrong_sentences() -> list[str]:
    """The commands in sentences of code and of deployment files that do not exist or lack an option."""
    problems = []
    for name in subprocess.check_output(["git", "ls-files", *SOURCES], text=True, cwd=ROOT).splitlines():
        text = re.sub(r'"\s*\n\s*f?r?"', "", (ROOT / name).read_text(encoding="utf-8"))  # a string of several parts
        for mention in re.findall(r"`headrace ([a-z][^`]*)`", text):
            words = re.sub(r"[\[\]]", "", re.sub(r"\$?\{[^}]*\}", "1", " ".join(mention.split()))).split(" | ")[0]
            if why := problem_of(shlex.split(words), mention=True):
                problems.append(f"{name}: headrace {mention}: {why}")
    return problems


def wrong_programs() -> list[Snippet]:
    """Make targets and modules that do not exist."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    lines = [*command_lines(), *inline(r"(make|python -m) [a-z]")]
    made = [line for line in lines if re.match(r"make [a-z]", line.text)]
    modules = [line for line in lines if re.match(r"python -m (headrace|tests|benchmarks)\b", line.text)]
    return [line for line in made if line.text.split()[1] not in targets] + [
        line for line in modules if not importlib.util.find_spec(line.text.split()[2])
    ]


def refused(text: str, where: str) -> list[str]:
    """Why a configuration is refused; empty if it is accepted."""
    try:
        parse(text, where)
    except ConfigError as error:
        return [str(error)]
    return []


def wrong_toml() -> list[str]:
    """Blocks that are refused: rubrics by the judge's checks, sections by the loader, entry points by the seams."""
    problems = []
    for where, text in [*fenced("toml"), *(block for block in indented() if block.text.startswith("["))]:
        content = tomllib.loads(text)
        if "project" in content:
            groups = {name.removeprefix("headrace.") for name in content["project"]["entry-points"]}
            problems += [f"{where}: no seam {name}" for name in groups - set(SEAMS)]
        elif "criteria" in content:
            check([msgspec.convert(each, Criterion) for each in content["criteria"]], where)
        else:
            problems += refused(text, where)
    return problems


def wrong_keys() -> list[str]:
    """Keys in sentences, `[section] key` or `[section] key = value`, that do not exist or refuse the value."""
    problems = []
    for where, text in inline(r"\[[a-z_.]+\]"):
        match = re.fullmatch(r"\[([a-z_.]+)\](?: (\w+)(?: = (.+))?)?", text)
        if match is None:
            problems.append(f"{where}: {text}: expected `[section] key = value`")
            continue
        section, key, value = match.groups()
        at: object = Config()
        for part in section.split("."):
            at = getattr(at, part, None)
        if at is None or (key and not hasattr(at, key)):
            problems.append(f"{where}: {text}: no such key")
        elif value and not re.fullmatch("[A-Z]+", value):
            problems += refused(f"[{section}]\n{key} = {value}", f"{where}: {text}")
    return problems


def test_what_the_pages_show_exists() -> None:
    assert len(command_lines()) > 100 and len(inline(r"headrace [a-z]")) > 70 and len(inline(r"\[[a-z]")) > 70
    assert (wrong_lines(), wrong_mentions(), wrong_programs(), wrong_toml(), wrong_keys()) == ([], [], [], [], [])


def test_what_sentences_of_the_code_tell_to_run_exists() -> None:
    assert wrong_sentences() == []


def test_planted_mistakes_are_reported(one_page: Callable[[str], None]) -> None:
    one_page(
        "Call `headrace status --now` or `headrace stat`, `make nothing`, `headrace up`.\n\n"
        "    headrace audit latest --bogus   # a comment\n    python -m headrace.nothing\n"
        "    headrace check x && headrace top\n\n"
        "Set `[rollout] nothing`, `[gate] trials = -1` and `[rollout] lanes`.\n\n```toml\n[gate]\ntrial = 1\n```\n"
    )
    assert [("--bogus" in each, "audit" in each) for each in wrong_lines()] == [(True, True)]
    assert ["--now" in each or "'stat'" in each for each in wrong_mentions()] == [True, True]
    assert [line.text for line in wrong_programs()] == ["make nothing", "python -m headrace.nothing"]
    assert ["trial" in each for each in wrong_toml()] == [True]
    assert ["nothing" in each or "-1" in each for each in wrong_keys()] == [True, True]


@pytest.fixture
def my_modules(tmp_path: Path) -> Path:
    """The modules of docs/extending.md, in a folder: each block is the module that the text before it names."""
    for section in text_of(ROOT / "docs" / "extending.md").split("\n## ")[1:]:
        if code := re.search(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL):
            named = re.search(r"\"(my_\w+):", section)
            assert named is not None, section
            (tmp_path / f"{named.group(1)}.py").write_text(code.group(1))
    return tmp_path


def test_parts_of_the_page_on_extending_are_loaded_and_work(
    my_modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(my_modules))
    names = dict(re.findall(r"\"(my_\w+):([\w./]+)", text_of(ROOT / "docs" / "extending.md")))
    try:
        assert set(names) == set(SEAM_REGISTRIES)
        parts = {}
        for module, registry in SEAM_REGISTRIES.items():
            admit(registry.seam, [name := f"{module}:{names[module].partition('/')[0]}"])
            parts[module] = registry.get(name)
        judged = Judged(
            trajectory=examples(Trajectory)[0],
            verdict="passed",
            passed=True,
            tests=(),
            suspicions=(),
            tokens=1,
            calls=1,
            turns=1,
            prices={},
        )
        assert parts["my_rewards"](judged, parts["my_rewards"].__globals__["Half"]()) == 0.5
        pairs = parts["my_readers"](terse_bundle(Tokenizer.train((), 300).dump()))
        assert pairs.encode(b'["1+1", "2"]', tmp_path).weights == [0.0, 0.0, 0.0, 1.0]
        attempts = [Attempt(reward, judged.trajectory, examples(Score)[0]) for reward in (0.0, 1.0, 1.0)]
        assert parts["my_advantages"](attempts) == [0.0, 1.0, 1.0]
        assert parts["my_checkers"](Message(text="abc", prompt="", reference={"length": "6"})) == 0.5
        assert main(["tasks", "show", "my_suites:open_mine/easy", "0"]) == 0
        assert "fix add()" in capsys.readouterr().out
    finally:
        for module in names:
            sys.modules.pop(module, None)


@pytest.mark.slow
def test_the_suite_of_the_page_passes_with_its_solution_and_fails_idle(my_modules: Path, tmp_path: Path) -> None:
    """The two `headrace eval` lines of docs/extending.md, as they are written."""
    lines = [line.text for line in command_lines() if "--suite my_suites:" in line.text]
    rates = {}
    for line in lines:
        words = shlex.split(line)[1:]
        done = subprocess.run(
            [sys.executable, "-m", "headrace.cli", *words],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(my_modules), str(ROOT)])},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout.splitlines()[-1])
        rates[result["policy"]] = result["rate"]
    assert rates == {"scripted:oracle": 1.0, "scripted:idle": 0.0}
