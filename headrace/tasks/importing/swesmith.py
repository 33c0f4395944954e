"""SWE-smith rows: `patch` puts the bug in, its reverse is the known solution.

The agent gets the repository with the bug and without the modules of the failing tests; those are the hidden files. The
repository comes from a checkout (``--repos``): the images of SWE-smith hold it without the bug.
"""

from collections.abc import Iterator
from typing import Any

from headrace.messages.tasks import Change, Grading, Oracle, Task, TestPlan
from headrace.tasks.importing import trees
from headrace.tasks.importing.base import (
    ImportOptions,
    ImportRefused,
    MadeTask,
    SourceEntry,
    names_of,
    row_entries,
    text_of,
)
from headrace.tasks.importing.swebench import TIMEOUT_S


def read(options: ImportOptions) -> Iterator[SourceEntry]:
    """The rows of a JSONL file."""
    return row_entries(options, "instance_id", _made)


def _made(row: dict[str, Any], id: str, options: ImportOptions) -> MadeTask:
    to_pass, to_keep = names_of(row, "FAIL_TO_PASS"), names_of(row, "PASS_TO_PASS")
    if not to_pass:
        raise ImportRefused("FAIL_TO_PASS is empty: no test tells a fix from none")
    prompt = text_of(row, "problem_statement", "").strip()
    if not prompt:
        raise ImportRefused("problem_statement is empty: the agent would not know what is wrong")
    repo = text_of(row, "repo")
    mirror = repo.rpartition("/")[2]  # owner__name.commit
    name, _, commit = mirror.rpartition(".")
    tree = trees.find(options.repos, (mirror, id), (name, name.rpartition("__")[2]), row.get("base_commit") or commit)
    if tree is None:
        raise ImportRefused(
            f"the bug is a patch on {repo}, whose image does not have it: put a checkout named {mirror} into --repos"
        )
    files = tree.files
    named = {test.partition("::")[0] for test in (*to_pass, *to_keep)}
    if not all("::" in test for test in to_pass) or not named <= files.keys():
        raise ImportRefused(f"the tests are not pytest's, or not in the repository: {', '.join(to_pass)[:200]}")
    bug = trees.apply(tree, text_of(row, "patch"), "patch")
    hidden_paths = {test.partition("::")[0] for test in to_pass}
    broken = trees.with_changes(tree, bug)
    visible = {path: content for path, content in broken.files.items() if path not in hidden_paths}
    # Undone: entries as they were, and what the bug made is gone.
    undone = [tree.entries.get(path) or Change(path, "file", 0o644) for path in bug.entries if path in tree.files]
    undone += [tree.entries[path] for path in (*bug.entries, *bug.removed) if path in tree.entries]
    ref = options.ref(id)
    oracle = Oracle(
        ref=ref,
        hidden={path: files[path] for path in sorted(named)},
        tests=TestPlan(kind="pytest", paths=tuple(sorted(named)), timeout_s=TIMEOUT_S),
        expected=to_pass,
        solution={path: files[path] for path in (*bug.changed, *bug.removed) if path in files},
        removed=tuple(
            path
            for path in {**bug.changed, **bug.entries}
            if path not in files and (path in broken.files or path not in tree.entries)
        ),
        grading=Grading(kind="f2p_p2p", pass_to_pass=to_keep),
        entries=trees.entries_of(entry for path, entry in tree.entries.items() if path in named),
        solution_entries=trees.entries_of({entry.path: entry for entry in undone}.values()),
    )
    task = Task(
        ref=ref,
        family=f"swesmith:{name}",
        prompt=prompt,
        files=visible,
        entries=trees.entries_of(entry for path, entry in broken.entries.items() if path not in hidden_paths),
        allowed=("**",),
        tests=TestPlan(kind="pytest", paths=tuple(sorted(named - hidden_paths)), timeout_s=120.0),
        template=options.template or "debian",
        system=options.system,
        tools=options.tools,
    )
    return MadeTask(task=task, oracle=oracle, notes=tree.notes)
