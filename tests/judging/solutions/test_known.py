"""The known solution as changes of a sandbox."""

from headrace.judging.solutions.known import Solution
from headrace.messages.sandbox import Snapshot


def test_a_broken_version_is_that_of_every_step_that_had_the_file() -> None:
    earlier = (Snapshot(diff={}), Snapshot(diff={"a.py": b"old"}), Snapshot(diff={"a.py": b"right", "b.py": b"b"}))
    last = Snapshot(diff={"a.py": b"right", "b.py": b"b"})
    broken = Solution(last=last, earlier=earlier).over({"a.py": b"wrong"})
    assert broken.last.diff == {"a.py": b"wrong", "b.py": b"b"}
    assert [step.diff for step in broken.earlier] == [{}, {"a.py": b"old"}, {"a.py": b"wrong", "b.py": b"b"}]
