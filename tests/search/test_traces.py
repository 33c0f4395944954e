"""Pairs from traces: which searches and edits belong together, and which tasks are states of one repository."""

import msgspec
import pytest

from headrace.messages.rollout import ToolCall, ToolResult, Trajectory
from headrace.search.adapters.adapter import AdapterError
from headrace.search.adapters.traces import Traces, queries, usable
from tests.support.searched_run import QUERIES, attempt, path_of, task, text_of

PATH, OTHER = path_of(0), "shop0/other.py"
BEFORE = b"import os\n\n\ndef first():\n    return 1\n\n\ndef second():\n    return 2\n"


def trace(*steps: tuple[str, str], ok: bool = True) -> Trajectory:
    """An attempt with a call per turn: a tool, and its query or path. Both files are changed in the end."""
    made = attempt("r", 0, 0, "zorvex", "unused")
    turns = tuple(
        msgspec.structs.replace(
            made.turns[0],
            index=at,
            calls=(ToolCall(id=f"{at}.0", name=name, arguments={"query" if "search" in name else "path": text}),),
            results=(ToolResult(call_id=f"{at}.0", ok=ok, output=""),),
        )
        for at, (name, text) in enumerate(steps)
    )
    return msgspec.structs.replace(
        made, turns=turns, diff=made.diff | {OTHER: BEFORE.replace(b"return 2", b"return 3"), "new.py": b"x = 1\n"}
    )


def test_a_search_is_paired_with_the_functions_of_files_whose_first_edit_follows_it() -> None:
    where = msgspec.structs.replace(task(0), files=task(0).files | {OTHER: BEFORE})
    steps = (
        ("semantic_search", "one"),
        ("edit", OTHER),
        ("semantic_search", "two"),
        ("write_file", "new.py"),
        ("edit_file", f"./{PATH}"),
        ("edit", OTHER),
        ("semantic_search", "three"),
    )
    pairs = {query.text: set(query.wanted) for query in queries(trace(*steps), where)}
    invoice = (PATH, "invoice_0")
    assert pairs == {"one": {(OTHER, "second"), invoice}, "two": {invoice}}
    assert queries(trace(*steps, ok=False), where) == []
    assert queries(trace(("semantic_search", "one"), ("read_file", PATH)), where) == []


def test_an_edit_outside_of_functions_is_paired_with_the_text() -> None:
    made = msgspec.structs.replace(
        trace(("semantic_search", "one"), ("edit", OTHER)), diff={OTHER: BEFORE.replace(b"import os", b"import re")}
    )
    (pair,) = queries(made, msgspec.structs.replace(task(0), files={OTHER: BEFORE}))
    assert pair.wanted == {(OTHER, "1")}


def test_attempts_of_users_and_with_other_files_are_left_out() -> None:
    made = attempt("r", 0, 0, "zorvex", "q")
    assert usable(made, task(0))
    assert not usable(msgspec.structs.replace(made, lane="production"), task(0))
    assert not usable(msgspec.structs.replace(made, group="ab12.s1"), task(0)), "of a branch"
    assert not usable(msgspec.structs.replace(made, altered=True), task(0))
    assert not usable(made, msgspec.structs.replace(task(0), image="docker.io/org/app:1"))


def test_states_of_one_repository_are_never_learnt_and_measured_apart() -> None:
    traces = Traces()
    for repository in range(10):
        for state, word in enumerate(("zorvex", "plimar")):
            made = attempt("r", repository, 0, word, QUERIES[word])
            ref = msgspec.structs.replace(task(repository).ref, task=f"t{repository}-{state}")
            files = {path_of(repository): text_of(repository, "" if state else "inventory").encode()}
            traces.add(made, msgspec.structs.replace(task(repository), ref=ref, files=files))
        if repository == 8:
            with pytest.raises(AdapterError, match=r"at least 10 repositories, got 9 \(from 18 passed attempts"):
                traces.split()
    learnt, held_out = traces.split()
    assert len(learnt) == len(held_out) == 10
    assert {each.repository for each in learnt}.isdisjoint(each.repository for each in held_out)
    assert {each.repository for each in (*learnt, *held_out)} == {f"searched/t{at}-0" for at in range(10)}
