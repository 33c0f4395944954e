"""Training and evaluation share no task: the same name is refused, equal content is left out, much of it is refused."""

from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from headrace.actors.curriculum import Curriculum
from headrace.bus.errors import Unrecoverable
from headrace.config import Config, Production, Run, Tasks
from headrace.launch.checks import suites as checks
from headrace.messages.subjects import EVENT
from headrace.messages.tasks import TaskRef
from headrace.tasks import open_suite
from headrace.tasks.overlap import content, overlap
from tests.conftest import Connect
from tests.support.actors import living
from tests.support.folder_suites import write_suite


def made(root: Path, name: str, tasks: Iterable[tuple[str, int]]) -> str:
    """A folder suite: the id of each task, and the seed that its content follows from."""
    generated = open_suite("generated/train")
    pairs = []
    for id, seed in tasks:
        ref, origin = TaskRef(name, id), str(2_000_000 + seed)
        task = msgspec.structs.replace(generated.task(origin), ref=ref)
        pairs.append((task, msgspec.structs.replace(generated.oracle(origin), ref=ref)))
    write_suite(name, root / name, pairs, "made by a test")
    return name


def test_a_task_of_both_sides_is_refused_whatever_its_content(tmp_path: Path) -> None:
    training = open_suite(made(tmp_path, "train", [("django-1", 1), ("django-2", 2)]), tmp_path)
    made(tmp_path, "test", [("django-2", 9)])
    found = overlap(training, ["generated/heldout", "test"], tmp_path)
    assert found.refused and "django-2" in found.refused and "test" in found.refused
    assert overlap(training, ["train"], tmp_path).refused
    mix = open_suite("mix/generated/train*3+train", tmp_path)
    assert overlap(mix, ["test"], tmp_path).refused


def test_a_number_names_a_row_of_its_own_suite_alone(tmp_path: Path) -> None:
    training = open_suite(made(tmp_path, "train", [("000001", 1), ("000002", 2)]), tmp_path)
    made(tmp_path, "test", [("000001", 8), ("000002", 9)])
    assert overlap(training, ["test"], tmp_path) == ("", frozenset())
    assert overlap(training, ["train"], tmp_path).refused


def test_few_tasks_of_equal_content_are_left_out_and_many_are_refused(tmp_path: Path) -> None:
    training = open_suite(made(tmp_path, "train", [(f"a{n}", n) for n in range(100)]), tmp_path)
    made(tmp_path, "one", [("b", 42), ("c", 500)])
    made(tmp_path, "two", [("b", 42), ("c", 43)])
    assert overlap(training, ["one"], tmp_path) == ("", frozenset({"a42"}))
    found = overlap(training, ["two"], tmp_path)
    assert "2 of 100" in found.refused and found.equal == {"a42", "a43"}
    mix = open_suite("mix/train+generated/train", tmp_path)
    assert overlap(mix, ["one"], tmp_path) == ("", frozenset({"0~a42"}))


def test_generated_suites_share_no_seeds() -> None:
    for training, measuring in (("train", ("heldout", "unseen")), ("notes", ("notes-heldout",))):
        suite = open_suite(f"generated/{training}")
        assert overlap(suite, [f"generated/{name}" for name in measuring], "") == ("", frozenset())
    assert overlap(open_suite("generated/heldout"), ["generated/heldout"], "").refused


def settings(root: Path, heldout: str) -> Config:
    tasks = Tasks(dir=str(root), suite="train", heldout=heldout, uncertified=True)
    return Config(run=Run(dir=str(root)), production=Production(enabled=False), tasks=tasks)


@pytest.mark.anyio
async def test_a_run_leaves_equal_tasks_out_and_one_that_shares_names_does_not_start(
    connect: Connect, tmp_path: Path
) -> None:
    made(tmp_path, "train", [(f"a{n}", n) for n in range(100)])
    made(tmp_path, "named", [("a7", 500)])
    made(tmp_path, "equal", [("b", 7)])
    refused = Curriculum(settings(tmp_path, "named"), await connect("curriculum"), "r1", "c-1")
    with pytest.raises(Unrecoverable, match="a7"):
        await refused.start()
    await refused.shut(1.0)
    parts = [finding.part for finding in checks.check(settings(tmp_path, "named")) if "a7" in finding.text]
    assert parts == ["tasks.suite"]
    assert not [each for each in checks.check(settings(tmp_path, "equal")) if each.part == "tasks.suite"]
    observer = await connect("admin")
    async with living(Curriculum, settings(tmp_path, "equal"), await connect("curriculum"), "r2") as actor:
        assert {actor.tasks[number] for number in range(100)} == {f"a{n}" for n in range(100)} - {"a7"}
    where = EVENT.where(run="r2", actor="curriculum", type="event")
    told = [received.message async for received in observer.history("HR_EVENT", where)]
    assert [message.data["tasks"] for message in told if message.kind == "tasks_left_out"] == [1]


@pytest.mark.slow
def test_generated_suites_share_no_content() -> None:
    for training, measuring in (("train", ("heldout", "unseen", "unseen-final")), ("notes", ("notes-heldout",))):
        suites = [open_suite(f"generated/{name}") for name in measuring]
        measured = {content(suite.task(id)) for suite in suites for id in suite.ids()}
        suite = open_suite(f"generated/{training}")
        drawn = {content(suite.task(suite.ids()[place * 99_991])) for place in range(5000)}
        assert len(drawn) > 4900 and not drawn & measured
