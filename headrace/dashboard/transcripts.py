"""Transcripts of attempts: one held-out task before and after training, and two more attempts after it.

A chosen example looks better than the average. So the caption says how it was chosen and gives the pass rates, and an
attempt that fails after training is shown too.
"""

import json
from collections.abc import Callable
from typing import NamedTuple

from headrace.dashboard.hypertext import escape
from headrace.dashboard.records import EvaluatedAttempts, RunRecords
from headrace.messages.judging import Score
from headrace.messages.rollout import Trajectory
from headrace.messages.tasks import TaskRef

Prompts = Callable[[TaskRef], str]
"""The prompt of a task; LookupError when its suite is not here."""
BEFORE, AFTER, UNSEEN = "heldout_before", "heldout_after_t1", "unseen_after_t1"


class Pair(NamedTuple):
    """One task's attempt before training and its attempt after."""

    task: str
    before: Trajectory
    after: Trajectory


def first_improved(before: EvaluatedAttempts, after: EvaluatedAttempts) -> Pair | None:
    """The first task in the order of the suite that failed before and passed after, with both trajectories stored."""
    for task in in_order(before):
        if task not in after.scores or before.scores[task].passed or not after.scores[task].passed:
            continue
        if task in before.trajectories and task in after.trajectories:
            return Pair(task, before.trajectories[task], after.trajectories[task])
    return None


def in_order(evaluation: EvaluatedAttempts) -> list[str]:
    """The scored tasks in the order of the suite."""
    scores = evaluation.scores
    return sorted(scores, key=lambda task: (scores[task].group, scores[task].slot))


def section(records: RunRecords, prompts: Prompts) -> str:
    """The part of the report that shows the task: caption, prompt and both transcripts."""
    before, after = records.evaluations.get(BEFORE), records.evaluations.get(AFTER)
    if before is None or after is None:
        return "<p>Not shown: the run did not evaluate held-out tasks both before and after training.</p>"
    pair = first_improved(before, after)
    text = escape(caption(before, after))
    if pair is None:
        return f"<p>No task with stored transcripts failed before training and passed after it. {text}</p>"
    return (
        f"<p>Task {escape(pair.task)} is the first held-out task, in the order of the suite, that failed before "
        f"training and passed after it. {text}</p>"
        + prompt(pair.before.task, prompts)
        + "<div class='pairs'>"
        + transcript("Before training", pair.before, before.scores[pair.task])
        + transcript("After training", pair.after, after.scores[pair.task])
        + "</div>"
    )


def others(records: RunRecords, prompts: Prompts) -> str:
    """The part of the report that shows two more attempts after training: one that passed a task of a template without
    training, and one that failed. Each is the first of its suite, so none is chosen."""
    parts = []
    for reason, passed, title in (
        (UNSEEN, True, "First task of a template without training that passes"),
        (AFTER, False, "First held-out task that fails"),
    ):
        evaluation = records.evaluations.get(reason, EvaluatedAttempts())
        stored = (task for task in in_order(evaluation) if task in evaluation.trajectories)
        task = next((task for task in stored if evaluation.scores[task].passed is passed), None)
        if task is None:
            parts.append(f"<section><p>{escape(title)}: none has a stored transcript.</p></section>")
        else:
            attempt = evaluation.trajectories[task]
            parts.append(
                transcript(f"{title}, {task}", attempt, evaluation.scores[task], prompt(attempt.task, prompts))
            )
    return "".join(parts)


def caption(before: EvaluatedAttempts, after: EvaluatedAttempts) -> str:
    """The pass rates, and how many tasks changed in either direction."""
    tasks = before.scores.keys() & after.scores.keys()
    first = {task for task in tasks if before.scores[task].passed}
    second = {task for task in tasks if after.scores[task].passed}
    return (
        f"Of {len(tasks)} held-out tasks, one attempt each at temperature 1, {len(first)} passed before and "
        f"{len(second)} after; {len(second - first)} changed from fail to pass, "
        f"{len(first - second)} from pass to fail."
    )


def prompt(ref: TaskRef, prompts: Prompts) -> str:
    """The task's prompt as HTML; nothing where the suite is not on this machine."""
    try:
        return f"<p>The task:</p><pre>{escape(prompts(ref))}</pre>"
    except LookupError:
        return ""


def transcript(title: str, trajectory: Trajectory, score: Score, asked: str = "") -> str:
    """An attempt: its prompt `asked` as HTML, calls, their results and the changed files."""
    lines = [
        f"<section><h3>{escape(title)} (version {trajectory.oldest_version}): {escape(trajectory.family)}, "
        f"{escape(score.verdict)}, reward {score.reward:.2f}</h3>{asked}"
    ]
    for turn in trajectory.turns:
        results = {result.call_id: result for result in turn.results}
        for call in turn.calls:
            arguments = " ".join(f"{key}={json.dumps(value)}" for key, value in call.arguments.items())
            lines.append(f"<pre><span class='call'>{escape(call.name)} {escape(arguments)}</span>\n")
            if call.error:
                lines.append(f"<span class='bad'>{escape(call.error)}</span>\n")
            result = results.get(call.id)
            lines.append(f"{escape(result.output) if result else ''}</pre>")
    if not trajectory.diff:
        lines.append("<p>No file was changed.</p>")
    lines += [
        f"<pre>{escape(path)} afterwards:\n{escape(data.decode('utf-8', 'replace'))}</pre>"
        for path, data in trajectory.diff.items()
    ]
    return "".join([*lines, "</section>"])
