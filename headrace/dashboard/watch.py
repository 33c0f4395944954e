"""Live progress of a run, folded from its streams, beats and metrics.

`Watch` keeps the newest figures and a timeline of who was busy; `line` is what the terminal shows. It reads the same
subjects that any dashboard would.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from headrace.bus.connection import Bus
from headrace.config import Config
from headrace.messages import subjects
from headrace.messages.base import Message
from headrace.messages.codec import decode
from headrace.messages.evaluation import EvalRequest, EvalResult
from headrace.messages.operations import Beat, Event, Metric
from headrace.messages.training import StepDone, StepFailed

FINISHED = "run_finished"
"""The curriculum's event that ends a run."""


class Watch:
    """The newest figures of a run, and how they came about."""

    def __init__(self, bus: Bus, run: str, config: Config, started: float) -> None:
        self.bus, self.run, self.config, self.started = bus, run, config, started
        self.phase = "starting"
        self.steps: list[StepDone] = []
        self.failed_steps: list[StepFailed] = []
        self.evaluations: list[EvalResult] = []
        self.asked: list[EvalRequest] = []
        self.events: list[tuple[float, Event]] = []
        self.metrics: dict[str, dict[str, float]] = defaultdict(dict)
        self.busy: dict[str, list[tuple[float, float]]] = defaultdict(list)
        """Actor id to (time, share of the interval in which it was busy)."""
        self.cpu: dict[str, float] = {}
        """Process to CPU seconds, its reaped children included; filled by whoever owns the processes."""
        self.marks: dict[str, float] = {}
        """Moment at which a phase was first seen."""
        self.tokens_seen: tuple[float, float] = (time.time(), 0.0)

    async def until_finished(self, say: Callable[[str], None], every_s: float = 5.0) -> None:
        """Follow the run and say a line now and then, until the curriculum's last event."""
        await self.bus.listen_raw(subjects.BEAT.where(), self.hear)
        await self.bus.listen_raw(subjects.METRIC.where(), self.hear)
        async with asyncio.TaskGroup() as group:
            talker = group.create_task(self.talk(say, every_s))
            steps = group.create_task(self.follow_steps(say))
            async for received in self.bus.follow("HR_EVENT", subjects.EVENT.where(run=self.run)):
                message = received.message
                if self.on_event(message, received.time, say):
                    break
            talker.cancel()
            steps.cancel()

    async def talk(self, say: Callable[[str], None], every_s: float) -> None:
        """A line every few seconds."""
        while True:
            await asyncio.sleep(every_s)
            say(self.line())

    async def follow_steps(self, say: Callable[[str], None]) -> None:
        """Every step as it ends."""
        async for received in self.bus.follow("HR_STEP", subjects.STEP.at(run=self.run)):
            message = received.message
            if isinstance(message, StepDone):
                self.enter("reinforcement learning")
                self.steps.append(message)
            elif isinstance(message, StepFailed):
                self.failed_steps.append(message)
                say(f"step {message.step} failed: {message.reason}; {message.command}")

    def enter(self, phase: str) -> None:
        """Remember when a phase was first seen; phases only move on."""
        if phase not in self.marks:
            self.marks[phase] = time.time()
            self.phase = phase

    def on_event(self, message: Message, moment: float, say: Callable[[str], None]) -> bool:
        """Fold one event; True when it ends the run."""
        if isinstance(message, EvalRequest):
            self.asked.append(message)
        elif isinstance(message, EvalResult):
            self.evaluations.append(message)
            say(
                f"evaluation {message.id}: {message.passed} of {message.tasks} tasks of {message.suite} "
                f"({message.rate:.2f}) with version {message.version}"
            )
        elif isinstance(message, Event):
            self.events.append((moment, message))
            if message.kind == "phase":
                self.enter(message.text)
            if message.level == "error":
                say(f"{message.actor}: {message.kind}: {message.text}")
            return message.kind == FINISHED
        return False

    async def hear(self, raw: Any) -> None:
        """A beat or a metric, at most once each."""
        message = decode(raw.data, raw.headers)
        if isinstance(message, Beat) and message.run in ("", self.run):
            # An id made from a process number says nothing, and a restarted actor goes on in its predecessor's row.
            made_up = message.id.startswith(f"{message.actor}-")
            name = message.actor if made_up else f"{message.actor} {message.id}"
            self.busy[name].append((time.time(), message.busy))
        elif isinstance(message, Metric) and message.run == self.run:
            self.metrics[f"{message.actor}:{message.id}"].update(message.values)
            if message.actor == "trainer" and "mid_training_tokens" in message.values and not self.steps:
                self.enter("mid-training")

    def metric(self, actor: str, name: str) -> float:
        """A figure summed over the actors of a kind."""
        return sum(values.get(name, 0.0) for key, values in self.metrics.items() if key.startswith(f"{actor}:"))

    def tokens_per_s(self) -> float:
        """Sampled tokens per second since this was last asked."""
        then, before = self.tokens_seen
        now, total = time.time(), self.metric("rollout", "sampled_tokens")
        self.tokens_seen = (now, total)
        return max(0.0, total - before) / max(now - then, 1e-6)

    def line(self) -> str:
        """Phase, step, reward, pass rate, staleness, VMs, tokens per second, time left."""
        parts = [f"{time.time() - self.started:5.0f} s", self.phase]
        if self.phase == "mid-training":
            done = self.metric("trainer", "mid_training_tokens")
            parts.append(f"{100 * done / max(self.config.mid_training.tokens, 1):.0f} %")
            parts.append(f"loss {self.metric('trainer', 'mid_training_loss'):.3f}")
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
        parts.append(f"{self.metric('environment', 'vms'):.0f} VMs")
        parts.append(f"{self.tokens_per_s():.0f} tokens/s")
        left = self.seconds_left()
        if left is not None:
            parts.append(f"about {left:.0f} s left in this phase")
        return " | ".join(parts)

    def seconds_left(self) -> float | None:
        """A guess from the pace of the steps so far."""
        if len(self.steps) < 2 or self.phase != "reinforcement learning":
            return None
        pace = (time.time() - self.marks["reinforcement learning"]) / max(len(self.steps) - 1, 1)
        return pace * (self.config.curriculum.steps - len(self.steps))

    def busy_share(self, actor: str, begin: float, end: float) -> float:
        """Mean busy share of an actor kind between two moments; 0 when nothing was heard."""
        values = [
            share
            for name, beats in self.busy.items()
            if name.partition(" ")[0] == actor
            for moment, share in beats
            if begin <= moment <= end
        ]
        return sum(values) / len(values) if values else 0.0
