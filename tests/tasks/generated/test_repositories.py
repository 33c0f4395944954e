"""Generated tasks: right is right, broken is broken, equal ids are equal tasks, and the suites don't meet."""

import asyncio
import functools
import itertools
import subprocess
import sys
from collections import Counter

import pytest

from headrace.messages.sandbox import OpResult, RunTests
from headrace.messages.tasks import TestPlan
from headrace.tasks import UnknownSuite, open_suite
from headrace.tasks.generated import repositories
from headrace.tasks.generated.broad_templates import BROAD
from headrace.tasks.generated.final_templates import FINAL
from headrace.tasks.generated.repositories import SEEDS, Made, make
from headrace.tasks.generated.templates import TRAINED, UNSEEN
from headrace.tasks.local import LocalFiles
from headrace.tasks.sealing import Sealed, seal
from headrace.tasks.suites import GeneratedSuite


def ran(files: dict[str, bytes], plan: TestPlan) -> OpResult:
    return asyncio.run(LocalFiles(files).call(RunTests(plan=plan)))


repository = functools.cache(make)  # several tests look at the same repositories


def some(suite: str, count: int) -> list[Made]:
    start = SEEDS[suite].start
    return [repository(suite, start + number) for number in range(count)]


@pytest.mark.parametrize("suite", ["heldout", "dev", "unseen", "unseen-final", "train"])
def test_broken_fails_and_the_solution_passes(suite: str) -> None:
    for made in some(suite, 60):
        task, oracle = made.task, made.oracle
        visible = ran(task.files, task.tests)
        assert [test.name for test in visible.tests if test.outcome == "failed"] == [
            f"test_visible.py::test_{made.target.name}"
        ]
        broken = ran(task.files | oracle.hidden, oracle.tests)
        assert {test.name for test in broken.tests} == set(oracle.expected)
        assert [test.name for test in broken.tests if test.outcome == "failed"] == [oracle.expected[0]]
        fixed = ran(task.files | oracle.solution | oracle.hidden, oracle.tests)
        assert [test.name for test in fixed.tests if test.outcome == "passed"] == sorted(
            oracle.expected, key=[test.name for test in fixed.tests].index
        )
        lines = task.files[made.path].decode().splitlines()
        assert lines[made.line - 1] != made.fixed
        lines[made.line - 1] = made.fixed
        assert "\n".join(lines).encode() + b"\n" == oracle.solution[made.path]


def test_the_agents_side_does_not_tell_the_answer() -> None:
    for made in some("heldout", 60):
        assert made.fixed.encode() not in made.task.files[made.path].splitlines()[made.line - 1]
        assert not set(made.oracle.hidden) & set(made.task.files)
        assert made.task.prompt.startswith(made.target.name)


def test_a_task_follows_from_its_id_alone() -> None:
    code = (
        "import hashlib\nfrom headrace.messages.codec import encode\nfrom headrace.tasks import open_suite\n"
        "s = open_suite('generated/train')\n"
        "data = b''.join(encode(s.task(i))[0] + encode(s.oracle(i))[0] for i in s.ids()[:40])\n"
        "print(hashlib.sha256(data).hexdigest())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1


def test_the_agents_side_needs_no_hidden_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    suites = [open_suite(f"generated/{kind}") for kind in ("dev", "heldout", "unseen")]
    made = [make(suite.name.removeprefix("generated/"), int(id)).task for suite in suites for id in suite.ids()[:20]]

    hidden: list[bytes] = []

    def watched(files: dict[str, bytes]) -> Sealed:
        hidden.extend(files.values())
        return seal(files)

    monkeypatch.setattr(repositories, "seal", watched)
    assert [suite.task(id) for suite in suites for id in suite.ids()[:20]] == made
    assert not any(hidden)


def test_suites_have_seeds_of_their_own() -> None:
    ranges = sorted((seeds.start, seeds.stop) for seeds in SEEDS.values())
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))
    assert len(SEEDS["heldout"]) >= 500 and len(SEEDS["unseen"]) >= 200
    shown = {str(sorted(made.task.files.items())) for suite in SEEDS for made in some(suite, 100)}
    assert len(shown) == 100 * len(SEEDS), "no repository twice"


def test_unseen_templates_are_in_no_other_suite() -> None:
    unseen = {template.about.split("{")[0] + str(template.body) for template in UNSEEN}
    assert not unseen & {template.about.split("{")[0] + str(template.body) for template in TRAINED}
    names = {template.name for template in UNSEEN}
    assert {made.target.template.name for made in some("unseen", 100)} <= names
    for suite in ("train", "heldout", "dev"):
        assert not names & {made.target.template.name for made in some(suite, 100)}
    trained = [template.body for template in TRAINED]
    assert all(template.body not in trained for template in UNSEEN)


def test_final_templates_are_new() -> None:
    """No description, body or name of theirs is known from another suite, and they are drawn in no other suite."""
    others = (*TRAINED, *UNSEEN)
    assert len(FINAL) >= 20 and {template.family for template in FINAL} == {"one_line", "multi_line"}
    for template in FINAL:
        assert template.about not in {other.about for other in others}
        assert template.body not in {other.body for other in others}
    names = {template.name for template in FINAL}
    assert len(names) == len(FINAL) and not names & {other.name for other in others}
    assert {made.target.template.name for made in some("unseen-final", 300)} == names


def test_broad_templates_are_in_no_suite() -> None:
    """No description, body or name of a template of broad traces is known from a suite, and no suite is called so."""
    others = (*TRAINED, *UNSEEN, *FINAL)
    assert len(BROAD) >= 100 and not {template.body for template in BROAD} & {other.body for other in others}
    assert not {template.about for template in BROAD} & {other.about for other in others}
    names = {template.name for template in BROAD}
    assert len(names) == len(BROAD) and not names & {other.name for other in others}
    with pytest.raises(UnknownSuite, match="broad"):
        open_suite("generated/broad")


def test_families() -> None:
    assert len(TRAINED) >= 30 and {template.family for template in UNSEEN} == {"one_line", "multi_line"}
    for suite in ("heldout", "unseen"):
        families = Counter(made.task.family for made in some(suite, 200))
        assert 70 < families["one_line"] < 130 and sum(families.values()) == 200
    assert len({made.target.template.name for made in some("heldout", 500)}) == len(TRAINED)


def test_every_bug_of_every_template_is_a_bug() -> None:
    """Each alternative at each point changes what the function gives for some arguments."""
    import random

    rng = random.Random(0)
    for template in (*TRAINED, *UNSEEN, *FINAL, *BROAD):
        left = set(template.bugs)
        for _ in range(400):
            function = repositories._function(rng, template, set())
            right = repositories._callable(function)
            arguments = [repositories._arguments(rng, template.takes) for _ in range(8)]
            left -= {
                bug
                for bug in left
                if any(repr(repositories._callable(function, bug)(a)) != repr(right(a)) for a in arguments)
            }
            if not left:
                break
        assert not left, (template.name, left)


def test_ids_are_seeds_as_text() -> None:
    suite = open_suite("generated/train")
    ids = suite.ids()
    assert ids[0] == "1000000" and len(ids) > 10**8 and list(ids[2:4]) == ["1000002", "1000003"]
    assert suite.task(ids[5]).ref.task == ids[5] and suite.oracle(ids[5]).ref == suite.task(ids[5]).ref
    for wrong in ("0", "01000000", "x", "", "-1", "1000000.0", "９"):
        with pytest.raises(UnknownSuite, match="has no task"):
            suite.task(wrong)
    with pytest.raises(UnknownSuite, match="train"):
        open_suite("generated/nothing")
    assert isinstance(suite, GeneratedSuite)
