"""The report shows one task before and after training, and says how it was chosen."""

import msgspec

from headrace.dashboard.records import EvaluatedAttempts, RunRecords
from headrace.dashboard.transcripts import AFTER, BEFORE, UNSEEN, first_improved, others, section
from headrace.messages.tasks import TaskRef
from tests.support import records


def asked(ref: TaskRef) -> str:
    """A prompt for every task but one, whose suite is not here."""
    if ref.task == "gone":
        raise LookupError(ref.task)
    return f"Repair <{ref.task}>"


def measured(passed: dict[str, bool], *, stored: bool = True) -> EvaluatedAttempts:
    out = EvaluatedAttempts()
    for number, (name, good) in enumerate(passed.items()):
        task = TaskRef("generated/heldout", name)
        group, slot = f"e1-{number // 8:06d}", number % 8
        out.scores[name] = records.score(group, slot, passed=good, lane="eval", task=task)
        if stored:
            made = records.trajectory(records.issued(group, slot, lane="eval", task=task))
            out.trajectories[name] = msgspec.structs.replace(made, diff={"a.py": f"<{name} {good}>".encode()})
    return out


def test_the_first_improved_task_is_shown_with_the_pass_rates() -> None:
    before = measured({"z": True, "y": False, "x": False, "w": True})
    after = measured({"z": True, "y": True, "x": True, "w": False})
    pair = first_improved(before, after)
    assert pair is not None and pair.task == "y", "the suite's order counts, not the name's"
    text = section(RunRecords(evaluations={BEFORE: before, AFTER: after}), asked)
    assert "Of 4 held-out tasks" in text and "2 passed before and 3 after" in text
    assert "2 changed from fail to pass, 1 from pass to fail" in text
    assert text.index("&lt;y False&gt;") < text.index("&lt;y True&gt;")


def test_a_report_without_such_a_task_says_why() -> None:
    before, after = measured({"a": False}), measured({"a": True}, stored=False)
    assert "No task with stored transcripts" in section(RunRecords(evaluations={BEFORE: before, AFTER: after}), asked)
    assert "did not evaluate" in section(RunRecords(evaluations={AFTER: after}), asked)


def test_two_more_attempts_are_the_first_of_their_suites_and_one_of_them_fails() -> None:
    after, unseen = measured({"z": True, "y": False, "x": False}), measured({"c": False, "b": True, "a": True})
    text = others(RunRecords(evaluations={AFTER: after, UNSEEN: unseen}), asked)
    assert "without training that passes, b (version" in text and "held-out task that fails, y (version" in text
    assert text.index("&lt;b True&gt;") < text.index("&lt;y False&gt;")
    assert others(RunRecords(), asked).count("none has a stored transcript") == 2


def test_a_text_shows_what_would_reorder_or_hide_it() -> None:
    """Trojan Source (CVE-2021-42574): a patch reads otherwise than it runs."""
    after = measured({"a": False})
    bad = "if user != 'admin\u202e\u2066# is admin\u2069\u2066':\u200b\x1b[2K\x00"
    after.trajectories["a"] = msgspec.structs.replace(after.trajectories["a"], diff={"a.py": bad.encode()})
    text = others(RunRecords(evaluations={AFTER: after}), asked)
    assert "admin\\u202e\\u2066# is admin\\u2069\\u2066&#x27;:\\u200b\\x1b[2K\\x00" in text
    assert all(character.isprintable() or character == "\n" for character in text)


def test_a_transcript_begins_with_what_the_user_asks_for() -> None:
    text = others(RunRecords(evaluations={AFTER: measured({"a": False})}), asked)
    assert text.index("Repair &lt;a&gt;") < text.index("&lt;a False&gt;")
    assert "The task:" not in others(RunRecords(evaluations={AFTER: measured({"gone": False})}), asked)
