"""From a verdict to the Score record: the reward of the configured function, and the plugin that computed it.

A reward is code that a user may bring, so its failures are contained: an attempt for which it raises, returns no finite
number or exceeds the time limit has no verdict (`reward_error`), like one for which it returns None (`no_verdict`).
"""

import asyncio
import inspect
import math
import traceback
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET

from headrace.algorithms.rewards import REFUSED, REWARDS, Given, Judged, Shaped, shaped_parts
from headrace.config import Config
from headrace.judging import checkers, rules
from headrace.judging.candidates import Candidate
from headrace.judging.verdicts import NoVerdict, Verdict
from headrace.messages.judging import Score, TurnRewards
from headrace.messages.plugins import Plugin
from headrace.messages.rollout import Trajectory, kinds_of
from headrace.registry import merged, plugins
from headrace.tasks.suites import suite_plugins

REWARD_S = 30.0
"""Seconds that a reward from outside the package may take for one attempt."""


class Rewarder:
    """The reward function of a run."""

    def __init__(
        self, name: str, prices: Mapping[str, float], timeout_s: float, options: Mapping[str, object] | None = None
    ) -> None:
        """PluginError when there is no such reward, or not with these options."""
        self.name, self._prices, self._timeout_s = name, dict(prices), timeout_s
        self._reward = REWARDS.bound(name, options or {}, "algorithm.options.reward")
        self._options = msgspec.convert(options or {}, Shaped) if REWARDS.builtin(name) else Shaped()
        self.plugins: tuple[Plugin, ...] = plugins((REWARDS, [name]))

    @classmethod
    def of(cls, config: Config) -> "Rewarder":
        """The reward of a configuration. PluginError as above."""
        algorithm = config.algorithm
        prices = {"max_tokens": config.limits.max_tokens, "rubric_weight": config.judge.rubric_weight}
        return cls(algorithm.reward, prices, REWARD_S, algorithm.options.reward)

    async def reward(self, trajectory: Trajectory, verdict: Verdict) -> Given:
        """The reward of one attempt: finite numbers. NoVerdict where the function gives none; its text holds the
        traceback.

        A function from outside does not know what output the judge refused, so `REFUSED` is taken from what it gives.
        """
        judged = self._judged(trajectory, verdict)
        try:
            value = await self._call(judged)
        except Exception as error:
            raise NoVerdict("reward_error", f"the reward {self.name!r} {self._describe(error)}") from error
        if value is None:
            raise NoVerdict("no_verdict", f"the reward {self.name!r} abstains")
        if judged.refused and not REWARDS.builtin(self.name):
            if isinstance(value, TurnRewards):
                return msgspec.structs.replace(value, final=value.final - REFUSED)
            return value - REFUSED
        return value

    def parts(self, trajectory: Trajectory, verdict: Verdict, reward: Given) -> dict[str, float]:
        """The parts of a given reward. A plugin's reward is one part, and the rewards of its turns are another."""
        if isinstance(reward, TurnRewards):
            return {self.name: reward.final, "turns": reward.total - reward.final}
        if not REWARDS.builtin(self.name):
            return {self.name: reward}
        return shaped_parts(self._judged(trajectory, verdict), self._options)

    def _judged(self, trajectory: Trajectory, verdict: Verdict) -> Judged:
        return Judged(
            trajectory=trajectory,
            verdict=verdict.decision,
            passed=verdict.passed,
            tests=verdict.tests,
            value=verdict.value,
            lowest=verdict.lowest,
            refused=bool(verdict.reason),
            steps=verdict.steps,
            suspicions=verdict.suspicions,
            rubric=verdict.rubric,
            tokens=sum(len(turn.ids) for turn in trajectory.turns),
            kinds=kinds_of(trajectory.turns),
            calls=sum(len(turn.calls) for turn in trajectory.turns),
            turns=len(trajectory.turns),
            prices=self._prices,
        )

    async def _call(self, judged: Judged) -> Given | None:
        if REWARDS.builtin(self.name):
            value = self._reward(judged)
        else:
            # A user's function may block: it runs in a thread, and the judge waits for it no longer than the limit.
            async with asyncio.timeout(self._timeout_s):
                value = await asyncio.to_thread(self._reward, judged)
                if inspect.isawaitable(value):
                    value = await value
        if value is None:
            return None
        if isinstance(value, TurnRewards):
            return _checked(value, judged.turns)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"expected a finite number, got {value!r}")
        return float(value)

    def _describe(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"took longer than {self._timeout_s:g} s"
        return f"raised {type(error).__name__}: {error}\n{''.join(traceback.format_exception(error))[-3000:]}"


def _checked(value: TurnRewards, turns: int) -> TurnRewards:
    """ValueError unless there is one finite number for each turn."""
    if len(value.turns) != turns:
        raise ValueError(f"expected TurnRewards with one reward for each of {turns} turns, got {len(value.turns)}")
    if not math.isfinite(value.total):
        raise ValueError(f"expected finite numbers, got {value!r}")
    return value


def _fields(reward: Given) -> dict[str, Any]:
    """A Score's fields for a reward."""
    if isinstance(reward, TurnRewards):
        return {"reward": reward.total, "by_turn": reward}
    return {"reward": reward, "by_turn": None}


def score_of(
    candidate: Candidate,
    seq: int,
    verdict: Verdict,
    reward: Given,
    *,
    by: Rewarder,
    wall_s: float,
    content: str = "",
    same_as: int = 0,
    certificate: str = "",
) -> Score:
    """The Score of a trajectory that lies at sequence `seq`. content: as in `Score`, where the verdict may count again.
    same_as: the sequence of the Score that the verdict is from; certificate: the task hash of the certificate that it
    is from."""
    trajectory = candidate.trajectory
    return Score(
        run=trajectory.run,
        lane=trajectory.lane,
        group=trajectory.group,
        slot=trajectory.slot,
        attempt=trajectory.attempt,
        trajectory_seq=seq,
        task=trajectory.task,
        family=candidate.task.family,
        judge_version=rules.VERSION,
        verdict=verdict.decision,
        **_fields(reward),
        passed=verdict.passed,
        tests=verdict.tests,
        value=verdict.value,
        steps=verdict.steps or UNSET,
        suspicions=verdict.suspicions,
        parts=by.parts(trajectory, verdict, reward),
        rubric=verdict.rubric,
        again=verdict.again,
        reason=verdict.reason,
        plugins=merged(
            by.plugins,
            suite_plugins((trajectory.task.suite,)),
            checkers.used(candidate.oracle),
            trajectory.plugins,
            verdict.plugins,
        ),
        content=content or UNSET,
        same_as=same_as or UNSET,
        certificate=certificate or UNSET,
        oldest_version=trajectory.oldest_version,
        sampled_tokens=sum(len(turn.ids) for turn in trajectory.turns),
        turns=len(trajectory.turns),
        calls=sum(len(turn.calls) for turn in trajectory.turns),
        wall_ms=round(1000.0 * wall_s, 3),
    )


def scored_again(old: Score, trajectory: Trajectory, verdict: Verdict, reward: Given, by: Rewarder) -> Score:
    """A recorded Score with another verdict and reward; its run and judge version are set by the caller."""
    return msgspec.structs.replace(
        old,
        verdict=verdict.decision,
        passed=verdict.passed,
        **_fields(reward),
        tests=verdict.tests,
        value=verdict.value,
        steps=verdict.steps or UNSET,
        suspicions=verdict.suspicions,
        reason=verdict.reason,
        parts=by.parts(trajectory, verdict, reward),
        rubric=verdict.rubric,
        same_as=UNSET,
        certificate=UNSET,
        plugins=merged(
            by.plugins,
            [plugin for plugin in old.plugins if plugin.seam not in {"rewards", "sandboxes"}],
            trajectory.plugins,
            verdict.plugins,
        ),
    )
