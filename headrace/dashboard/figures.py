"""The figures of a finished run, from its streams and from what was watched while it ran.

`collect` reads everything once; `report` is the JSON object that `report.json` holds. Nothing here is remembered from
elsewhere: a figure that nobody measured is null.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.bus.connection import Bus
from headrace.config import Config
from headrace.dashboard.watch import Watch
from headrace.messages import subjects
from headrace.messages.evaluation import EvalResult
from headrace.messages.judging import Score
from headrace.messages.ledger import SlotIssued
from headrace.messages.rollout import Trajectory
from headrace.messages.training import EngineMismatch, StepDone
from headrace.messages.weights import WeightManifest


class Figures:
    """What a run left behind, read once."""

    def __init__(self) -> None:
        self.episodes = 0
        self.tool_calls = 0
        self.tokens = 0
        self.malformed = 0
        self.backends: set[str] = set()
        self.scores: dict[str, Score] = {}
        """Trajectory id to its score."""
        self.transcripts: list[Trajectory] = []
        """Train-lane trajectories: first, middle and last by version."""
        self.deltas: list[WeightManifest] = []
        self.sessions: dict[str, float] = {}
        self.session_s: list[float] = []
        self.thumbs = 0
        self.first_issue = 0.0


async def collect(bus: Bus, run: str) -> Figures:
    """Read the streams of a run."""
    figures = Figures()
    async for received in bus.history("HR_LEDGER", subjects.LEDGER.where(run=run)):
        issued = received.message
        if isinstance(issued, SlotIssued):
            if issued.lane == "production" and issued.attempt == 0:
                figures.sessions[issued.group] = received.time
            elif issued.lane == "train" and not figures.first_issue:
                figures.first_issue = received.time
    async for received in bus.history("HR_SCORE", subjects.SCORE.where(run=run)):
        score = received.message
        if isinstance(score, Score):
            figures.scores[f"{score.group}-{score.slot}-{score.attempt}"] = score
    train: list[Trajectory] = []
    async for received in bus.history("HR_TRAJ", subjects.TRAJ.where(run=run)):
        trajectory = received.message
        if not isinstance(trajectory, Trajectory):
            continue
        figures.episodes += 1
        figures.tool_calls += sum(len(turn.calls) for turn in trajectory.turns)
        figures.tokens += sum(len(turn.ids) for turn in trajectory.turns)
        figures.malformed += trajectory.malformed_calls
        figures.backends.add(trajectory.backend)
        if trajectory.lane == "train":
            train.append(trajectory)
        elif trajectory.lane == "production" and trajectory.group in figures.sessions:
            figures.session_s.append(received.time - figures.sessions[trajectory.group])
    train.sort(key=lambda trajectory: trajectory.oldest_version)
    if train:
        figures.transcripts = [train[0], train[len(train) // 2], train[-1]]
    async for received in bus.history("HR_WEIGHTS", subjects.WEIGHT_MANIFEST.where(run=run, version="*")):
        if isinstance(received.message, WeightManifest) and received.message.base_version >= 0:
            figures.deltas.append(received.message)
    async for _ in bus.history("HR_FEEDBACK", subjects.FEEDBACK.where()):
        figures.thumbs += 1
    return figures


def percentile(values: list[float], share: float) -> float | None:
    """Nearest-rank percentile, None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3)


def reclaim_times(watch: Watch) -> list[float]:
    """Seconds from each decision of the scavenger until the last training request was back in the queue."""
    waits: dict[str, list[float]] = {}
    since: dict[str, float] = {}
    for moment, event in watch.events:
        rollout = str(event.data.get("rollout", event.id))
        if event.kind == "reclaimed":
            since[rollout] = moment
            waits.setdefault(rollout, []).append(0.0)
        elif event.kind == "lent":
            since.pop(rollout, None)
        elif event.kind == "handed_back" and event.data.get("lane") == "train" and rollout in since:
            waits[rollout][-1] = moment - since[rollout]
    return [wait for rollout in waits.values() for wait in rollout]


def worst_engines(steps: Sequence[StepDone]) -> list[EngineMismatch]:
    """Each engine's step of the largest k3, by engine and fingerprint."""
    worst: dict[tuple[str, str], EngineMismatch] = {}
    for engine in (engine for step in steps for engine in step.engines if engine.tokens):
        key = (engine.engine, engine.fingerprint)
        if key not in worst or not engine.k3 <= worst[key].k3:
            worst[key] = engine
    return [worst[key] for key in sorted(worst)]


def rate_of(results: list[EvalResult], reason: str) -> float | None:
    """The rate of the evaluation that was asked for a reason."""
    rates = [result.rate for result in results if result.reason == reason]
    return round(rates[-1], 4) if rates else None


def tasks_of(results: list[EvalResult], reason: str) -> int:
    """How many tasks that evaluation had."""
    return next((result.tasks for result in reversed(results) if result.reason == reason), 0)


def report(
    config: Config,
    watch: Watch,
    figures: Figures,
    ledger: dict[str, Any],
    *,
    started: float,
    ready: float,
    shutdown: float,
) -> dict[str, Any]:
    """The object that report.json holds. Durations in seconds, CPU in milliseconds."""
    steps = watch.steps
    marks = watch.marks
    now = time.time()
    rl_begin = marks.get("reinforcement learning", shutdown)
    issued = figures.first_issue or rl_begin
    rl_end = watch.marks.get("final evaluation", shutdown)
    # A version with the old bytes (a refused step, a batch without advantage) ships nothing and would swamp the mean.
    deltas = [delta.raw_bytes / delta.wire_bytes for delta in figures.deltas if delta.changed and delta.wire_bytes]
    clones = watch.metric("environment", "clones")
    results = watch.evaluations
    eval_s = shutdown - marks.get("final evaluation", shutdown)
    sandbox_cpu = watch.metric("environment", "vm_cpu_ms") / 1000
    return {
        "run": watch.run,
        "seed": config.run.seed,
        "backend": "+".join(sorted(figures.backends)) or None,
        "isolation": config.environment.isolation,
        "cpu_ms_per_episode": round(1000 * sandbox_cpu / figures.episodes, 1) if figures.episodes else None,
        "wall_s": round(now - started, 1),
        "rl_wall_s": round(rl_end - issued, 1),
        "time": {
            "setup_s": round(ready - started, 1),
            "mid_training_s": round(issued - marks.get("mid-training", issued), 1),
            "rl_s": round(rl_end - issued, 1),
            "eval_s": round(eval_s, 1),
            "shutdown_s": round(now - shutdown, 1),
        },
        "heldout_tasks": tasks_of(results, "heldout_after_t1"),
        "heldout_before": rate_of(results, "heldout_before"),
        "heldout_after_t1": rate_of(results, "heldout_after_t1"),
        "heldout_after_greedy": rate_of(results, "heldout_after_greedy"),
        "unseen_templates": {
            "tasks": tasks_of(results, "unseen_after_t1"),
            "before": rate_of(results, "unseen_before"),
            "after_t1": rate_of(results, "unseen_after_t1"),
            "after_greedy": rate_of(results, "unseen_after_greedy"),
        },
        "families": {result.reason: result.families for result in results},
        "steps": len(steps),
        "failed_steps": len(watch.failed_steps),
        "episodes": figures.episodes,
        "tool_calls": figures.tool_calls,
        "malformed_calls": figures.malformed,
        "vm_clones": int(clones),
        "tokens_sampled": figures.tokens,
        "max_abs_dlp": max((step.max_abs_dlp for step in steps if step.rescored_tokens), default=None),
        "rescored_tokens": sum(step.rescored_tokens for step in steps),
        "engines": [msgspec.to_builtins(engine) for engine in worst_engines(steps)],
        "mismatch_alarms": sum(bool(step.alarm) for step in steps),
        "staleness_max": max((step.staleness_max for step in steps), default=None),
        "delta_ratio_mean": round(statistics.fmean(deltas), 2) if deltas else None,
        "delta_note": "this learning rate moves most weights at every step; production rates move one in a hundred",
        "trainer_busy": round(watch.busy_share("trainer", issued, rl_end), 3),
        "rollout_busy": round(watch.busy_share("rollout", issued, rl_end), 3),
        "cpu_s": {name: round(seconds, 1) for name, seconds in sorted(watch.cpu.items())},
        "planted": f"{100 * (1 - config.mid_training.quality):.0f} % of the mid-training traces hold a fault: "
        "they quit early, edit a file they never read or write a wrong fix, so that RL has something to do",
        "ledger": ledger,
        "production": {
            "requests": len(figures.sessions),
            "p50_s": percentile(figures.session_s, 0.5),
            "p99_s": percentile(figures.session_s, 0.99),
            "reclaims": sum(event.kind == "reclaimed" and "start" not in event.text for _, event in watch.events),
            "reclaim_max_s": round(max(reclaim_times(watch), default=0.0), 3),
            "thumbs": figures.thumbs,
        },
    }
