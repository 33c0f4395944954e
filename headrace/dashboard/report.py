"""The figures of a finished run as one struct: `report.json` is its JSON, `report.html` shows it.

Every figure comes from the streams or was observed while the run was active. A figure that was not measured is null.
"""

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple, get_args

import msgspec

from headrace.config import Config, MidTraining
from headrace.dashboard import errors
from headrace.dashboard.efficiency import RunEfficiency, of_run
from headrace.dashboard.records import RunRecords
from headrace.dashboard.watch import Watch
from headrace.ledger.training import DURING
from headrace.messages.evaluation import EvalResult
from headrace.messages.operations import LAST_PHASE, LEARNING, MID_TRAINING
from headrace.messages.rollout import Lane
from headrace.messages.sandbox import Role
from headrace.messages.training import EngineMismatch, StepDone
from headrace.metrics.conditions import Conditions, conditions
from headrace.replay.audit import AuditReport


class Moments(msgspec.Struct, frozen=True, kw_only=True):
    """Times of the command, in seconds since the epoch."""

    started: float
    ready: float
    """Image, templates and broker are ready; the actors start."""
    shutdown: float
    """The run is finished; the actors end."""


class Durations(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds per phase."""

    setup_s: float
    mid_training_s: float
    rl_s: float
    eval_s: float
    shutdown_s: float


class UnseenTemplates(msgspec.Struct, frozen=True, kw_only=True):
    """Pass rates on templates that no training process saw."""

    tasks: int
    before: float | None
    before_greedy: float | None
    after_t1: float | None
    after_greedy: float | None


class ProductLane(msgspec.Struct, frozen=True, kw_only=True):
    """Users' requests, and the capacity that the scavenger lent and reclaimed."""

    requests: int
    p50_s: float | None
    p99_s: float | None
    reclaims: int
    reclaim_max_s: float
    thumbs: int


class CurvePoint(msgspec.Struct, frozen=True):
    """An evaluation while training went on."""

    suite: str
    version: int
    rate: float
    tasks: int


class HeldOutLoss(msgspec.Struct, frozen=True):
    """The loss on one source's held-out documents, in nats per target: before mid-training, and after it."""

    before: float | None
    """None where mid-training began before it was measured, with an older version."""
    after: float


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """Durations in seconds, CPU in milliseconds or seconds as the name says, rates from 0 to 1."""

    run: str
    seed: int
    backend: str | None
    """Backends of the sandboxes."""
    isolated: bool
    """Whether all backends declare that their sandboxes are isolated."""
    isolation: str
    cpu_ms_per_episode: float | None
    vm_cpu_s: dict[str, float]
    """CPU seconds of the machines by lane and role of their sandboxes; ``other``: those that died or were never used.
    Empty where they are not measured."""
    """CPU of the virtual machines, the judge's included."""
    errors: dict[str, int]
    """Error events by ``actor: kind``; the page shows their texts."""
    wall_s: float
    rl_wall_s: float
    time: Durations
    heldout_tasks: int
    heldout_before: float | None
    heldout_before_greedy: float | None
    heldout_after_t1: float | None
    heldout_after_greedy: float | None
    unseen_templates: UnseenTemplates
    families: dict[str, dict[str, tuple[int, int]]]
    """Reason of an evaluation before or after training to its families: (passed, tasks)."""
    curve: tuple[CurvePoint, ...]
    """Pass rates while training went on, by suite and version."""
    held_out_loss: dict[str, HeldOutLoss]
    """Of each source of `[[mid_training.data]]` that has held-out documents: number and kind."""
    steps: int
    turn_rewards: tuple[float, ...]
    """The mean reward of a turn in each step whose reward gives turns their own."""
    failed_steps: int
    efficiency: RunEfficiency | None
    """Where the trainer's time went; None without a step."""
    episodes: int
    tool_calls: int
    malformed_calls: int
    vm_clones: int
    tokens_sampled: int
    max_abs_dlp: float | None
    """Largest difference between the sampler's and the trainer's log-probability of a re-scored token."""
    rescored_tokens: int
    engines: tuple[EngineMismatch, ...]
    """Each engine's mismatch in its worst step."""
    mismatch_alarms: int
    staleness_max: int | None
    delta_ratio_mean: float | None
    """Raw bytes divided by wire bytes, over the deltas with a change."""
    delta_note: str
    trainer_busy: float
    rollout_busy: float
    cpu_s: dict[str, float]
    planted: str
    """The faults that mid-training's traces contain on purpose, and their share; empty without any."""
    ledger: AuditReport
    production: ProductLane
    unreadable_records: int
    """Records and messages that could not be decoded and were passed over."""
    restarts: tuple[str, ...]
    finished: str
    """Local date and time."""
    conditions: Conditions
    """CPU, load, versions and commit at the end of the run."""


TINY_NOTE = "the demo's learning rate changes most weights in every step; production rates change one in a hundred"
PLANTED = {
    "repairs": "the agent quits early, edits a file that it did not read or writes a wrong fix",
    "notes": "the first summary keeps a random one of the marked values",
}
"""The faults of each kind of generated traces."""
BF16_NOTE = "published as bf16; production rates are several times lower than this one and change fewer weights"


class Backends(NamedTuple):
    """Capabilities that the backends of a run's sandboxes share."""

    isolated: bool = False
    machines: bool = False
    """At least one of them runs sandboxes under kernels of their own."""


def build(
    config: Config,
    watch: Watch,
    records: RunRecords,
    ledger: AuditReport,
    moments: Moments,
    restarts: Sequence[str],
    backends: Backends,
) -> RunReport:
    """The report of a run that has ended."""
    steps, results = watch.steps, watch.evaluations
    now = time.time()
    final_evaluation = watch.phase_started.get(LAST_PHASE, moments.shutdown)
    issued = records.first_issue or watch.phase_started.get(LEARNING, moments.shutdown)
    # A version with unchanged bytes (a refused step, a batch without advantage) has an empty delta, which would
    # dominate the mean.
    ratios = [delta.raw_bytes / delta.wire_bytes for delta in records.deltas if delta.changed and delta.wire_bytes]
    vm_cpu_ms = watch.metric("environment", "vm_cpu_ms")
    return RunReport(
        run=watch.run,
        seed=config.run.seed,
        backend="+".join(sorted(records.backends)) or None,
        isolated=backends.isolated,
        isolation=config.environment.isolation,
        cpu_ms_per_episode=round(vm_cpu_ms / records.episodes, 1) if records.episodes else None,
        vm_cpu_s=machines_cpu_s(watch),
        errors=errors.counts(watch),
        wall_s=round(now - moments.started, 1),
        rl_wall_s=round(final_evaluation - issued, 1),
        time=Durations(
            setup_s=round(moments.ready - moments.started, 1),
            mid_training_s=round(issued - watch.phase_started.get(MID_TRAINING, issued), 1),
            rl_s=round(final_evaluation - issued, 1),
            eval_s=round(moments.shutdown - final_evaluation, 1),
            shutdown_s=round(now - moments.shutdown, 1),
        ),
        heldout_tasks=tasks_of(results, "heldout_after_t1"),
        heldout_before=rate_of(results, "heldout_before"),
        heldout_before_greedy=rate_of(results, "heldout_before_greedy"),
        heldout_after_t1=rate_of(results, "heldout_after_t1"),
        heldout_after_greedy=rate_of(results, "heldout_after_greedy"),
        unseen_templates=UnseenTemplates(
            tasks=tasks_of(results, "unseen_after_t1"),
            before=rate_of(results, "unseen_before"),
            before_greedy=rate_of(results, "unseen_before_greedy"),
            after_t1=rate_of(results, "unseen_after_t1"),
            after_greedy=rate_of(results, "unseen_after_greedy"),
        ),
        families={result.reason: result.families for result in results if not is_during(result)},
        curve=curve_of(results),
        held_out_loss=held_out_of(watch),
        steps=len(steps),
        turn_rewards=tuple(round(step.turn_reward_mean, 4) for step in steps if step.turn_reward_mean is not None),
        failed_steps=len(watch.failed_steps),
        efficiency=of_run(steps, watch.failed_steps),
        episodes=records.episodes,
        tool_calls=records.tool_calls,
        malformed_calls=records.malformed_calls,
        vm_clones=int(watch.metric("environment", "clones")) if backends.machines else 0,
        tokens_sampled=records.sampled_tokens,
        max_abs_dlp=max((step.max_abs_dlp for step in steps if step.rescored_tokens), default=None),
        rescored_tokens=sum(step.rescored_tokens for step in steps),
        engines=tuple(worst_engines(steps)),
        mismatch_alarms=sum(bool(step.alarm) for step in steps),
        staleness_max=max((step.staleness_max for step in steps), default=None),
        delta_ratio_mean=round(statistics.fmean(ratios), 2) if ratios else None,
        delta_note=BF16_NOTE if config.weights.precision == "bf16" else TINY_NOTE,
        trainer_busy=round(watch.busy_share("trainer", issued, final_evaluation), 3),
        rollout_busy=round(watch.busy_share("rollout", issued, final_evaluation), 3),
        cpu_s={name: round(seconds, 1) for name, seconds in sorted(watch.cpu.items())},
        planted=planted(config.mid_training),
        ledger=ledger,
        production=ProductLane(
            requests=len(records.sessions),
            p50_s=percentile(records.session_s, 0.5),
            p99_s=percentile(records.session_s, 0.99),
            reclaims=sum(event.kind == "reclaimed" and "start" not in event.text for _, event in watch.events),
            reclaim_max_s=round(max(reclaim_times(watch), default=0.0), 3),
            thumbs=records.feedback,
        ),
        unreadable_records=watch.bus.skipped_count,
        restarts=tuple(restarts),
        finished=time.strftime("%Y-%m-%d %H:%M:%S"),
        conditions=conditions("nats-py", "torch"),
    )


def planted(section: MidTraining) -> str:
    """Why the generated traces of mid-training contain faults, with their share; empty without any."""
    share = 1.0 - section.quality if section.tokens else 0.0
    if not share:
        return ""
    return (
        f"{100.0 * share:.0f} % of the mid-training traces contain a fault: {PLANTED[section.traces]}, so that "
        "reinforcement learning has something to improve"
    )


def percentile(values: Sequence[float], share: float) -> float | None:
    """Nearest-rank percentile; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3)


def reclaim_times(watch: Watch) -> list[float]:
    """Seconds from each reclaim by the scavenger until the last training request was back in the queue."""
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
    """Each engine's mismatch in the step with its largest k3, by engine and fingerprint."""
    worst: dict[tuple[str, str], EngineMismatch] = {}
    for engine in (engine for step in steps for engine in step.engines if engine.tokens):
        key = (engine.engine, engine.fingerprint)
        if key not in worst or not engine.k3 <= worst[key].k3:
            worst[key] = engine
    return [worst[key] for key in sorted(worst)]


def held_out_of(watch: Watch) -> dict[str, HeldOutLoss]:
    """The losses that the trainer told, by source."""
    told = (event.data for _, event in watch.events if event.kind == "held_out_loss")
    return {
        str(data["source"]): HeldOutLoss(float(data["before"]) if "before" in data else None, float(data["after"]))
        for data in told
    }


def is_during(result: EvalResult) -> bool:
    """Whether it was measured while training went on."""
    return result.reason.startswith(f"{DURING}_")


def curve_of(results: Sequence[EvalResult]) -> tuple[CurvePoint, ...]:
    """The evaluations while training went on, by suite and version."""
    points = [CurvePoint(each.suite, each.version, round(each.rate, 4), each.tasks) for each in results]
    return tuple(
        sorted(
            (point for point, each in zip(points, results, strict=True) if is_during(each)),
            key=lambda point: (point.suite, point.version),
        )
    )


def rate_of(results: Sequence[EvalResult], reason: str) -> float | None:
    """The pass rate of the newest evaluation with a reason; None without one."""
    rates = [result.rate for result in results if result.reason == reason]
    return round(rates[-1], 4) if rates else None


def tasks_of(results: Sequence[EvalResult], reason: str) -> int:
    """The number of tasks of the newest evaluation with a reason; 0 without one."""
    return next((result.tasks for result in reversed(results) if result.reason == reason), 0)


def machines_cpu_s(watch: Watch) -> dict[str, float]:
    """`RunReport.vm_cpu_s`."""
    total_ms = watch.metric("environment", "vm_cpu_ms")
    if not total_ms:
        return {}
    spent = {
        f"{lane} {role}": watch.metric("environment", f"vm_cpu_{lane}_{role}_ms")
        for lane in get_args(Lane)
        for role in get_args(Role)
    }
    spent["other"] = total_ms - sum(spent.values())
    return {name: round(ms / 1000, 1) for name, ms in spent.items()}
