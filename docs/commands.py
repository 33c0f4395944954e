"""Writes docs/commands.md, every command with its arguments, from the parser (`make docs`)."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
PAGE = ROOT / "docs" / "commands.md"
HEAD = """\
<!-- Written by docs/commands.py: `make docs`. -->
# Commands

`headrace COMMAND --help` explains the arguments. A configuration is a TOML file, or several in order of precedence;
`--set SECTION.KEY=VALUE` changes a key. RUN is a run's id, its folder, or `latest`.

`source <(headrace --completion bash)` completes commands and options; zsh and fish have theirs.

| exit code | meaning |
|---|---|
| 0 | success |
| 1 | a check failed: audit, replay, verify |
| 2 | wrong arguments or configuration |
| 3 | this machine lacks something: QEMU, memory, disk |
| 4 | the broker does not answer, or a port is taken |
| 5 | another run is active in this folder |
| 130 | interrupted |

| command | what it does | arguments |
|---|---|---|
"""


def commands(top: argparse.ArgumentParser) -> Iterator[tuple[argparse.ArgumentParser, str]]:
    """The parser and the one line of help of every command that has no further commands."""
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, parser in action.choices.items():
                inner = list(commands(parser))
                yield from inner or [(parser, helps.get(name, ""))]


def page() -> str:
    """docs/commands.md."""
    from headrace.cli.main import parser

    rows = []
    for command, told in commands(parser()):
        usage = " ".join(command.format_usage().removeprefix(f"usage: {command.prog} [-h]").split())
        arguments = usage.replace("|", r"\|")
        rows.append(f"| `{command.prog}` | {told} | {f'`{arguments}`' if arguments else ''} |\n")
    return HEAD + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page())
