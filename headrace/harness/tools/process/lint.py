"""lint: runs ruff if the sandbox has it, otherwise a check in Python for syntax errors and unbound names."""

from headrace.harness.tools.base import Answer, Workspace, failed
from headrace.messages.sandbox import Exec
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


class LintTool:
    """Reports syntax errors, unbound names and similar defects, with programs of the sandbox."""

    schema, writes = BY_NAME["lint"], False

    async def run(self, arguments: dict[str, str], workspace: Workspace) -> Answer:
        """Problems as ``path:line: message``, or ``no problems``."""
        argv = ("python3", "-I", "-S", "-c", _LINT, arguments.get("glob", "**/*.py"))
        result = await workspace.call(Exec(argv=argv, timeout_s=30.0))
        if result.code == 1 and result.stdout.strip():
            return Answer(result.stdout.strip())
        return Answer("no problems") if result.ok else failed(result)


TOOL = LintTool()
