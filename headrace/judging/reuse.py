"""One verdict for one content: which attempts are judged alike, and which recorded verdict counts for a further one.

A verdict depends on the task with its tests, on what the attempt changed, on the machine that runs the tests and on the
judge. `content_of` names all of them by one digest, and a Score records it where its verdict may count again. A further
attempt of the same content gets that verdict without a sandbox, and its Score names the record (`Score.same_as`). The
records are the store: every judge reads the Scores of its run, which only a judge can sign, so a restarted judge and a
second one know the same verdicts.

Never counted again: what our own parts failed at (it has no Score), a run beyond its time limit, a crash, refused
output, a finding about the machine or the tests, a verdict that a second examination contradicts, and every verdict of
a task whose certificate does not show that the known solution passes each time.

An attempt that changed nothing is not examined at all where the task's certificate shows that the untouched repository
fails (`by_certificate`); its Score names the certificate.

A share of the attempts (`CHECKED`) is examined nevertheless, alone in a machine. Where two examinations of one content
differ, its verdict does not count again.
"""

import hashlib
from typing import Any

import msgspec

from headrace.judging import rules, steps
from headrace.judging.candidates import Candidate
from headrace.judging.verdicts import Examination, Verdict, conclude, recorded
from headrace.messages.judging import Certificate, Score
from headrace.messages.rollout import changes_digest
from headrace.messages.tasks import SandboxLimits
from headrace.tasks.certificates import task_hash

CHECKED = 0.02
"""Share of the attempts that are examined although their content has a verdict; the attempt's id decides."""
_ENCODER = msgspec.msgpack.Encoder(order="deterministic")


def content_of(candidate: Candidate, limits: SandboxLimits) -> str:
    """The name of everything that decides the verdict on a candidate: sha256 of an encoding in which every part has its
    type and length. Empty for a candidate that is always examined: it has no sandbox, its prompt or files were
    not the task's, its tests run in an image of their own, or its backend cannot tell what its
    machines are made of.

    limits: of sandboxes whose task sets none.
    """
    trajectory, oracle = candidate.trajectory, candidate.oracle
    verifier = oracle.verifier or any(step.verifier for step in (oracle.steps.tests if oracle.steps else ()))
    if not trajectory.machine or trajectory.altered or verifier or not candidate.task.sandbox:
        return ""
    parts: dict[str, Any] = {
        "judge": rules.VERSION,
        "run": trajectory.run,
        "tenant": trajectory.group.rpartition(".")[0],
        "task": (trajectory.task.suite, trajectory.task.task),
        "sides": task_hash(candidate.task, oracle),
        "changes": changes_digest(trajectory),
        "backend": trajectory.backend,
        "machine": trajectory.machine,
        "isolation": trajectory.isolation,
        "limits": msgspec.structs.asdict(limits),
        # A suspicious attempt is examined twice, alone.
        "suspicious": bool(steps.suspicions(candidate)),
    }
    return hashlib.sha256(_ENCODER.encode(parts)).hexdigest()


def comparable(candidate: Candidate, verdict: Verdict) -> bool:
    """Whether a verdict from an examination follows from the content alone: nothing ran past its time limit, and the
    tests ran in the machine that the content names."""
    trajectory = candidate.trajectory
    return not verdict.timed_out and set(verdict.machines) == {(trajectory.backend, trajectory.machine)}


def counts_again(score: Score) -> bool:
    """Whether the verdict of an examination may count for other attempts of its content."""
    plain = score.verdict in ("passed", "failed") and not score.reason and score.again != "other"
    return plain and not rules.void(score.suspicions)


def from_record(score: Score, candidate: Candidate) -> Verdict | None:
    """The verdict of a Score on another attempt of its content, whose turns have notes of their own. None where this
    judge would not conclude the same from what the Score records."""
    matched = steps.suspicions(candidate, score.steps or ())
    verdict = conclude(candidate.oracle, recorded(score, candidate.oracle), matched)
    sandboxes = tuple(plugin for plugin in score.plugins if plugin.seam == "sandboxes")
    return msgspec.structs.replace(verdict, plugins=sandboxes) if verdict.decision == score.verdict else None


def by_certificate(candidate: Candidate, certificate: Certificate) -> Verdict | None:
    """The verdict on an attempt that changed nothing which is judged, where the certificate shows that the untouched
    repository fails. None where it changed something, matches a rule, or is judged by a number."""
    trajectory, grading = candidate.trajectory, candidate.oracle.grading
    changed = trajectory.diff or trajectory.deleted or trajectory.changes or candidate.oracle.steps
    number = grading.kind in ("reward_file", "checker")
    if changed or number or certificate.noop != "failed" or steps.suspicions(candidate):
        return None
    return conclude(candidate.oracle, Examination(), ())


def outcome_of(score: Score) -> bytes:
    """Digest of the verdict, the numbers and each test's outcome, on which two examinations of one content agree."""
    parts = (
        score.verdict,
        score.value,
        [(step.name, step.value, step.share) for step in score.steps or ()],
        sorted((test.name, test.outcome) for test in score.tests),
    )
    return hashlib.sha256(_ENCODER.encode(parts)).digest()


class Known:
    """The contents of a run that have a verdict, from its Scores."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._found: dict[str, tuple[int, bytes]] = {}
        self._barred: set[str] = set()

    def note(self, seq: int, score: Score) -> bool:
        """Learn of a Score at a sequence. Returns whether it is the first to contradict an earlier examination of its
        content, whose verdict then does not count again. A Score of re-judging is compared and never counts."""
        if not score.content or score.same_as or score.content in self._barred:
            return False
        examined, outcome = self._found.get(score.content), outcome_of(score)
        if examined is not None and examined[1] == outcome:
            return False
        if examined is None and counts_again(score):
            if score.run == self._run:
                self._found[score.content] = seq, outcome
            return False
        self.bar(score.content)
        return examined is not None

    def bar(self, content: str) -> None:
        """No verdict on this content counts again."""
        self._barred.add(content)
        self._found.pop(content, None)

    def barred(self, content: str) -> bool:
        """Whether every attempt of this content is examined."""
        return content in self._barred

    def find(self, content: str) -> int:
        """The sequence of the Score whose verdict counts; 0 where there is none."""
        return self._found.get(content, (0, b""))[0]

    def forget(self, content: str) -> None:
        """The record is gone: the next examination counts."""
        self._found.pop(content, None)
