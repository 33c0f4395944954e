"""Live progress of a run, folded from its streams, heartbeats and metrics.

`Watch` keeps the newest figures and each actor's utilisation over time; `line` is the line that the terminal shows. It
reads the subjects that any dashboard would read.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable

from headrace.bus.connection import Bus
from headrace.config import Config
from headrace.dashboard.pace import Pace
from headrace.messages import subjects
from headrace.messages.base import Message
from headrace.messages.evaluation import EvalRequest, EvalResult
from headrace.messages.operations import LAST_PHASE, LEARNING, MID_TRAINING, Event, Heartbeat, Metric
from headrace.messages.training import StepDone, StepFailed

FINISHED = "run_finished"
"""Kind of the curriculum's event that ends a run."""

Say = Callable[[str], None]
"""Shows a line to the user."""

LINE_S = 2.0
"""Seconds between two progress lines."""
GAUGE_S = 3.0
"""An actor whose metric is older than the newest one of its kind by this has ended. Actors publish every two seconds,
and a killed one takes longer to start again."""


class Watch:
    """The newest figures of a run, and their history."""

    def __init__(self, bus: Bus, run: str, config: Config, started: float) -> None:
        """started: when the command began, in seconds since the epoch."""
        self.bus, self.run, self.config, self.started = bus, run, config, started
        self.phase = "starting"
        self.steps: list[StepDone] = []
        self.step_ended = 0.0
        """When the newest of `steps` was stored, in seconds since the epoch; 0 without one."""
        self.failed_steps: list[StepFailed] = []
        self.evaluations: list[EvalResult] = []
        self.asked: list[EvalRequest] = []
        self.events: list[tuple[float, Event]] = []
        self.metrics: dict[str, dict[str, float]] = defaultdict(dict)
        self.measured: dict[str, float] = {}
        """Key of `metrics` to the time at which its newest metric arrived, by `time.monotonic`."""
        self.busy: dict[str, list[tuple[float, float]]] = defaultdict(list)
        """Actor id to (time, share of the interval in which it was busy)."""
        self.cpu: dict[str, float] = {}
        """Process to CPU seconds, its reaped children included; filled by the owner of the processes."""
        self.phase_started: dict[str, float] = {}
        """Phase to the time at which it was first observed, in seconds since the epoch."""
        self._sampled: tuple[float, float] = (time.time(), 0.0)
        self._pace = Pace(config)

    async def until_finished(self, say: Say, show: Say | None = None) -> None:
        """Follow the run until the curriculum's last event. say: shows a line for good; show: replaces the progress
        line, every LINE_S.

        The bus passes over records that it cannot decode; each is shown once.
        """
        self.bus.on_skipped = lambda record: say(
            f"skipped an unreadable record: {record.stream} #{record.seq} {record.subject}: {record.reason}"
        )
        await self.bus.listen(subjects.HEARTBEAT.where(), self.on_status)
        await self.bus.listen(subjects.METRIC.where(), self.on_status)
        async with asyncio.TaskGroup() as group:
            ticker = group.create_task(self.show_line(show))
            steps = group.create_task(self.follow_steps(say))
            async for received in self.bus.follow("HR_EVENT", subjects.EVENT.where(run=self.run)):
                if self.on_event(received.message, received.time, say):
                    break
            ticker.cancel()
            steps.cancel()

    async def show_line(self, show: Say | None) -> None:
        """Show the progress line every few seconds."""
        while show is not None:
            await asyncio.sleep(LINE_S)
            show(self.line())

    async def follow_steps(self, say: Say) -> None:
        """Collect every step when it ends."""
        async for received in self.bus.follow("HR_STEP", subjects.STEP.at(run=self.run)):
            message = received.message
            if isinstance(message, StepDone):
                self.enter(LEARNING)
                self.steps.append(message)
                self.step_ended = received.time
            elif isinstance(message, StepFailed):
                self.failed_steps.append(message)
                say(f"step {message.step} failed: {message.reason}; {message.command}")

    def enter(self, phase: str) -> None:
        """Start a phase unless it was observed before."""
        if phase not in self.phase_started:
            self.phase_started[phase] = time.time()
            self.phase = phase

    def on_event(self, message: Message, moment: float, say: Say) -> bool:
        """Apply one event; True when it ends the run."""
        if isinstance(message, EvalRequest):
            self.asked.append(message)
        elif isinstance(message, EvalResult):
            self.evaluations.append(message)
            say(
                f"evaluation {message.id}: {message.passed} of {message.tasks} tasks of {message.suite} passed "
                f"({message.rate:.2f}) with version {message.version}"
            )
        elif isinstance(message, Event):
            self.events.append((moment, message))
            if message.kind == "phase":
                if not self._all_steps(message) and self.phase_started.pop(LAST_PHASE, None) is not None:
                    self.phase = message.text  # the run trains again, and its final evaluation starts later
                self.enter(message.text)
            if message.level == "error":
                say(f"{message.actor}: {message.kind}: {message.text}")
            return message.kind == FINISHED and self._all_steps(message)
        return False

    def _all_steps(self, end: Event) -> bool:
        """Whether the run has trained its steps: a resumed run may have more than when it ended before. True where the
        event does not count them."""
        done = end.data.get("steps")
        return not isinstance(done, int) or done >= self.config.curriculum.steps

    async def on_status(self, message: Message) -> None:
        """Apply a heartbeat or a metric. They are not stored, so a lost one is not read again."""
        if isinstance(message, Heartbeat) and message.run in ("", self.run):
            # A generated id contains the process number. A restarted actor continues the row of its predecessor.
            generated = message.id.startswith(f"{message.actor}-")
            name = message.actor if generated else f"{message.actor} {message.id}"
            self.busy[name].append((time.time(), message.busy))
        elif isinstance(message, Metric) and message.run == self.run:
            key = f"{message.actor}:{message.id}"
            self.metrics[key].update(message.values)
            self.measured[key] = time.monotonic()
            if message.actor == "trainer" and "mid_training_tokens" in message.values and not self.steps:
                self.enter(MID_TRAINING)

    def metric(self, actor: str, name: str) -> float:
        """A counter, summed over the actors of a kind, those that have ended included."""
        return sum(values.get(name, 0.0) for _, values in self._of(actor))

    def gauge(self, actor: str, name: str) -> float:
        """A figure as it is now, summed over the actors of a kind that live: their metrics are recent."""
        told = {key: self.measured[key] for key, values in self._of(actor) if name in values}
        recent = max(told.values(), default=0.0) - GAUGE_S
        return sum(self.metrics[key][name] for key, at in told.items() if at > recent)

    def _of(self, actor: str) -> list[tuple[str, dict[str, float]]]:
        return [(key, values) for key, values in self.metrics.items() if key.startswith(f"{actor}:")]

    def tokens_per_s(self) -> float:
        """Sampled tokens per second since the previous call."""
        before_s, before = self._sampled
        now, total = time.time(), self.metric("rollout", "sampled_tokens")
        self._sampled = (now, total)
        return max(0.0, total - before) / max(now - before_s, 1e-6)

    def line(self) -> str:
        """Share of the run, phase, step, reward, pass rate, staleness, machines, tokens per second, time left."""
        elapsed, left = time.time() - self.started, self.seconds_left()
        parts = [] if left is None else [f"{100 * elapsed / max(elapsed + left, 1e-6):3.0f} %"]
        parts.append(self.phase)
        if self.phase == MID_TRAINING:
            done = self.gauge("trainer", "mid_training_tokens")
            parts.append(f"{100 * done / max(self.config.mid_training.tokens, 1):.0f} % of its tokens")
            parts.append(f"loss {self.gauge('trainer', 'mid_training_loss'):.3f}")
        if self.steps:
            last = self.steps[-1]
            recent = self.steps[-5:]
            parts += [
                f"step {last.step + 1}/{self.config.curriculum.steps}",
                f"reward {last.reward_mean:.2f}",
                f"pass rate {sum(step.pass_rate for step in recent) / len(recent):.2f}",
                f"staleness {last.staleness_max}/{last.staleness_bound}",
                f"k1 {last.k1:+.4f}",
            ]
        if self.phase != MID_TRAINING:  # it uses neither sandboxes nor engines
            parts.append(f"{self.gauge('environment', 'vms'):.0f} VMs")
            parts.append(f"{self.tokens_per_s():.0f} tokens/s")
        parts.append(f"{elapsed:.0f} s" + (f", about {left:.0f} s left" if left is not None else ""))
        return " | ".join(parts)

    def seconds_left(self) -> float | None:
        """Estimate of the time until the run's last evaluation; None while there is nothing to estimate it from."""
        return self._pace.seconds_left(
            self.phase,
            self.gauge("trainer", "mid_training_tokens"),
            len(self.steps),
            {evaluation.id for evaluation in self.evaluations},
            self.metric("rollout", "episodes"),
        )

    def busy_share(self, actor: str, begin: float, end: float) -> float:
        """Mean busy share of the actors of a kind between two moments; 0 without a heartbeat."""
        values = [
            share
            for name, heartbeats in self.busy.items()
            if name.partition(" ")[0] == actor
            for moment, share in heartbeats
            if begin <= moment <= end
        ]
        return sum(values) / len(values) if values else 0.0
