"""search: lines that match a regular expression. A hit on a definition shows up to `_BODY` lines of its body.

A policy nearly always needs the place and the content together, so one call returns both.

ripgrep finds the lines where the sandbox has it. Its answer is kept only if it is complete: a pattern that ripgrep does
not accept, such as one with a look-ahead, and more output than a call may have go to the sandbox's own search.
Templates without ripgrep are not asked.
"""

import re
from collections.abc import Iterable, Iterator

from headrace.harness.tools.base import Answer, Workspace, failed
from headrace.messages.sandbox import Exec, Search
from headrace.rendering.schemas import BY_NAME
from headrace.vmhost.guest import names
from headrace.vmhost.guest.lines import shown

_LINE = re.compile(r"([^\n\0]+)\0(\d+)([:-])(.*)", re.S)
_REMARK = re.compile(r"|.*: (?:WARNING: stopped searching binary file|binary file matches).*")
_DEFINITION = re.compile(r"\s*(?:async\s+def|def|class)\b")
_BODY = 40
"""Most lines of a definition that are shown."""
_HITS = 20
"""Most hits that are shown."""
_WITHOUT = frozenset({"light"})
"""Templates that have no ripgrep."""
_NOTE = "no ripgrep"
_RIPGREP = (
    *("rg", "--no-config", "--no-heading", "--with-filename", "--line-number", "--color=never", "--sort=path"),
    *("--null", "--crlf", "--no-context-separator", "--no-ignore", "--hidden", "--glob=!.git"),
    *("--max-filesize=4M", "--max-columns=1000", "--max-columns-preview"),
    *(f"--max-count={_HITS + 1}", f"--after-context={_BODY}"),
)


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip())


def layout(stdout: str) -> str:
    """Search output by file: the path on its own line, then ``line:text`` of the hits and of the bodies they begin.

    stdout: ``path NUL line:text`` for a hit, ``path NUL line-text`` for a line of context.
    """
    shown: list[str] = []
    current, inside, named = "", -1, False
    for raw in stdout.split("\n"):
        match = _LINE.fullmatch(raw)
        if match is None:
            continue
        path, line, mark, text = match.groups()
        if path != current:
            current, inside, named = path, -1, False
        if inside >= 0 and text.strip() and _indent(text) <= inside:
            inside = -1
        if mark == ":":
            if inside < 0 and _DEFINITION.match(text):
                inside = _indent(text)
        elif inside < 0 or not text.strip():
            continue
        if not named:
            shown.append(path)
            named = True
        shown.append(f"{line}:{text}")
    return "\n".join(shown)


class SearchTool:
    """Lines that match a regular expression."""

    schema, writes = BY_NAME["search"], False

    async def run(self, arguments: dict[str, str], workspace: Workspace) -> Answer:
        """Hits by file, or that there are none."""
        if not arguments["query"]:
            return Answer("query is empty", ok=False)
        glob = arguments.get("glob", "**")
        lines = await _by_ripgrep(arguments["query"], glob, workspace)
        if lines is None:
            op = Search(pattern=arguments["query"], glob=glob, context=_BODY, limit=_HITS)
            result = await workspace.call(op)
            if not result.ok:
                return failed(result)
            lines = result.stdout
        return Answer(layout(lines) or "nothing found")


async def _by_ripgrep(pattern: str, glob: str, workspace: Workspace) -> str | None:
    """The lines in the form of a Search's answer; None where ripgrep cannot give them."""
    if workspace.task.machine in _WITHOUT or _NOTE in workspace.memory or glob.startswith(("!", "/")):
        return None
    only = () if glob in ("", "**") else (f"--glob={glob}",)
    argv = (*_RIPGREP, *only, "--regexp", pattern, "./")
    result = await workspace.call(Exec(argv=argv, timeout_s=10.0, output_cap=1 << 20))
    nothing = result.code == 1 and result.error == "exit code 1" and not result.stderr
    if not result.ok and not nothing:
        if result.code != 2:  # 2: it does not accept the pattern, or could not read a file
            workspace.memory[_NOTE] = "1"
        return None
    # Only the sandbox's own search shows which bytes it found, and reads a path with a line end.
    if result.truncated or "\ufffd" in result.stdout:
        return None
    lines = [line for line in result.stdout.split("\n") if not _REMARK.fullmatch(line)]
    matches = [match for line in lines if (match := _LINE.fullmatch(line))]
    return "\n".join(_first_hits(matches)) if len(matches) == len(lines) else None


def _first_hits(lines: Iterable[re.Match[str]]) -> Iterator[str]:
    hits = 0
    for match in lines:
        path, number, mark, text = match.groups()
        hits += mark == ":"
        if hits > _HITS:
            return
        yield f"{names.shown(path.removeprefix('./'))}\0{number}{mark}{shown(text + chr(10))}"


TOOL = SearchTool()
