"""The behaviour of attempts: what counts as a read before an edit, a test, a fixed problem, a question."""

import msgspec

from headrace.bench.behaviour import acts_of, behaviour_of
from headrace.messages.base import Array
from headrace.messages.rollout import ToolCall, ToolResult, Turn
from headrace.messages.training import Behaviour
from tests.support import records

NONE = Array.of([], "<i4")
Made = tuple[str, dict[str, str], str, bool]


def turn(index: int, *made: Made) -> Turn:
    calls = tuple(
        ToolCall(id=f"{index}.{place}", name=name, arguments=arguments)
        for place, (name, arguments, *_) in enumerate(made)
    )
    results = tuple(
        ToolResult(call_id=call.id, ok=ok, output=output) for call, (_, _, output, ok) in zip(calls, made, strict=True)
    )
    return Turn(
        index=index, segment=0, prompt_ids=NONE, ids=NONE, logprobs=Array.of([], "<f4"), calls=calls, results=results
    )


CAREFUL = (
    turn(0, ("read_file", {"path": "a.py"}, "1:x", True), ("search", {"query": "x"}, "a.py:1:x", True)),
    turn(1, ("edit", {"path": "a.py"}, "the text was not found", False)),
    turn(2, ("read_file", {"path": "a.py"}, "1:x", True)),
    turn(3, ("edit_file", {"path": "a.py"}, "ok", True)),
    turn(4, ("lint", {}, "a.py:1: undefined name y\na.py:7: undefined name z", True)),
    turn(5, ("write_file", {"path": "a.py"}, "ok", True)),
    turn(6, ("lint", {}, "no problems", True), ("run_tests", {}, "2 passed", True)),
    turn(7, ("finish", {"message": "Done. Shall I remove the old name too?"}, "", True)),
)
HASTY = (
    turn(0, ("run_tests", {}, "1 failed", True)),
    turn(1, ("edit_file", {"path": "a.py"}, "ok", True)),
    turn(2, ("finish", {"message": "done"}, "", True)),
)


def test_the_acts_of_an_attempt() -> None:
    careful, hasty = acts_of(CAREFUL), acts_of(HASTY)
    assert (careful.calls, careful.calling_turns, careful.most_calls) == (10, 8, 2)
    assert careful.edits == ((1, False), (3, True), (5, True)) and careful.reads_before_edit == 3
    assert (careful.tested, careful.lint_fixed, careful.asked) == (True, 2, True)
    assert (hasty.reads_before_edit, hasty.tested, hasty.lint_fixed, hasty.asked) == (0, False, 0, False)


def test_a_step_publishes_means_over_attempts_with_calls() -> None:
    attempts = [
        msgspec.structs.replace(records.trajectory(records.issued("g000001", slot, 0)), turns=turns)
        for slot, turns in enumerate((CAREFUL, HASTY, ()))
    ]
    assert behaviour_of(attempts) == Behaviour(
        calls_per_turn=round(13 / 11, 4), reads_before_edit=1.5, tested=0.5, lint_fixed=1.0, asked=0.5
    )
    assert behaviour_of(attempts[2:]) is None
