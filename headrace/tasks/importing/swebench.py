"""SWE-bench rows: the old shape (repository, commit, patches, test names) and that of 5.x (image, parser, script).

With a checkout of the repository (``--repos``) the files travel with the task, the test patch becomes hidden files, and
where the project's tests are pytest's the sandbox itself reports them. Without one the task names the row's image, and
a script applies the test patch inside and writes a log; `trust` is ``log`` where no test of the patch can be altered.

Rows of SWE-rebench V2 bring test command and log parser in `install_config`, and images whose repository lies in a
folder of its own name (docs/tasks.md names the loaders that say so).
"""

import base64
import json
import re
import shlex
from collections.abc import Iterable, Iterator
from typing import Any

from headrace.messages.tasks import HOST_FOLDER, Change, Grading, Oracle, Task, TestPlan
from headrace.tasks.importing import patches, trees
from headrace.tasks.importing.base import (
    ImportOptions,
    ImportRefused,
    MadeTask,
    SourceEntry,
    names_of,
    row_entries,
    text_of,
)

TIMEOUT_S = 1800.0
SCRIPT, PATCH, LOG = f"{HOST_FOLDER}eval.sh", f"{HOST_FOLDER}test.patch", f"{HOST_FOLDER}test.log"
FOLDER = "/testbed"
_PYTEST = "python -m pytest -rA -p no:cacheprovider"
RUNNERS: dict[str, tuple[str, str]] = {
    "astropy/astropy": ("pytest_spaces", f"{_PYTEST} -vv -o console_output_style=classic --tb=no"),
    "django/django": ("django", "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1"),
    "matplotlib/matplotlib": ("matplotlib", _PYTEST),
    "mwaskom/seaborn": ("seaborn", "python -m pytest --no-header -rA"),
    "psf/requests": ("pytest_options", _PYTEST),
    "pydicom/pydicom": ("pytest_options", _PYTEST),
    "pylint-dev/pylint": ("pytest_options", _PYTEST),
    "scikit-learn/scikit-learn": ("pytest_spaces", f"{_PYTEST} -n0 --show-capture=no -W ignore"),
    "sphinx-doc/sphinx": ("pytest_spaces", "tox --current-env -epy39 -v --"),
    "sympy/sympy": ("sympy", "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' bin/test -C --verbose"),
}
"""Parser and test command of a repository; every other one is tested by pytest. Old rows carry neither."""
PARSERS = {
    "parse_log_pytest": "pytest",
    "parse_log_pytest_options": "pytest_options",
    "parse_log_pytest_v2": "pytest_spaces",
    "parse_log_matplotlib": "matplotlib",
    "parse_log_seaborn": "seaborn",
    "parse_log_django": "django",
    "parse_log_sympy": "sympy",
    "parse_log_gotest": "go",
    "parse_log_cargo": "cargo",
    "parse_log_jest": "jest",
    "parse_log_tap": "tap",
    "parse_log_astropy": "pytest_spaces",
    "parse_log_scikit": "pytest_spaces",
    "parse_log_sphinx": "pytest_spaces",
    "parse_log_requests": "pytest_options",
    "parse_log_pydicom": "pytest_options",
    "parse_log_pylint": "pytest_options",
} | dict.fromkeys(
    (f"parse_log_{name}" for name in "astroid flask marshmallow pvlib pyvista sqlfluff xarray".split()), "pytest"
)
"""Parsers of swebench 5.x by their names in a row."""
PYTEST_LOGS = frozenset({"pytest", "pytest_options", "pytest_spaces", "matplotlib", "seaborn"})
"""Parsers of what pytest writes."""
TIMED = re.compile(r"[\[(]\s*\d+(?:\.\d+)?\s*m?s\s*[\])]\s*$|\bin\s+\d+(?:\.\d+)?\s+m?sec\b", re.IGNORECASE)
"""A duration in the name of a test; SWE-rebench V2 strips it from names and logs before it compares them."""
_NO_COMMAND = "echo 'the task does not say which command runs its tests'; exit 1"


def read(options: ImportOptions) -> Iterator[SourceEntry]:
    """The rows of a JSONL file."""
    return row_entries(options, "instance_id", _made)


def _made(row: dict[str, Any], id: str, options: ImportOptions) -> MadeTask:
    to_pass, to_keep = names_of(row, "FAIL_TO_PASS"), names_of(row, "PASS_TO_PASS")
    if not to_pass:
        raise ImportRefused("FAIL_TO_PASS is empty: no test tells a fix from none")
    if text_of(row, "eval_type", "pass_and_fail") != "pass_and_fail":
        raise ImportRefused("eval_type is fail_only: a test that never ran would count as passed")
    if row.get("image_assets") not in (None, {}, "{}", ""):
        raise ImportRefused("image_assets: the row's tests compare with files that are only on the network")
    if "install_config" in row:
        return _rebench(row, id, options, to_pass, Grading(kind="f2p_p2p", pass_to_pass=to_keep))
    repo, commit = text_of(row, "repo"), text_of(row, "base_commit")
    parser, command = RUNNERS.get(repo, ("pytest", _PYTEST))
    if "log_parser" in row:
        named = text_of(row, "log_parser")
        if named not in PARSERS:
            raise ImportRefused(f"log_parser: headrace has no parser {named}")
        if parser != PARSERS[named] and not {parser, PARSERS[named]} <= PYTEST_LOGS:
            command = ""  # of another runner than the parser's
        parser = PARSERS[named]
    name = repo.replace("/", "__")
    tree = trees.find(options.repos, (f"{name}@{commit}", id), (name, repo.rpartition("/")[2]), commit)
    grading = Grading(kind="f2p_p2p", pass_to_pass=to_keep)
    parts = _Parts(row, id, options, repo, to_pass, grading)
    if tree is not None:
        return _with_files(parts, tree, parser, command)
    if options.template:
        raise ImportRefused(
            f"--template {options.template} needs the repository: put a checkout of {repo} into --repos"
        )
    return _with_image(parts, parser, command)


def _rebench(
    row: dict[str, Any], id: str, options: ImportOptions, to_pass: tuple[str, ...], grading: Grading
) -> MadeTask:
    """A row of SWE-rebench V2, in its image."""
    config = row["install_config"]
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except ValueError:
            raise ImportRefused("install_config: expected a JSON object") from None
    if not isinstance(config, dict):
        raise ImportRefused(f"install_config: expected an object, got {type(config).__name__}")
    commands = config.get("test_cmd")
    commands = [commands] if isinstance(commands, str) else commands
    if not isinstance(commands, list) or not commands or not all(isinstance(each, str) for each in commands):
        raise ImportRefused("install_config.test_cmd: expected a command or a list of commands")
    named = text_of(config, "log_parser")
    if named not in PARSERS:
        raise ImportRefused(f"install_config.log_parser: headrace has no parser {named}")
    if timed := next((name for name in (*to_pass, *grading.pass_to_pass) if TIMED.search(name)), ""):
        raise ImportRefused(f"the name of a test has a duration, which differs from run to run: {timed!a:.100}")
    parts = _Parts(row, id, options, text_of(row, "repo"), to_pass, grading)
    if not parts.image:
        raise ImportRefused("image_name is empty: the row does not say which image it runs in")
    folder = f"/{parts.repo.rpartition('/')[2]}"
    lines = "\n".join(commands)
    parts.script = f"""#!/bin/bash
git config --global --add safe.directory {shlex.quote(folder)}
cd {shlex.quote(folder)} || exit 1
git apply -v --3way --recount --ignore-space-change --whitespace=nowarn {PATCH} || echo ">>>>> Patch Apply Failed"
: '>>>>> Start Test Output'
(set -e
{lines})
code=$?
: '>>>>> End Test Output'
echo ">>>>> Test Exit Code: $code"
"""
    return _with_image(parts, PARSERS[named], lines, folder)


class _Parts:
    """The fields of a row that both ways use."""

    def __init__(
        self,
        row: dict[str, Any],
        id: str,
        options: ImportOptions,
        repo: str,
        to_pass: tuple[str, ...],
        grading: Grading,
    ) -> None:
        self.id, self.options, self.repo, self.to_pass, self.grading = id, options, repo, to_pass, grading
        self.prompt = text_of(row, "problem_statement")
        self.patch, self.test_patch = text_of(row, "patch"), text_of(row, "test_patch")
        self.script = text_of(row, "eval_script", "")
        self.commit = text_of(row, "base_commit")
        self.image = text_of(row, "image", "") or text_of(row, "image_name", "") or text_of(row, "docker_image", "")

    def task(self, plan: TestPlan, tree: trees.Tree, trust: Any, **where: Any) -> Task:
        """The agent's side."""
        return Task(
            ref=self.options.ref(self.id),
            family=f"swebench:{self.repo}",
            prompt=self.prompt,
            files=tree.files,
            entries=tree.special,
            allowed=("**",),
            tests=plan,
            system=self.options.system,
            tools=self.options.tools,
            trust=trust,
            **where,
        )


def _with_files(parts: _Parts, tree: trees.Tree, parser: str, command: str) -> MadeTask:
    """The repository beside the task; the agent sees the tests as they were before the test patch."""
    tests = trees.apply(tree, parts.test_patch, "test_patch")
    gold = trees.apply(tree, parts.patch, "patch")
    notes = tree.notes
    named = sorted({name.partition("::")[0] for name in (*parts.to_pass, *parts.grading.pass_to_pass)})
    whole = trees.with_changes(tree, tests)
    by_pytest = parser.startswith("pytest") and all("::" in name for name in parts.to_pass)
    if by_pytest and whole.files.keys() >= set(named):
        plan, grading = TestPlan(kind="pytest", paths=tuple(named), timeout_s=TIMEOUT_S), parts.grading
        # A test module that the candidate changes is replaced by the host's.
        hidden = {path: whole.files[path] for path in named} | tests.changed
    elif not command:
        raise ImportRefused(
            f"log_parser {parser}: the row does not say which command runs such tests over a repository of --repos; "
            "import it with its image and its eval_script"
        )
    else:
        runs = _tested(tests.changed, parser)
        script = f'#!/bin/bash\n{command} {shlex.join(runs)}\necho ">>>>> Test Exit Code: $?"\n'
        plan, grading = _command(), _logged(parts.grading, parser)
        hidden = tests.changed | {SCRIPT: script.encode()}
        notes = (*notes, "tests run by a command whose log is parsed")
    entries = {path: entry for path, entry in whole.entries.items() if path in hidden} | tests.entries
    entries |= {path: Change(path, "gone") for path in tests.removed}
    visible = TestPlan(kind="pytest", paths=tuple(path for path in named if path in tree.files), timeout_s=120.0)
    oracle = Oracle(
        ref=parts.options.ref(parts.id),
        hidden=hidden,
        tests=plan,
        expected=parts.to_pass,
        solution=gold.changed,
        removed=gold.removed,
        grading=grading,
        entries=trees.entries_of(entries.values()),
        solution_entries=trees.entries_of(gold.entries.values()),
    )
    task = parts.task(visible, tree, grading.trust, template=parts.options.template or "debian")
    return MadeTask(task=task, oracle=oracle, notes=notes)


def _with_image(parts: _Parts, parser: str, command: str, folder: str = FOLDER) -> MadeTask:
    """The repository in the row's image; a script applies the test patch there and writes the log."""
    key = parts.id.lower().replace("__", "_1776_")
    image = parts.image or f"docker.io/swebench/sweb.eval.x86_64.{key}:latest"
    if not (parts.script or command):
        raise ImportRefused(f"log_parser {parser}: the row has no eval_script, which says what command runs such tests")
    script = parts.script or _script(parts, parser, command)
    grading = _logged(parts.grading, parser)
    data = base64.b64encode(parts.patch.encode()).decode()
    oracle = Oracle(
        ref=parts.options.ref(parts.id),
        hidden={SCRIPT: script.encode(), PATCH: parts.test_patch.encode()},
        tests=_command(),
        expected=parts.to_pass,
        solution={},
        script=f"echo {data} | base64 -d | git apply -",
        grading=grading,
    )
    visible = TestPlan(kind="command", argv=("sh", "-c", command or _NO_COMMAND), timeout_s=120.0)
    return MadeTask(
        task=parts.task(visible, trees.Tree({}, {}), grading.trust, image=image, repository=folder), oracle=oracle
    )


def _command() -> TestPlan:
    return TestPlan(kind="command", argv=("sh", "-c", f"bash {SCRIPT} > {LOG} 2>&1"), timeout_s=TIMEOUT_S)


def _logged(grading: Grading, parser: str) -> Grading:
    return Grading(kind="f2p_p2p", pass_to_pass=grading.pass_to_pass, parser=parser, file=LOG, trust="log")


def _tested(changed: Iterable[str], parser: str) -> list[str]:
    """Arguments of the test command, from the paths that the test patch leaves: Django's runner takes module names."""
    paths = [path for path in sorted(changed) if path.endswith(".py")]
    if parser == "django":
        return [path.removeprefix("tests/").removesuffix(".py").replace("/", ".") for path in paths]
    return paths


def _script(parts: _Parts, parser: str, command: str) -> str:
    """The test script of an old row, in the environment that SWE-bench's images have."""
    paths = patches.paths_of(parts.test_patch)
    quoted = shlex.join(paths)
    names = [named.new for named in patches.names_of(parts.test_patch) if named.new]
    tested = shlex.join(_tested(names, parser))
    return f"""#!/bin/bash
set -uxo pipefail
[ -f /opt/miniconda3/bin/activate ] && source /opt/miniconda3/bin/activate && conda activate testbed
git config --global --add safe.directory {FOLDER}
cd {FOLDER}
for path in {quoted}; do git checkout {shlex.quote(parts.commit)} -- "$path" || rm -f -- "$path"; done
git apply -v {PATCH} || echo ">>>>> Patch Apply Failed"
: '>>>>> Start Test Output'
{command} {tested}
code=$?
: '>>>>> End Test Output'
echo ">>>>> Test Exit Code: $code"
"""
