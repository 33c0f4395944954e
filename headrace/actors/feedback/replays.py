"""Baselines of rated sessions from replays: G attempts at the session's task, judged in the training environment.

A rated session has one rollout, so nothing in its own group says how good the policy is on this prompt. With
`[feedback] baseline = "replay"` the version that served the session makes `[feedback] replays` attempts at the same
task on the eval lane. The share of them that passes the hidden tests is the session's baseline. It is stored in the
Score, so a replay of the step needs nothing else. Trade-off: a rating costs G attempts, and its batch waits for them.

Only a session of a suite's own task can be replayed: a client's agent runs its own tools, and files or a prompt of a
user have no hidden tests. Other sessions, and those without a replay that ended in `REPLAY_S`, have the class baseline.
"""

import hashlib
import time
from collections.abc import Awaitable, Callable

from headrace.bench.requests import requests, shares, trial_id
from headrace.config import Config
from headrace.ledger.requests import settings_of
from headrace.messages.evaluation import EvalRequest, EvalResult
from headrace.messages.product import CLIENT_SUITE
from headrace.messages.rollout import Trajectory
from headrace.tasks.workspace import WORKSPACE

REPLAY_S = 1800.0
"""Seconds for which a rating waits for its replays."""
PREFIX = "replay-"
"""Of the ids of these evaluations. The rest is a digest of the session's name, which holds its user's hash."""


class Replays:
    """The replays of one run's rated sessions."""

    def __init__(self, config: Config, run: str, tell: Callable[..., Awaitable[int]]) -> None:
        """tell: `Actor.publish_event`."""
        self._config, self._run, self._tell = config, run, tell
        self._asked: dict[str, float] = {}
        """Id of a session's evaluation to the time by `time.monotonic` at which this process asked for it."""
        self._results: dict[str, EvalResult] = {}

    def on_result(self, result: EvalResult) -> None:
        """Take the result of a replay; it may be from before a restart."""
        if result.id.startswith(PREFIX):
            self._results[result.id] = result

    async def ready(self, trajectory: Trajectory) -> bool:
        """Whether a session may be trained on: its baseline is known, or none is to be expected. Asks for its replays
        at the first call."""
        rules = self._config.feedback
        if rules.baseline != "replay" or not _replayable(trajectory):
            return True
        id = _id_of(trajectory)
        if len(self._done(id)) == rules.replays:
            return True
        if id not in self._asked:
            self._asked[id] = time.monotonic()
            for request in self._requests(id, trajectory):
                if request.id not in self._results:
                    await self._tell(request, msg_id=f"{self._run}.{request.id}")
        return time.monotonic() - self._asked[id] > REPLAY_S

    def baseline(self, trajectory: Trajectory) -> float | None:
        """The share of a session's replays that passed; None without any that was judged."""
        if self._config.feedback.baseline != "replay" or not _replayable(trajectory):
            return None
        passed = shares(self._done(_id_of(trajectory)))
        return passed.get(trajectory.task.task)

    def _done(self, id: str) -> list[EvalResult]:
        ids = [trial_id(id, trial) for trial in range(self._config.feedback.replays)]
        return [self._results[each] for each in ids if each in self._results]

    def _requests(self, id: str, trajectory: Trajectory) -> list[EvalRequest]:
        settings = settings_of(self._config, trajectory.sampling.temperature)
        first = EvalRequest(
            id=id,
            run=self._run,
            suite=trajectory.task.suite,
            tasks=1,
            ids=(trajectory.task.task,),
            policy=trajectory.policy,
            sampling=settings.sampling,
            limits=settings.limits,
            isolation=settings.isolation,
            reason="replay",
        )
        return requests(first, self._config.feedback.replays)


def _id_of(trajectory: Trajectory) -> str:
    return PREFIX + hashlib.sha256(trajectory.group.encode()).hexdigest()[:16]


def _replayable(trajectory: Trajectory) -> bool:
    return not trajectory.altered and trajectory.task.suite not in (CLIENT_SUITE, WORKSPACE)
