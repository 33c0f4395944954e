"""Metrics of a whole run for Prometheus: its steps, staleness, groups, streams and disk. No name contains an id.

`headrace up` and `headrace dashboard` serve them beside the metrics of their own process.
"""

import asyncio
import math
import shutil
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from headrace.bus.connection import Bus
from headrace.bus.errors import BusError
from headrace.config import versions
from headrace.dashboard.efficiency import in_order
from headrace.dashboard.watch import Watch
from headrace.messages import subjects as s
from headrace.messages.evaluation import EvalResult
from headrace.messages.ledger import GroupClosed
from headrace.messages.product import Traffic
from headrace.messages.training import Efficiency, SnapshotReady, StepDone
from headrace.metrics import process

POLL_S = 5.0
TROUBLES = ("server_lost", "server_hung", "load_failed", "slot_failed", "checkpoint_failed")
"""Kinds of events that are counted from 0 on, so that the first one is an increase."""
WINDOW = 10
"""Steps, or as many before them, whose mean the newest ones are compared with."""


class _State(msgspec.Struct):
    messages: int = 0
    bytes: int = 0


class _RecordedConfig(msgspec.Struct, frozen=True):
    max_bytes: int = -1


class _Info(msgspec.Struct):
    state: _State
    config: _RecordedConfig = _RecordedConfig()


def staleness_p99(step: StepDone) -> int:
    """The staleness that 99 % of a step's tokens do not exceed."""
    total, seen = sum(step.staleness.values()), 0
    for age, count in sorted((int(age), count) for age, count in step.staleness.items()):
        seen += count
        if seen >= 0.99 * total:
            return age
    return 0


def zero_advantage(group: GroupClosed) -> bool:
    """Whether all attempts of a group have the same reward, so that the group has no gradient."""
    return len({slot.reward for slot in group.slots}) < 2


class RunMetrics(Collector):
    """Call `follow` beside the run; Prometheus calls `collect` from its own thread."""

    def __init__(self, watch: Watch, bus: Bus, folder: Path, record_bytes: Mapping[str, int] | None = None) -> None:
        """record_bytes: planned for the streams of records, by name."""
        self._record_bytes = record_bytes or {}
        self._watch, self._bus, self._folder = watch, bus, folder
        self._streams: dict[str, _Info] = {}
        self._file_bytes = 0
        """Bytes of a version's file; 0 until the trainer has announced one."""
        self._closings: dict[str, bool] = {}
        self._traffic: dict[tuple[str, str], Traffic] = {}

    async def follow(self) -> None:
        """Keep the figures current for as long as this is awaited."""
        await self._bus.listen(s.TRAFFIC.where(), self._on_traffic)
        process.registry.register(self)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow_closings())
                group.create_task(self._poll())
        finally:
            process.registry.unregister(self)

    async def _on_traffic(self, message: object) -> None:
        if isinstance(message, Traffic) and message.run in ("", self._watch.run) and not message.server:
            self._traffic[message.region, message.run] = message

    async def _follow_closings(self) -> None:
        async for received in self._bus.follow("HR_SCORE", s.CLOSE.where(run=self._watch.run)):
            if isinstance(received.message, GroupClosed):
                self._closings[received.message.group] = zero_advantage(received.message)

    async def _poll(self) -> None:
        while True:
            await self.read_streams()
            await asyncio.sleep(POLL_S)

    async def read_streams(self) -> None:
        """Read the size of every stream once; the last figures stay while the broker restarts."""
        for stream in s.STREAMS:
            try:
                reply = await self._bus.connection.api(f"STREAM.INFO.{stream.name}", {})
            except BusError:
                return
            self._streams[stream.name] = msgspec.json.decode(reply, type=_Info)
        if not self._file_bytes:
            await self._read_file_bytes()

    async def _read_file_bytes(self) -> None:
        where = s.EVENT.where(run=self._watch.run, type=SnapshotReady.type_name)
        try:
            last = await self._bus.last("HR_EVENT", where)
        except BusError:
            return
        if last is not None and isinstance(last.message, SnapshotReady):
            self._file_bytes = last.message.bytes

    def _planned(self, name: str, limit: int) -> int:
        """Bytes that a stream is planned to have: the broker's limit, or without one those of the table, or those of
        the versions that the run keeps, where they are more."""
        if limit > 0:
            return limit
        needed = versions.stream_bytes(self._watch.config, self._file_bytes) if name == "HR_WEIGHTS" else 0
        return max(s.STREAM[name].max_bytes, needed, self._record_bytes.get(name, 0))

    def collect(self) -> Iterable[Metric]:
        """Every family that has a value."""
        steps, failed = list(self._watch.steps), len(self._watch.failed_steps)
        yield CounterMetricFamily("headrace_completed_steps", "Steps that were taken.", value=len(steps))
        yield CounterMetricFamily("headrace_failed_steps", "Steps that were refused.", value=failed)
        alarms = sum(bool(step.alarm) for step in steps)
        yield CounterMetricFamily("headrace_mismatch_alarms", "Steps with a mismatch above a limit.", value=alarms)
        events = Counter(event.kind for _, event in list(self._watch.events))
        troubles = CounterMetricFamily("headrace_troubles", "Events that need a look, by kind.", labels=["kind"])
        for kind in TROUBLES:
            troubles.add_metric([kind], events[kind])
        yield troubles
        problems = events["ledger_problem"]
        yield CounterMetricFamily("headrace_ledger_problems", "Contradictions in the streams.", value=problems)
        if steps:
            yield from self._of_steps(steps)
        yield from self._of_evaluations()
        told = [efficiency for _, efficiency in in_order(steps, list(self._watch.failed_steps))]
        if told:
            yield from self._of_efficiency(told[-1])
            yield _all_seconds(told)
        yield from self._of_streams()
        usage = shutil.disk_usage(self._folder)
        free = usage.free / max(1, usage.total)
        yield GaugeMetricFamily("headrace_disk_free_ratio", "Free share of the disk of the run's folder.", value=free)
        waiting = sum(each.waiting for each in list(self._traffic.values()))
        yield GaugeMetricFamily("headrace_waiting_sessions", "Users' sessions without an engine slot.", value=waiting)
        lent = max(0, events["lent"] - events["reclaimed"])
        yield GaugeMetricFamily("headrace_lent_rollouts", "Production rollout actors lent to training.", value=lent)

    def _of_steps(self, steps: list[StepDone]) -> Iterable[Metric]:
        last = steps[-1]
        groups = [self._closings[group] for group in last.groups if group in self._closings]
        figures = {
            "headrace_step_seconds": ("Median duration of the last ten steps, waiting included.", _median(steps)),
            "headrace_step_end_timestamp_seconds": ("When the newest step ended.", self._watch.step_ended),
            "headrace_step_reward_mean": ("Mean reward of the newest step.", last.reward_mean),
            "headrace_step_pass_ratio": ("Share of the newest step's attempts that passed.", last.pass_rate),
            "headrace_staleness_p99_versions": ("Staleness of 99 % of the step's tokens.", float(staleness_p99(last))),
            "headrace_staleness_bound_versions": ("The bound on staleness.", float(last.staleness_bound)),
            "headrace_mismatch_k1_nats": ("Mean of sampler minus trainer log-probability.", last.k1),
            "headrace_mismatch_k3_nats": ("Estimate of the divergence of sampler and trainer.", last.k3),
            "headrace_policy_entropy_nats": ("Entropy of the policy per token.", last.entropy),
            "headrace_gradient_norm": ("Largest norm of an update's gradient, before clipping.", last.grad_norm),
            "headrace_reward_fall_errors": (
                "Best mean reward of ten steps less the newest ten's, in standard errors of their difference.",
                reward_fall([step.reward_mean for step in steps]),
            ),
            "headrace_zero_advantage_ratio": (
                "Share of the step's groups whose attempts have one reward.",
                sum(groups) / len(groups) if groups else math.nan,
            ),
        }
        for name, (text, value) in figures.items():
            if math.isfinite(value):
                yield GaugeMetricFamily(name, text, value=value)
        usual = GaugeMetricFamily(
            "headrace_figure_to_median_ratio", "The newest step's figure over the median before.", labels=["figure"]
        )
        for name in ("entropy", "grad_norm", "k3"):
            before = [value for step in steps[-2 * WINDOW - 1 : -1] if math.isfinite(value := getattr(step, name))]
            if len(before) >= WINDOW and (median := statistics.median(before)) > 0.0:
                usual.add_metric([name], getattr(last, name) / median)
        yield usual
        of_loss = GaugeMetricFamily(
            "headrace_loss_metric", "A figure of the run's loss, by its name.", labels=["metric"]
        )
        for name, value in last.metrics.items():
            if math.isfinite(value):
                of_loss.add_metric([name], value)
        yield of_loss

    def _of_evaluations(self) -> Iterable[Metric]:
        """Of each suite that is measured again and again at one temperature."""
        rates = GaugeMetricFamily("headrace_evaluation_pass_ratio", "Of the newest evaluation.", labels=["suite"])
        falls = GaugeMetricFamily(
            "headrace_evaluation_fall_errors",
            "Best pass rate less the newest evaluation's, in standard errors of their difference.",
            labels=["suite"],
        )
        by_suite: dict[str, list[EvalResult]] = {}
        for result in list(self._watch.evaluations):
            if "greedy" not in result.reason and result.tasks > result.infra_failures:
                by_suite.setdefault(result.suite, []).append(result)
        for suite, results in by_suite.items():
            rates.add_metric([suite], results[-1].rate)
            falls.add_metric([suite], max(_fall(result, results[-1]) for result in results))
        yield from (rates, falls)

    def _of_efficiency(self, efficiency: Efficiency) -> Iterable[Metric]:
        """Of the newest step, also of one that failed."""
        named = efficiency.figures()
        figures = {
            "headrace_step_wall_seconds": ("From the outcome before the newest step to its own.", efficiency.wall_s),
            "headrace_trained_tokens_per_second": ("Sampled tokens with a gradient.", named["trained_tokens_per_s"]),
            "headrace_forwarded_tokens_per_second": ("Inputs of every forward pass.", named["forwarded_tokens_per_s"]),
            "headrace_expert_load_ratio": ("Routed rows of the busiest expert over the mean's.", named["expert_load"]),
            "headrace_mfu_ratio": ("Share of the peak that trained; absent where the peak is unknown.", efficiency.mfu),
            "headrace_hfu_ratio": ("Share of the peak that computed; absent where it is unknown.", efficiency.hfu),
            "headrace_trainer_peak_bytes": ("Largest memory of a rank in the step.", named.get("peak_bytes")),
            "headrace_trainer_planned_bytes": ("The memory plan of a rank.", named.get("planned_bytes")),
            "headrace_rank_collectives_seconds": ("Longest of a rank.", named.get("longest_collectives_s")),
            "headrace_rank_straggler_seconds": ("Longest wait of a rank.", named.get("longest_straggler_s")),
        }
        for name, (text, value) in figures.items():
            if value is not None:
                yield GaugeMetricFamily(name, text, value=value)
        spent = GaugeMetricFamily("headrace_step_cause_seconds", "The step's wall time by cause.", labels=["cause"])
        for cause, seconds in efficiency.seconds.items():
            spent.add_metric([cause], seconds)
        yield spent

    def _of_streams(self) -> Iterable[Metric]:
        messages = GaugeMetricFamily("headrace_stream_messages", "Messages in a stream.", labels=["stream"])
        stored = GaugeMetricFamily("headrace_stream_bytes", "Size of a stream.", labels=["stream"])
        planned = GaugeMetricFamily("headrace_stream_planned_bytes", "Planned size of a stream.", labels=["stream"])
        for name, info in list(self._streams.items()):
            messages.add_metric([name], info.state.messages)
            stored.add_metric([name], info.state.bytes)
            planned.add_metric([name], self._planned(name, info.config.max_bytes))
        yield from (messages, stored, planned)


def reward_fall(rewards: Sequence[float]) -> float:
    """`headrace_reward_fall_errors` of the rewards of all steps; NaN before there are two windows."""
    windows = [rewards[end - WINDOW : end] for end in range(len(rewards), WINDOW - 1, -WINDOW)]
    if len(windows) < 2:
        return math.nan
    last, best = windows[0], max(windows[1:], key=statistics.fmean)
    spread = math.sqrt((statistics.variance(last) + statistics.variance(best)) / WINDOW)
    fall = statistics.fmean(best) - statistics.fmean(last)
    return fall / max(spread, 1e-6)


def _fall(before: EvalResult, now: EvalResult) -> float:
    """How far the pass rate fell, in standard errors of the difference of two shares."""
    counts = [result.tasks - result.infra_failures for result in (before, now)]
    share = (before.passed + now.passed) / sum(counts)
    error = math.sqrt(share * (1.0 - share) * sum(1.0 / count for count in counts))
    return (before.rate - now.rate) / error if error else 0.0


def _all_seconds(told: Sequence[Efficiency]) -> Metric:
    """Seconds by cause of all steps: a scrape sees only some of them as the newest one."""
    causes = dict.fromkeys(cause for efficiency in told for cause in efficiency.seconds)
    spent = CounterMetricFamily(
        "headrace_trainer_cause_seconds", "Wall time of all steps by cause, failed ones included.", labels=["cause"]
    )
    for cause in causes:
        spent.add_metric([cause], sum(efficiency.seconds.get(cause, 0.0) for efficiency in told))
    return spent


def _median(steps: list[StepDone]) -> float:
    return statistics.median(step.seconds + step.waited_s for step in steps[-10:])
