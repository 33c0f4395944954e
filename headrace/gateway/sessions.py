"""One user session: its request, its turns, its failed attempts, and its end.

A session is always in one of four states: queued (no rollout actor has sampled a turn yet), running, finished, failed.
The last two are final and carry the result or the reason.
"""

import asyncio
import time
from typing import Any, Literal

from headrace.messages.ledger import SlotIssued
from headrace.messages.rollout import RolloutRequest, Trajectory, TurnDone, TurnSampled
from headrace.messages.tasks import TaskRef

State = Literal["queued", "running", "finished", "failed"]

SENTENCES = {
    "sandbox_lost": "the machine with the session's sandbox was lost",
    "engine_error": "the inference engine failed",
    "search_lost": "no search actor answered",
    "no_policy": "no engine could serve the session's policy version",
    "tree_too_large": "the workspace is too large to be read",
    "no_environment": "no environment node is running, so there is no sandbox",
    "no_capacity": "no sandbox became free",
    "dead_letter": "no rollout actor could handle the request",
    "judge_lost": "the judge was lost",
    "judge_endpoint": "the judge's model did not answer",
    "timed_out": "the session did not end in time",
    "files_lost": "the gateway was restarted and no longer has the session's files",
    "purged": "the user's data was purged",
    "bus_error": "the broker did not accept the request",
    "cancelled": "the user cancelled the session",
}
"""The sentence that a user reads for each reason."""


class Session:
    """One session. `changed` is set, and replaced by a new event, whenever the session changes."""

    def __init__(self, request: RolloutRequest, started: float) -> None:
        """started: seconds since the epoch."""
        self.request = request
        self.started = started
        self.ended = 0.0
        self.state: State = "queued"
        self.turns: list[dict[str, Any]] = []
        self.failures: list[dict[str, Any]] = []
        """Attempts that ended because of an infrastructure failure."""
        self.result: dict[str, Any] = {}
        self.trajectory = ""
        self.elsewhere = False
        """Another gateway opened it and issues its attempts."""
        self.changed = asyncio.Event()

    def _notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def on_turn(self, record: TurnSampled | TurnDone) -> None:
        """Record a sampled turn or the results of its calls. Turns of earlier attempts are ignored."""
        if record.trajectory != self.request.trajectory:
            return
        self.state = "running"
        if isinstance(record, TurnSampled):
            calls = [
                {"name": call.name, "arguments": call.arguments, "error": call.error} for call in record.turn.calls
            ]
            self.turns.append({"index": record.turn.index, "calls": calls, "results": []})
        else:
            for turn in self.turns:
                if turn["index"] == record.index:
                    turn["results"] = [{"ok": result.ok, "output": result.output} for result in record.results]
        self._notify()

    def on_trajectory(self, trajectory: Trajectory, time_s: float) -> None:
        """The session is finished; the changed files are its result. time_s: seconds since the epoch."""
        self.state = "finished"
        self.ended = time_s
        self.trajectory = trajectory.id
        self.result = {
            "outcome": trajectory.outcome,
            "files": {path: data.decode("utf-8", "replace") for path, data in trajectory.diff.items()},
            "deleted": list(trajectory.deleted),
        }
        self._notify()

    def on_retry(self, request: RolloutRequest, reason: str, detail: str) -> None:
        """The infrastructure failed during an attempt; `request` is the next attempt, which has no turns yet."""
        self._add_failure(reason, detail)
        self.request, self.state, self.turns = request, "queued", []
        self._notify()

    def on_failure(self, reason: str, detail: str = "") -> None:
        """The session has failed for good."""
        self._add_failure(reason, detail)
        self.state = "failed"
        self.ended = time.time()
        self.result = {"reason": reason, "text": SENTENCES.get(reason, reason)} | ({"detail": detail} if detail else {})
        self._notify()

    def _add_failure(self, reason: str, detail: str) -> None:
        text = SENTENCES.get(reason, reason)
        self.failures.append({"attempt": self.request.attempt, "reason": reason, "text": text, "detail": detail})

    @property
    def over(self) -> bool:
        """Whether the session has reached its end."""
        return self.state in {"finished", "failed"}

    def view(self) -> dict[str, Any]:
        """The session as the JSON object that its user receives."""
        return {
            "session": self.request.group,
            "state": self.state,
            "attempt": self.request.attempt,
            "turns": self.turns,
            "failures": self.failures,
            "result": self.result,
            "seconds": (self.ended or time.time()) - self.started,
        }


def asked_by(trajectory: Trajectory) -> RolloutRequest:
    """The request of a finished session that an earlier gateway opened."""
    return RolloutRequest(
        run=trajectory.run,
        lane="production",
        group=trajectory.group,
        slot=trajectory.slot,
        attempt=trajectory.attempt,
        task=trajectory.task,
        seed=trajectory.seed,
        policy=trajectory.policy,
    )


def attempt_record(run: str, group: str, task: TaskRef, seed: int, attempt: int) -> SlotIssued:
    """The ledger record of an attempt: a session is a group with one slot."""
    return SlotIssued(
        run=run,
        lane="production",
        group=group,
        index=0,
        slot=0,
        attempt=attempt,
        group_size=1,
        task=task,
        seed=seed,
        min_version=0,
    )
