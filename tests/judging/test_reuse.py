"""Which attempts share one verdict: everything that decides it changes the content's name, and nothing else does."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from headrace.bus.signatures import writers
from headrace.judging import reuse, rules
from headrace.judging.candidates import Candidate
from headrace.judging.grading import examined
from headrace.judging.verdicts import Verdict, conclude
from headrace.messages.judging import Score
from headrace.messages.rollout import HarnessEnd, Trajectory
from headrace.messages.sandbox import OpResult, Snapshot
from headrace.messages.sandbox import TestOutcome as Outcome
from headrace.messages.subjects import SCORE
from headrace.messages.tasks import Change, SandboxLimits, TaskRef, Verifier
from tests.support.judging import FIXED, ORACLE, PATH, TASK, trajectory

LIMITS = SandboxLimits(memory_mib=256)
MADE = trajectory("r1", "g1", {PATH: FIXED}, backend="process", machine="m1")
RUNS_A_COMMAND = msgspec.structs.replace(
    MADE.turns[0], calls=(msgspec.structs.replace(MADE.turns[0].calls[0], arguments={"command": "pkill python"}),)
)


def name_of(made: Trajectory = MADE, task: Any = TASK, oracle: Any = ORACLE, limits: SandboxLimits = LIMITS) -> str:
    return reuse.content_of(Candidate(trajectory=made, task=task, oracle=oracle), limits)


DECIDE: dict[str, Any] = {
    "run": "r2",
    "group": "user.g1",
    "task": TaskRef(TASK.ref.suite, "another"),
    "diff": {PATH: FIXED + b"\n"},
    "deleted": (PATH,),
    "changes": (Change(PATH, "file", 0o755),),
    "touched": ("elsewhere.py",),
    "originals": {PATH: b"before"},
    "earlier": (Snapshot(diff={PATH: b"earlier"}),),
    "backend": "qemu",
    "machine": "m2",
    "isolation": "episode",
    "turns": (RUNS_A_COMMAND,),
    "digest_before": "0" * 64,
}
"""Fields of a Trajectory that change the name, with another value. A group's tenant and the notes on turns count."""
DO_NOT: dict[str, Any] = {
    "lane": "eval",
    "slot": 3,
    "attempt": 2,
    "id": "another",
    "family": "another",
    "seed": 7,
    "outcome": "max_turns",
    "fingerprint": "f",
    "renderer": "h",
    "digest_after": "d",
    "wall_s": 9.0,
    "turns_from": 7,
    "malformed_calls": 2,
    "rollout": "r",
    "harness": HarnessEnd(name="mine", code=0, requests=1, rewritten=0),
}
NEVER = {"altered"}
"""A field that ends every comparison."""
ABOUT_THE_POLICY = {"policy", "sampling", "capture", "plugins"}


def test_every_field_of_a_trajectory_is_decided_upon() -> None:
    named = {*DECIDE, *DO_NOT, *NEVER, *ABOUT_THE_POLICY}
    assert named == set(Trajectory.__struct_fields__)


@pytest.mark.parametrize("field", DECIDE)
def test_what_decides_a_verdict_changes_the_name(field: str) -> None:
    made = msgspec.structs.replace(MADE, **{field: DECIDE[field]})
    assert len({name_of(), name_of(made), name_of(msgspec.structs.replace(MADE, slot=5))}) == 2


@pytest.mark.parametrize("field", DO_NOT)
def test_what_does_not_decide_it_leaves_the_name(field: str) -> None:
    assert name_of(msgspec.structs.replace(MADE, **{field: DO_NOT[field]})) == name_of()


def test_tests_limits_and_judge_change_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    replace = msgspec.structs.replace
    plan = replace(ORACLE.tests, timeout_s=ORACLE.tests.timeout_s + 1)
    names = [
        name_of(),
        name_of(task=replace(TASK, files=TASK.files | {"more.py": b""})),
        name_of(task=replace(TASK, image="other")),
        name_of(task=replace(TASK, template="packages")),
        name_of(task=replace(TASK, limits=LIMITS)),
        name_of(oracle=replace(ORACLE, hidden=ORACLE.hidden | {"test_more.py": b""})),
        name_of(oracle=replace(ORACLE, tests=plan)),
        name_of(oracle=replace(ORACLE, expected=(*ORACLE.expected, "t::more"))),
        name_of(limits=SandboxLimits(memory_mib=512)),
    ]
    monkeypatch.setattr(rules, "VERSION", "j99")
    names.append(name_of())
    assert len(set(names)) == len(names) and "" not in names


def test_no_candidate_can_move_a_border_between_parts() -> None:
    names = [
        name_of(trajectory("r1", "g1", diff, backend="process", machine="m1", **more))
        for diff, more in (
            ({"a.py": b"bc"}, {}),
            ({"a.pyb": b"c"}, {}),
            ({"a.py": b"", "bc": b""}, {}),
            ({}, {"deleted": ("a", "b")}),
            ({}, {"deleted": ("ab",)}),
            ({}, {"deleted": ("a",), "touched": ("b",)}),
            ({}, {"touched": ("a", "b")}),
            ({}, {"changes": (Change("a", "link", 0, "b"),)}),
            ({}, {"changes": (Change("ab", "link", 0, ""),)}),
            ({}, {"earlier": (Snapshot(diff={}), Snapshot(diff={}))}),
            ({}, {"earlier": (Snapshot(diff={}),)}),
            ({}, {}),
        )
    ]
    assert len(set(names)) == len(names)


def test_what_is_always_examined_has_no_name() -> None:
    replace = msgspec.structs.replace
    assert name_of(replace(MADE, machine=msgspec.UNSET)) == "", "the backend cannot tell what the machine is made of"
    assert name_of(replace(MADE, altered=True)) == ""
    assert name_of(task=replace(TASK, sandbox=False)) == ""
    assert name_of(oracle=replace(ORACLE, verifier=Verifier(image="other", artifacts=()))) == ""


MACHINES = (("process", "m1"),)


@pytest.mark.parametrize(
    "changes",
    [
        {"timed_out": True},
        {"machines": ()},
        {"machines": (*MACHINES, ("qemu", "m1"))},
        {"machines": (("process", ""),)},
    ],
)
def test_a_verdict_of_time_or_of_another_machine_names_no_content(changes: dict[str, Any]) -> None:
    candidate = Candidate(trajectory=MADE, task=TASK, oracle=ORACLE)
    verdict = Verdict(decision="failed", machines=MACHINES)
    assert reuse.comparable(candidate, verdict)
    assert not reuse.comparable(candidate, msgspec.structs.replace(verdict, **changes))


def test_a_time_limit_reaches_the_verdict() -> None:
    made = examined(ORACLE, OpResult(ok=False, timed_out=True), None, touched=(), alone=True)
    assert conclude(ORACLE, made, ()).timed_out


def score(**changes: Any) -> Score:
    made = Score(
        run="r1", lane="train", group="g1", slot=0, attempt=0, trajectory_seq=1, task=TASK.ref, family="f",
        judge_version=rules.VERSION, verdict="failed", reward=0.0, passed=False, content="c",
        tests=(Outcome("t::a", "failed"),),
    )  # fmt: skip
    return msgspec.structs.replace(made, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"verdict": "cheating"},
        {"verdict": "candidate_crash"},
        {"reason": "refused_output: too long"},
        {"again": "other"},
        {"suspicions": (f"{rules.TOUCHED}:kernel",)},
        {"suspicions": (f"{rules.CONTROL}:tests",)},
    ],
)
def test_ends_that_never_count_again(changes: dict[str, Any]) -> None:
    contents = reuse.Known("r1")
    assert not contents.note(5, score(**changes))
    assert contents.find("c") == 0 and contents.barred("c")
    contents.note(6, score())
    assert contents.find("c") == 0, "nor does a later one"


def test_the_first_examination_counts_until_another_contradicts_it() -> None:
    contents = reuse.Known("r1")
    assert not contents.note(5, score())
    assert not contents.note(6, score(same_as=5)) and not contents.note(
        7, score(tests=(Outcome("t::a", "failed", "0x7f"),))
    )
    assert contents.find("c") == 5
    contradicts: list[Callable[[], Score]] = [
        lambda: score(verdict="passed"),
        lambda: score(tests=(Outcome("t::a", "error"),)),
        lambda: score(value=0.5),
        lambda: score(verdict="cheating"),
        lambda: score(run=f"r1-{rules.VERSION}", verdict="passed"),
    ]
    for other in contradicts:
        contents = reuse.Known("r1")
        contents.note(5, score())
        assert contents.note(8, other()) and contents.find("c") == 0
        assert not contents.note(9, other()), "it is told once"


def test_a_score_of_re_judging_is_compared_and_never_counts() -> None:
    contents = reuse.Known("r1")
    assert not contents.note(5, score(run=f"r1-{rules.VERSION}"))
    assert contents.find("c") == 0 and not contents.barred("c")


def test_only_a_judge_signs_scores_of_training() -> None:
    signs = {
        group: writers(SCORE.at(run="r1", judge=rules.VERSION, group=group), "score") for group in ("g1", "user.g1")
    }
    assert signs == {"g1": frozenset(["judge"]), "user.g1": frozenset(["judge", "feedback"])}
