"""SWE-smith rows: `patch` puts the bug in, its reverse is the known solution.

The agent gets the repository with the bug and without the modules of the failing tests; those are the hidden files. The
repository comes from a checkout (``--repos``): the images of SWE-smith hold it without the bug.
"""

from collections.abc import Iterator
from typing import Any

from headrace.messages.tasks import Grading, Oracle, Task, TestPlan
from headrace.tasks.importing import trees
from headrace.tasks.importing.base import Entry, ImportOptions, ImportRefused, Made, names_of, row_entries, text_of
from headrace.tasks.importing.swebench import TIMEOUT_S


def read(options: ImportOptions) -> Iterator[Entry]:
    """The rows of a JSONL file."""
    return row_entries(options, "instance_id", _made)


def _made(row: dict[str, Any], id: str, options: ImportOptions) -> Made:
    to_pass, to_keep = names_of(row, "FAIL_TO_PASS"), names_of(row, "PASS_TO_PASS")
    if not to_pass:
        raise ImportRefused("FAIL_TO_PASS is empty: no test tells a fix from none")
    prompt = text_of(row, "problem_statement", "").strip()
    if not prompt:
        raise ImportRefused("problem_statement is empty: the agent would not know what is wrong")
    repo = text_of(row, "repo")
    mirror = repo.rpartition("/")[2]  # owner__name.commit
    name, _, commit = mirror.rpartition(".")
    files = trees.find(options.repos, (id, mirror, name, name.rpartition("__")[2]), row.get("base_commit") or commit)
    if files is None:
        raise ImportRefused(
            f"the bug is a patch on {repo}, whose image does not have it: put a checkout named {mirror} into --repos"
        )
    named = {test.partition("::")[0] for test in (*to_pass, *to_keep)}
    if not all("::" in test for test in to_pass) or not named <= files.keys():
        raise ImportRefused(f"the tests are not pytest's, or not in the repository: {', '.join(to_pass)[:200]}")
    bug = trees.apply(files, text_of(row, "patch"), "patch")
    hidden_paths = {test.partition("::")[0] for test in to_pass}
    broken = trees.with_changes(files, bug)
    visible = {path: content for path, content in broken.items() if path not in hidden_paths}
    ref = options.ref(id)
    oracle = Oracle(
        ref=ref,
        hidden={path: files[path] for path in sorted(named)},
        tests=TestPlan(kind="pytest", paths=tuple(sorted(named)), timeout_s=TIMEOUT_S),
        expected=to_pass,
        solution={path: files[path] for path in (*bug.changed, *bug.removed) if path in files},
        removed=tuple(path for path in bug.changed if path not in files),
        grading=Grading(kind="f2p_p2p", pass_to_pass=to_keep),
    )
    task = Task(
        ref=ref,
        family=f"swesmith:{name}",
        prompt=prompt,
        files=visible,
        allowed=("**",),
        tests=TestPlan(kind="pytest", paths=tuple(sorted(named - hidden_paths)), timeout_s=120.0),
        template=options.template or "debian",
        system=options.system,
        tools=options.tools,
    )
    return Made(task=task, oracle=oracle)
