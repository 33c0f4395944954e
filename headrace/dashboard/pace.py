"""How long a run still takes, from what it has done.

The unit is an attempt: attempts of steps and of evaluations take about as long. Before the first ones end, mid-training
tells how fast the machine is. The factor between the two is known for headrace's own small policy alone.
"""

from collections.abc import Collection
from time import monotonic

from headrace.config import Config
from headrace.ledger.training import evaluation_ids, own_evaluations
from headrace.messages.operations import LAST_PHASE, LEARNING, MID_TRAINING

ATTEMPT_TOKENS = 2300
"""Tokens of mid-training that take as long as an attempt at a generated task by the default policy. Source: two runs of
`make demo` on two cores, 2,050 and 2,560."""
FIRST = 64
"""Attempts after which their own pace counts."""


class Pace:
    """The pace of one run, as far as this command has watched it."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._attempts_a_step = config.curriculum.groups_per_step * config.curriculum.group_size
        self._evaluations = _evaluation_sizes(config)
        self._reading: tuple[float, float] | None = None
        """When mid-training was first seen, and its tokens then."""
        self._learning: tuple[float, float, float] | None = None
        """When attempts were first seen, how many had ended, and how many of these the run's records had."""
        self._token_s: float | None = None

    def seconds_left(
        self, phase: str, tokens: float, steps: int, evaluated: Collection[str], attempts: float
    ) -> float | None:
        """Seconds until the last evaluation ends; None while that is unknown. Call it every few seconds.

        phase: by the curriculum's event. tokens: of mid-training. steps, evaluated: what is done, evaluations by id.
        attempts: how many have ended, by the metric of the rollout actors.
        """
        config, now = self._config, monotonic()
        recorded = steps * self._attempts_a_step
        recorded += sum(tasks for id, tasks in self._evaluations.items() if id in evaluated)
        left = config.curriculum.steps * self._attempts_a_step + sum(self._evaluations.values()) - recorded
        if phase == MID_TRAINING:
            began, before = self._reading = self._reading or (now, tokens)
            if tokens > before:
                self._token_s = (now - began) / (tokens - before)
            left_tokens = max(0.0, config.mid_training.tokens - tokens)
        elif phase not in (LEARNING, LAST_PHASE):
            return None
        else:
            left_tokens = 0.0
            began, ended, counted = self._learning = self._learning or (now, attempts, recorded)
            left -= max(0, round(attempts - ended - (recorded - counted)))
            if attempts - ended >= FIRST:
                return max(left, 0) * (now - began) / (attempts - ended)
        if self._token_s is None or config.policy.checkpoint:
            return None
        return self._token_s * (left_tokens + ATTEMPT_TOKENS * left)


def _evaluation_sizes(config: Config) -> dict[str, int]:
    """The number of tasks of every evaluation of a run by its id."""
    sizes = dict.fromkeys(evaluation_ids(config, config.curriculum.steps), config.evaluation.every_tasks)
    return sizes | {request.id: request.tasks for request in own_evaluations(config, "")}
