"""Every reason of a failed attempt has its sentence and its line in the docs."""

from pathlib import Path

from headrace.actors.rollout.failures import FAILURES
from headrace.gateway.errors import SENTENCES
from headrace.ledger import lost_attempts
from tests.test_docs import script

DOCS = Path(__file__).resolve().parents[2] / "docs"
SAMPLED = {kind.code for kind in FAILURES}
JUDGED = {"judge_lost", "judge_endpoint"}


def test_every_reason_of_a_failed_attempt_has_a_sentence_and_a_line_in_the_docs() -> None:
    every = SAMPLED | JUDGED | {lost_attempts.REASON}
    assert every <= set(SENTENCES)
    page = (DOCS / "recovery.md").read_text(encoding="utf-8")
    assert [reason for reason in every if f"| `{reason}` |" not in page] == []


def test_the_page_of_messages_names_every_reason_of_slot_failed() -> None:
    page = script("messages").page()
    [row] = [line for line in page.splitlines() if line.startswith("| `reason`") and "``sandbox_lost``" in line]
    assert [reason for reason in SAMPLED | JUDGED if f"``{reason}``" not in row] == []
