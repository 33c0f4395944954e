"""Commands of other programs in the documents, and SGLang's image recipe, name files, flags and packages that exist.

tests/test_snippets.py checks the commands of headrace. Here every other line of a block is a program that a checker
knows, or it is listed as text.
"""

import ast
import importlib.util
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from headrace.bus.broker.server import find_binary
from tests import test_snippets as snippets
from tests.support.paths import ROOT

TEXTS = {
    "headrace <type>/<version> ": "the layout of a signed text",
}
"""Starts of blocks that are neither commands nor settings."""
PYTHON = ("extending.md", "clients.md")
"""Pages whose python blocks run in tests: tests/test_snippets.py, tests/actors/feedback/test_client_groups.py."""
UNTAGGED = {"README.md": 1, "architecture.md": 1}
"""Pages with fenced blocks without a language: diagrams."""


def blocks() -> list[snippets.Snippet]:
    """The indented blocks outside fences, without settings."""
    indented = []
    for page in snippets.PAGES:
        prose = re.sub(r"^```.*?^```$", "", snippets.text_of(page), flags=re.MULTILINE | re.DOTALL)
        for block in re.findall(r"(?:^\n|\A)((?:^ {4}.*\n|^\n(?= {4}))+)", prose, re.MULTILINE):
            text = re.sub(r"^ {4}", "", block, flags=re.MULTILINE)
            if not text.startswith("["):
                indented.append(snippets.Snippet(page.name, text))
    return indented


def commands(text: str) -> list[list[str]]:
    """The words of each command of a block; a quoted text may go on over lines. ValueError where a quote stays open."""
    command_words, lines = [], re.sub(r"\\\n\s*", " ", text).splitlines()
    while lines:
        line = lines.pop(0)
        while True:
            try:
                words = shlex.split(line, comments=True)
                break
            except ValueError:
                if not lines:
                    raise
                line += "\n" + lines.pop(0)
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words.pop(0)
        while "&&" in words:
            command_words.append(words[: words.index("&&")])
            words = words[words.index("&&") + 1 :]
        if words:
            command_words.append(words)
    return command_words


@cache
def nats_flags() -> frozenset[str]:
    """The flags that the installed broker lists."""
    done = subprocess.run([find_binary(), "--help"], capture_output=True, text=True)
    return frozenset(re.findall(r"(?<![\w-])--?[a-z][\w-]*", done.stdout + done.stderr))


@cache
def extras() -> frozenset[str]:
    """The extras of headrace's package."""
    return frozenset(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


@cache
def routes() -> list[re.Pattern[str]]:
    """The paths of the gateway, from the literals of its sources."""
    paths = [*(ROOT / "headrace" / "gateway").rglob("*.py"), ROOT / "headrace" / "actors" / "gateway.py"]
    source = "".join(path.read_text() for path in paths)
    names = {"agent": "/v1/agents/{agent}", "run": "/v1/agents/{agent}/runs/{run}", "made": "/v1/agent-sets/{set}"}
    literals = [*re.findall(r'web\.\w+\(f?"([^"]+)"', source), *names.values()]
    full = [re.sub(r"\{(agent|run|made)\}", lambda name: names[name[1]], path, count=1) for path in literals]
    return [re.compile(re.sub(r"\{\w+(:[^}]*\+)?\}", "[^/]+", path)) for path in full]


def of_nats(words: list[str]) -> str:
    unknown = [word for word in words if word.startswith("-") and word not in nats_flags()]
    return f"nats-server has no {unknown}" if unknown else ""


def of_python(words: list[str]) -> str:
    if words[1] == "-m" and words[2] == "sglang.launch_server":
        sources = (ROOT / "headrace/engines/sglang/backend.py").read_text()
        unknown = [word for word in words[3:] if word.startswith("--") and f'"{word}"' not in sources]
        return f"headrace starts SGLang without {unknown}" if unknown else ""
    if words[1] == "-m":
        spec = importlib.util.find_spec(words[2])
        file = Path(spec.origin) if spec is not None and spec.origin else None
        if spec is not None and spec.submodule_search_locations:
            file = Path(spec.submodule_search_locations[0]) / "__main__.py"
        rest = words[3:]
    else:
        file, rest = ROOT / words[1], words[2:]
    if file is None or not file.is_file():
        return f"there is no {words[1:3]}"
    source = file.read_text()
    missing = [word for word in rest if word.startswith("--") and f'"{word.partition("=")[0]}"' not in source]
    return f"{file.name} has no {missing}" if missing else ""


def of_prometheus(words: list[str]) -> str:
    missing = [word for word in words[1:] if not (ROOT / word.removeprefix("--config.file=")).is_file()]
    return f"there is no {missing}" if missing else ""


def of_curl(words: list[str]) -> str:
    if "-d" in words:
        json.loads(words[words.index("-d") + 1])
    (url,) = (word for word in words if word.startswith(("URL/", "$URL/")))
    path = url.partition("/")[2]
    return "" if any(route.fullmatch(f"/{path}") for route in routes()) else f"the gateway has no /{path}"


def of_request(words: list[str]) -> str:
    return "" if any(route.fullmatch(words[1]) for route in routes()) else f"the gateway has no {words[1]}"


def of_pip(words: list[str]) -> str:
    asked = {extra for word in words for group in re.findall(r"^headrace\[(.+)\]$", word) for extra in group.split(",")}
    return f"headrace has no extra {sorted(asked - extras())}" if asked - extras() else ""


def of_make(words: list[str]) -> str:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    variables = {*re.findall(r"\$\((\w+)\)", (ROOT / "Makefile").read_text())}
    given = [word.partition("=")[0] for word in words[1:] if "=" in word]
    asked = [word for word in words[1:] if "=" not in word]
    wrong = [*(word for word in asked if word not in targets), *(name for name in given if name not in variables)]
    return f"the Makefile has no {wrong}" if wrong else ""


def known_elsewhere(words: list[str]) -> str:
    """A command that tests/test_snippets.py parses, or whose program no test has: its words are split, no more."""
    return ""


CHECKERS: dict[str, Callable[[list[str]], str]] = {
    "DELETE": of_request,
    "curl": of_curl,
    "headrace": known_elsewhere,
    "make": of_make,
    "mlflow": known_elsewhere,
    "nats-server": of_nats,
    "pip": of_pip,
    "prometheus": of_prometheus,
    "python": of_python,
    "python3": known_elsewhere,
}


def wrong(block: snippets.Snippet) -> list[str]:
    """The problems of an indented block, which holds commands or Python."""
    if any(block.text.startswith(start) for start in TEXTS):
        return []
    if re.match(r"\w+ = (await )?\w+[.(]", block.text):
        ast.parse(f"async def snippet():\n{re.sub('^', '    ', block.text, flags=re.MULTILINE)}")
        return []
    problems = []
    for words in commands(block.text):
        checker = CHECKERS.get(words[0].rpartition("/bin/")[2])
        if (why := checker(words) if checker else f"no checker for {words[0]!r}") != "":
            problems.append(f"{block.where}: {' '.join(words)}: {why}")
    return problems


def test_every_block_of_the_pages_is_checked() -> None:
    assert len(blocks()) > 30
    assert [problem for block in blocks() for problem in wrong(block)] == []


def test_every_fenced_block_has_a_language_that_a_test_reads() -> None:
    untagged: dict[str, int] = {}
    for page in snippets.PAGES:
        for language in re.findall(r"^```(\w*)\n.*?^```$", snippets.text_of(page), re.MULTILINE | re.DOTALL):
            if language == "":
                untagged[page.name] = untagged.get(page.name, 0) + 1
            elif language == "python":
                assert page.name in PYTHON, "no test runs the python blocks of this page"
            else:
                # The proxies' blocks run in tests/gateway/test_proxies.py.
                assert language in ("toml", "console", "nginx", "caddy"), f"{page.name}: no test reads {language}"
    assert untagged == UNTAGGED


def test_inline_commands_of_other_programs_are_right() -> None:
    mentions = snippets.inline(r"(pip install|make [a-z]|python -m (headrace|benchmarks)|nats-server -)")
    assert len(mentions) > 60
    problems = [wrong(mention) for mention in mentions if mention.text != "python -m benchmarks.NAME"]
    assert [problem for page_problems in problems for problem in page_problems] == []


def test_planted_mistakes_in_other_programs_are_reported() -> None:
    lines = [
        "nats-server -c nats.conf -zz",
        "curl URL/v1/nothing",
        "pip install 'headrace[nothing]'",
        "make image WHEELZ=x",
        "python -m benchmarks.images --nothing 1",
        "python examples/own/nothing.py",
        "prometheus --config.file=deploy/nothing.yml",
        "frobnicate now",
    ]
    assert [len(wrong(snippets.Snippet("page", line))) for line in lines] == [1] * len(lines)


INSTRUCTIONS = {"FROM", "COPY", "RUN", "ENV", "CMD", "ADD", "USER", "WORKDIR"}


def instructions(path: Path) -> list[tuple[str, str]]:
    """The instructions of a Containerfile with their arguments. ValueError for a line that is none."""
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE)
    lines = [line for line in re.sub(r"\\\n\s*", "", text).splitlines() if line.strip()]
    pairs = [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines]
    for name, argument in pairs:
        if name not in INSTRUCTIONS or not argument:
            raise ValueError(f"{path}: {name} {argument} is no instruction")
        if name == "CMD" and not json.loads(argument):
            raise ValueError(f"{path}: CMD names no program")
        if name == "RUN":
            subprocess.run(["sh", "-n", "-c", argument], check=True)
        if name == "ENV":
            assert all("=" in word for word in shlex.split(argument)), argument
    return pairs


@pytest.mark.parametrize("recipe", ["deploy/release/Containerfile", "deploy/sglang/Containerfile"])
def test_image_recipes_are_read(recipe: str) -> None:
    pairs = instructions(ROOT / recipe)
    assert pairs[0][0] == "FROM" and pairs[-1] == ("CMD", '["headrace", "--help"]')


def test_the_recipe_for_sglang_takes_the_version_that_was_measured_and_the_wheel_of_a_release() -> None:
    pairs = dict(instructions(ROOT / "deploy/sglang/Containerfile"))
    pin = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["sglang"]
    version = pin[0].removeprefix("sglang==")
    assert pairs["FROM"] == f"docker.io/lmsysorg/sglang:v{version}"
    pins = (ROOT / "deploy/sglang/requirements-without-dependencies.txt").read_text()
    pins += (ROOT / "deploy/sglang/requirements.txt").read_text()
    assert f"sglang=={version}" in pins
    wheel, target = pairs["COPY"].split()
    assert Path(f"headrace-{version}-py3-none-any.whl").match(wheel) and f"{target}{wheel}" in pairs["RUN"]
    assert "/opt/headrace/bin" in pairs["ENV"]


def test_a_recipe_with_a_mistake_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "Containerfile"
    path.write_text("FROM scratch\nRUNN true\n")
    with pytest.raises(ValueError, match="RUNN true is no instruction"):
        instructions(path)
