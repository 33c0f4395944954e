"""Each kind of grading, in a real sandbox of the process backend: what passes, what does not, what cannot be forged."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from headrace.config import Environment
from headrace.judging import Candidate, HostMachines, Options, Verdict, examine, verdicts
from headrace.judging.grading import examined, reward
from headrace.judging.outcomes import RefusedOutput
from headrace.judging.verdicts import NoVerdict
from headrace.messages import tasks
from headrace.messages.judging import Score
from headrace.messages.sandbox import OpResult
from headrace.messages.sandbox import TestOutcome as Outcome
from headrace.messages.tasks import ANSWER, CheatRule, Grading, Oracle, Task, TaskRef
from headrace.vmhost.node.host import Host
from tests.support.judging import trajectory

pytestmark = pytest.mark.anyio
REF = TaskRef("toy", "1")
BUG, FIX = b"def add(a, b):\n    return a - b\n", b"import importlib\n\n\ndef add(a, b):\n    return a + b\n"
TESTS = b"""from calc import add

def test_add():
    assert add(1, 2) == 3

def test_zero():
    assert add(0, 0) == 0

def test_known_to_fail():
    assert add(1, 1) == 3
"""
FORGED = b"""import atexit
atexit.register(print, "PASSED test_calc.py::test_add\\nPASSED test_calc.py::test_zero")
def add(a, b):
    return a - b
"""


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    opened = await Host.open(Environment(backend="process", max_vms=8))
    yield opened
    await opened.close()


def oracle(grading: Grading, plan: tasks.TestPlan, **changes: Any) -> Oracle:
    made = Oracle(ref=REF, hidden={"test_calc.py": TESTS}, tests=plan, expected=(), solution={}, grading=grading)
    return msgspec.structs.replace(made, **changes)


async def verdict(host: Host | None, known: Oracle, diff: dict[str, bytes], **changes: Any) -> Verdict:
    fields = {"files": {"calc.py": BUG}, "allowed": ("**",)} | changes
    task = Task(ref=REF, family="toy", prompt="add", tests=known.tests, **fields)
    candidate = Candidate(
        trajectory=trajectory("r", f"g{abs(hash(str(diff)))}", diff, isolation="episode", task=REF),
        task=task,
        oracle=known,
    )

    async def report(*event: object, **data: object) -> None: ...

    machines: Any = HostMachines(host) if host is not None else None
    return await examine(candidate, machines, report, Options())


PYTEST = tasks.TestPlan(kind="pytest", paths=("test_calc.py",))
SUMMARY = tasks.TestPlan(
    kind="command", argv=("python3", "-m", "pytest", "-rA", "-p", "no:cacheprovider", "test_calc.py")
)
NAMED = Grading(kind="f2p_p2p", pass_to_pass=("test_calc.py::test_zero",))
EXPECTED = ("test_calc.py::test_add",)


async def test_named_tests_decide_and_a_test_that_always_fails_does_not(host: Host) -> None:
    answers = oracle(NAMED, PYTEST, expected=EXPECTED)
    fixed = await verdict(host, answers, {"calc.py": FIX})
    assert fixed.decision == "passed"
    assert {test.name: test.outcome for test in fixed.tests}["test_calc.py::test_known_to_fail"] == "failed"
    assert fixed.suspicions == ()
    assert (await verdict(host, answers, {})).decision == "failed"


async def test_a_log_decides_where_the_sandbox_reports_nothing_and_a_forged_one_is_found_out(host: Host) -> None:
    logged = msgspec.structs.replace(NAMED, parser="pytest")
    answers = oracle(logged, SUMMARY, expected=EXPECTED, solution={"calc.py": FIX})
    assert (await verdict(host, answers, {"calc.py": FIX})).decision == "passed"
    assert (await verdict(host, answers, {})).decision == "failed"
    forged = await verdict(host, answers, {"calc.py": FORGED})
    assert {test.outcome for test in forged.tests if test.name in EXPECTED} == {"passed"}
    assert (forged.decision, forged.suspicions) == ("cheating", ("control:tests",)), "it prints the same for any tests"


@pytest.mark.parametrize(
    ("grading", "argv", "fixed", "broken"),
    [
        (Grading(kind="exit_code"), "python3 -c 'from calc import add; assert add(1, 2) == 3'", None, None),
        (Grading(kind="all_tests"), "python3 -m pytest --junitxml=r.xml -k 'add or zero' test_calc.py", None, None),
        (
            Grading(kind="reward_file", file=".headrace/reward.json"),
            'sh -c \'python3 -c "from calc import add; print(dict(reward=1.0 if add(1, 2) == 3 else 0.25))"'
            " | tr \"'\\''\" \\\" > .headrace/reward.json'",
            1.0,
            0.25,
        ),
    ],
    ids=["exit_code", "all_tests", "reward_file"],
)
async def test_commands(host: Host, grading: Grading, argv: str, fixed: float | None, broken: float | None) -> None:
    import shlex

    plan = tasks.TestPlan(kind="command", argv=tuple(shlex.split(argv)))
    hidden = {"test_calc.py": TESTS, ".headrace/empty": b""}
    answers = oracle(grading, plan, hidden=hidden, solution={"calc.py": FIX})
    good, bad = await verdict(host, answers, {"calc.py": FIX}), await verdict(host, answers, {})
    assert (good.decision, good.value) == ("passed", fixed), good
    assert (bad.decision, bad.value) == ("failed", broken), bad
    # The commands that hold their own expectation do not run the tests that are altered; the known solution shows it.
    assert good.suspicions == (() if grading.kind == "all_tests" else ("control_blind:tests",))


async def test_a_part_of_the_reward_that_no_altered_test_gives_is_kept(host: Host) -> None:
    line = "python3 -m pytest -q -k 'add or zero' test_calc.py && echo 1 > .headrace/r || echo 0.5 > .headrace/r"
    plan = tasks.TestPlan(kind="command", argv=("sh", "-c", line))
    hidden = {"test_calc.py": TESTS, ".headrace/empty": b""}
    graded = Grading(kind="reward_file", file=".headrace/r")
    answers = oracle(graded, plan, hidden=hidden, solution={"calc.py": FIX})
    half = await verdict(host, answers, {})
    assert (half.decision, half.value, half.suspicions) == ("failed", 0.5, ("control_blind:tests",))
    whole = await verdict(host, answers, {"calc.py": FIX})
    assert (whole.decision, whole.value, whole.suspicions) == ("passed", 1.0, ())
    paid = b"import os\nos.makedirs('.headrace', exist_ok=True)\nopen('.headrace/r', 'w').write('1')\n"
    killed = await verdict(host, answers, {"calc.py": paid + b"os.kill(os.getppid(), 9)\nos._exit(0)\n"})
    assert killed.decision != "passed" and not (killed.decision == "failed" and killed.value)


async def test_a_candidate_writes_no_reward_file_of_its_own(host: Host) -> None:
    plan = tasks.TestPlan(kind="command", argv=("true",))
    answers = oracle(Grading(kind="reward_file", file=".headrace/reward.txt"), plan)
    told = await verdict(host, answers, {".headrace/reward.txt": b"1"})
    assert (told.decision, told.value, told.reason) == ("failed", 0.0, ""), "tests that crash are a failure"


async def test_separate_tests_see_the_allowed_files_alone_changed_or_not(host: Host) -> None:
    command = "test ! -e calc.py && grep -q 42 out/answer.txt && grep -q kept out/old.txt"
    plan = tasks.TestPlan(kind="command", argv=("sh", "-c", command))
    answers = oracle(Grading(kind="exit_code"), plan, separate=True)
    places: dict[str, Any] = {"files": {"calc.py": BUG, "out/old.txt": b"kept\n"}, "allowed": ("out/**",)}
    diff = {"out/answer.txt": b"42\n", "calc.py": BUG + b"\n"}
    assert (await verdict(host, answers, diff, **places)).decision == "passed"
    assert (await verdict(host, answers, {"out/answer.txt": b"41\n"}, **places)).decision == "failed"


async def test_a_message_is_graded_without_a_sandbox() -> None:
    grading = Grading(kind="checker", checker="number", reference={"answer": "1,024"})
    answers = oracle(grading, PYTEST)
    good = await verdict(None, answers, {ANSWER: b"2 to the 10th.\n\\boxed{1024}"}, sandbox=False)
    bad = await verdict(None, answers, {ANSWER: b"Answer: 1023"}, sandbox=False)
    assert [(one.decision, one.value) for one in (good, bad)] == [("passed", 1.0), ("failed", 0.0)]
    with pytest.raises(NoVerdict, match="the checker 'number' raised KeyError") as broken:
        await verdict(None, oracle(Grading(kind="checker", checker="number"), PYTEST), {}, sandbox=False)
    assert broken.value.reason == "reward_error"


def test_a_pattern_of_a_suite_is_told_and_takes_nothing_away() -> None:
    from headrace.judging import rules

    told = (CheatRule(name="reads_answers", pattern=r"answers\.json"),)
    answers = oracle(NAMED, PYTEST, expected=EXPECTED, cheating=told)
    task = Task(ref=REF, family="toy", prompt="", files={}, allowed=("**",), tests=PYTEST)
    matched = rules.suspicions(task, answers, {"calc.py": b"open('answers.json')\n"}, ())
    assert matched == ("reads_answers:calc.py",)
    assert verdicts.conclude(answers, verdicts.Examination(ok=True), matched).decision == "passed"


@pytest.mark.parametrize(
    ("reported", "ok"),
    [
        ({"a": "passed", "b": "passed"}, True),
        ({"a": "passed", "b": "skipped", "c": "failed"}, True),
        ({"a": "skipped", "b": "passed"}, False),
        ({"a": "passed"}, False),
        ({"a": "passed", "b": "failed"}, False),
    ],
)
def test_named_tests(reported: dict[str, Any], ok: bool) -> None:
    tests = [Outcome(name, outcome) for name, outcome in reported.items()]
    assert verdicts.named_passed(tests, ("a",), ("b",)) is ok
    assert not verdicts.named_passed([*tests, Outcome("a", "failed")], ("a",), ("b",)), "the worst of two counts"


def test_a_name_cut_in_its_parameters_stands_for_those_that_agree() -> None:
    tests = [Outcome("t[log(photon s)]", "passed"), Outcome("t[log(photon m)]", "passed"), Outcome("u[1]", "passed")]
    assert verdicts.named_passed(tests, ("t[log(photon",), ())
    assert not verdicts.named_passed([*tests, Outcome("t[log(photon k)]", "failed")], ("t[log(photon",), ())
    assert not verdicts.named_passed(tests, ("u[",), ("u",)), "a whole name is itself alone"


def test_names_that_come_from_a_log_are_found_in_the_report() -> None:
    tests = [Outcome("a.py::t[x\\n  y]", "passed"), Outcome("a.py::u", "passed"), Outcome("a.py::v - w", "failed")]
    assert verdicts.named_passed(tests, ("a.py::t[x\\n y]",), ("a.py::u - Needs fixing - later",))
    assert not verdicts.named_passed(tests, ("a.py::v - w - reason",), ())
    assert not verdicts.named_passed(tests, ("a.py::u",), ("a.py::other - reason",))


@pytest.mark.parametrize(("data", "value"), [(b"0.5\n", 0.5), (b'{"reward": 1}', 1.0), (b'{"score": 0.25}', 0.25)])
def test_reward_files(data: bytes, value: float) -> None:
    assert reward(data) == value


@pytest.mark.parametrize("data", [b"", b"x", b"nan", b"[1]", b'{"a": 1, "b": 2}', b"1e999", b"[" * 100_000])
def test_a_reward_file_without_a_number_is_refused(data: bytes) -> None:
    with pytest.raises(RefusedOutput):
        reward(data)


@pytest.mark.parametrize(
    ("written", "value"), [(None, -1.0), (b" \n", -1.0), (b"-3", -1.0), (b"-0.5", -0.5), (b"0.75", 0.75)]
)
def test_tests_that_crash_earn_the_least_that_the_task_gives(written: bytes | None, value: float) -> None:
    answers = oracle(Grading(kind="reward_file", lowest=-1.0), PYTEST)
    made = examined(answers, OpResult(), written, touched=(), alone=True)
    assert (made.value, made.ok, made.refused) == (value, False, "")


def test_a_recorded_score_gives_the_same_verdict() -> None:
    grading = Grading(kind="reward_file", passes_at=0.5)
    answers = oracle(grading, PYTEST)
    score = Score(
        run="r", lane="train", group="g", slot=0, attempt=0, trajectory_seq=1, task=REF, family="toy",
        judge_version="j", verdict="passed", reward=0.75, passed=True, value=0.75,
    )  # fmt: skip
    assert verdicts.conclude(answers, verdicts.recorded(score, answers), ()).decision == "passed"
