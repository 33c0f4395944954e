"""The table of subjects: legal, disjoint, and each where it belongs."""

import pytest

from headrace.messages import TYPES
from headrace.messages import subjects as s
from headrace.messages.rollout import RolloutRequest
from headrace.messages.tasks import TaskRef
from tests.test_docs import script


def test_a_subject_is_filled_in_and_an_illegal_one_refused() -> None:
    assert s.TRAJ.at(run="r1", group="g000012") == "hr.traj.r1.g000012"
    assert s.TRAJ.at(run="r1", group="ab12.0042") == "hr.traj.r1.ab12.0042"
    for bad in ("G1", "a b", "", "a..b", "a.>", "*"):
        with pytest.raises(ValueError, match="not a legal subject"):
            s.TRAJ.at(run="r1", group=bad)
    with pytest.raises(ValueError, match="at most 8 tokens"):
        s.TRAJ.at(run="r1", group="a.b.c.d.e.f")
    with pytest.raises(KeyError):
        s.TRAJ.at(run="r1")


def test_what_a_user_owns_is_known_by_its_subject() -> None:
    for subject in (
        s.TRAJ.at(run="r1", group="ab12.s1"),
        s.TURN.at(run="r1", trajectory="ab12.s1-0-0"),
        s.SCORE.at(run="r1", judge="j1", group="ab12.s1"),
        s.FAIL.at(run="r1", group="ab12.s1"),
        s.FEEDBACK.at(tenant="t", user="ab12"),
    ):
        assert s.owner(subject) == "ab12", subject
    for subject in (
        s.TRAJ.at(run="r1", group="g000012"),
        s.SCORE.at(run="r1", judge="j1", group="g1"),
        "hr.beat.a.b.c",
    ):
        assert s.owner(subject) == "", subject
    asked = {"run": "r1", "slot": 0, "attempt": 0, "task": TaskRef("generated/train", "1"), "seed": 1}
    for lane, group, owner in (("production", "ab12.s1", "ab12"), ("train", "g000012", "")):
        request = RolloutRequest(lane=lane, group=group, **asked)  # type: ignore[arg-type]
        assert s.owner(s.TASK.at(run="r1", lane=lane, suite="x"), request) == owner


def test_a_filter_leaves_out_what_is_not_given() -> None:
    assert s.TASK.where() == "hr.task.*.*.>"
    assert s.TASK.where(run="r1", lane="train") == "hr.task.r1.train.>"
    assert s.EVENT.where(run="r1", type="event") == "hr.event.r1.*.event"
    assert s.WEIGHT_HEAD.where(run="r1") == "hr.weights.r1.head"


def test_each_family_lies_in_one_stream_or_in_none() -> None:
    for subject in s.SUBJECTS.values():
        homes = [x.name for x in s.STREAMS if any(s.covers(p, subject.where()) for p in x.subjects)]
        assert len(homes) <= 1, subject.template
    core = {"hr.rpc.{service}.{caller}.{method}", "hr.rpc.{service}.{caller}.{node}.{method}"}
    core |= {"hr.beat.{actor}.{id}", "hr.traffic.{region}", "hr.metric.{actor}"}
    homeless = {x.template for x in s.SUBJECTS.values() if s.stream_of(x.where()) is None}
    assert homeless - {s.ADVISORY.template} == core, "the broker writes two kinds of advisories into our stream"
    assert s.stream_of(s.ADVISORY.where(kind="MAX_DELIVERIES")) is s.STREAM["HR_ADVISORY"]
    stream = s.stream_of("hr.close.r1.g1")
    assert stream is not None and stream.name == "HR_SCORE"


def test_covers() -> None:
    for pattern, subject, fits in (
        ("a.>", "a.b", True),
        ("a.>", "a", False),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("a.*", "a.>", False),
        ("a.b", "a.*", False),
        ("*.b", "a.b", True),
        (">", "a", True),
    ):
        assert s.covers(pattern, subject) is fits, (pattern, subject)


def test_types_of_the_table_exist() -> None:
    for subject in s.SUBJECTS.values():
        assert set(subject.types) <= set(TYPES), subject.template


def test_any_text_becomes_a_token() -> None:
    assert s.token("My Node_1.example") == "my-node_1-example"
    assert s.token("...") == "none"


def test_the_table_names_everything() -> None:
    text = script("subjects").subjects_table()
    for name in (*s.STREAM, *s.KEY_VALUES):
        assert name in text
    assert "`hr.traj.<run>.<group>`" in text
