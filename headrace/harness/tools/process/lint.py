"""lint: runs the linter that the task or `[tools] lint` names; otherwise ruff if the sandbox has it, otherwise a check
in Python for syntax errors and unbound names."""

from collections.abc import Sequence

from headrace.harness.tools.base import Answer, Workspace, failed
from headrace.messages.sandbox import Exec, OpResult
from headrace.rendering.schemas import BY_NAME

_LINT = """
import ast, builtins, glob, os, sys
bad = 0
paths = [path for path in sorted(glob.glob(sys.argv[1], recursive=True)) if path.endswith(".py")]
for ruff in ("/usr/local/bin/ruff", "/usr/bin/ruff"):
    if paths and os.access(ruff, os.X_OK):
        words = ["check", "--isolated", "--no-cache", "--quiet", "--output-format=concise", "--select=E9,F"]
        os.execv(ruff, [ruff, *words, "--", *paths])
for path in paths:
    try:
        tree = ast.parse(open(path, encoding="utf-8").read(), path)
    except (SyntaxError, ValueError, OSError) as error:
        print(f"{path}:{getattr(error, 'lineno', None) or 1}: {getattr(error, 'msg', None) or error}")
        bad += 1
        continue
    bound = set(dir(builtins)) | {"__file__", "__name__", "__doc__", "__path__", "__all__", "__spec__"}
    star = False
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            star = star or node.name == "*"
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            bound.update(node.names)
        elif isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name:
            bound.add(node.name)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            bound.add(node.rest)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id not in bound and not star:
            print(f"{path}:{node.lineno}: undefined name {node.id}")
            bad += 1
sys.exit(bad > 0)
"""

_MATCHING = """
import glob, os, sys
paths = [path for path in sorted(glob.glob(sys.argv[1], recursive=True)) if os.path.isfile(path)]
if not paths:
    sys.exit(f"no file matches {sys.argv[1]}")
try:
    os.execvp(sys.argv[2], [*sys.argv[2:], *paths])
except OSError as error:
    print(f"{sys.argv[2]}: {error.strerror}", file=sys.stderr)
    sys.exit(127)
"""
LINT_S = 60.0
"""Time limit of a linter that a task or the configuration names."""
SHOWN = 50
"""Most lines of its report that the policy reads; the rest is counted."""


def report(result: OpResult, argv: Sequence[str]) -> Answer:
    """The first lines of a linter's output, or ``no problems``. An exit code above 125 or a signal means that the
    linter could not run. A linter that finds problems and writes nothing is reported with its exit code."""
    lines = [line for text in (result.stdout, result.stderr) for line in text.strip().splitlines()]
    shown = "\n".join([*lines[:SHOWN], *([f"and {len(lines) - SHOWN} more lines"] if len(lines) > SHOWN else [])])
    if result.timed_out:
        return Answer(f"{argv[0]} was stopped after {LINT_S:g} s\n{shown}".strip(), ok=False)
    if result.ok:
        return Answer("no problems")
    if not 0 < result.code < 126:
        return Answer(f"the linter {argv[0]} could not run: {shown or result.error}", ok=False)
    return Answer(shown or f"{argv[0]} ended with {result.code} and said nothing")


class LintTool:
    """Reports syntax errors, unbound names and similar defects, with programs of the sandbox."""

    schema, writes = BY_NAME["lint"], False

    async def run(self, arguments: dict[str, str], workspace: Workspace) -> Answer:
        """Problems as ``path:line: message`` or in the words of the named linter, or ``no problems``."""
        if workspace.task.lint:
            named = list(workspace.task.lint)
            matching = ["python3", "-I", "-S", "-c", _MATCHING, arguments["glob"]] if "glob" in arguments else []
            return report(await workspace.call(Exec(argv=(*matching, *named), timeout_s=LINT_S)), named)
        argv = ("python3", "-I", "-S", "-c", _LINT, arguments.get("glob", "**/*.py"))
        result = await workspace.call(Exec(argv=argv, timeout_s=30.0))
        if result.code == 1 and result.stdout.strip():
            return Answer(result.stdout.strip())
        return Answer("no problems") if result.ok else failed(result)


TOOL = LintTool()
