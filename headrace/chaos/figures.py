"""The report of a run with injected faults: one JSON line, from the fault results and the run's streams."""

import math
from collections import Counter
from collections.abc import Sequence

import msgspec

from headrace.bus.connection import Bus
from headrace.chaos.faults import BROKER, MACHINE, PlannedFault
from headrace.launch.runs import RunDir
from headrace.launch.session import bus_of
from headrace.messages import subjects as s
from headrace.messages.ledger import SlotIssued
from headrace.messages.operations import DeadLetter
from headrace.messages.rollout import SlotFailed
from headrace.messages.training import StepDone, StepFailed
from headrace.metrics.conditions import Conditions, Target, at_least, at_most, conditions
from headrace.replay.audit import AuditReport, prove

MACHINE_S = 15.0
"""A node replaces a killed machine within this many seconds; until then its slots wait."""


LATE_S = 60.0
"""The end of a run that comes this soon after a fault (for a stop: after the target continued) may precede the
recovery."""


class FaultResult(msgspec.Struct, kw_only=True):
    """A fault that was injected, and how long its target took to recover."""

    planned: PlannedFault
    at: float
    recovered_s: float | None = None
    working_s: float | None = None
    """None where the target was not at work again in time, or where no record shows it."""
    connections: int = 0
    """TCP connections that were cut."""

    @property
    def kind(self) -> str:
        """``kill``, ``stop`` or ``cut``; after the target's name where that target recovers differently."""
        target, fault = self.planned.target, self.planned.fault
        return f"{target}_{fault}" if target in (BROKER, MACHINE) else fault


class Quantiles(msgspec.Struct, frozen=True):
    """Seconds by nearest rank; None where nothing was measured."""

    p50_s: float | None
    p99_s: float | None
    max_s: float | None


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """How long the targets took to recover."""

    all: Quantiles
    by_kind: dict[str, Quantiles]
    """Kind of fault as in `FaultResult.kind`."""
    slowest_kind: str
    """The kind with the longest recovery; empty when nothing recovered."""
    slowest_s: float
    at_work_again: Quantiles
    """From the fault to the target's next piece of work, over all faults."""


class ChaosReport(msgspec.Struct, frozen=True, kw_only=True):
    """The one line of `headrace chaos`."""

    run: str
    seed: int
    kills_asked: int
    kills: int
    """Faults that were injected, of every kind."""
    not_recovered: int
    """Faults whose target did not recover, those apart that were injected less than `LATE_S` before the end."""
    late: int
    """Faults whose target had no time to recover before the run ended."""
    connections_cut: int
    faults: dict[str, int]
    """``<fault>_<target>`` to the number of times that it was injected."""
    recovery: Recovery
    sandboxes_lost: int
    reissue: Quantiles
    """From the loss of a sandbox until its slot is issued again."""
    audit: AuditReport
    losses: int
    """Slots and attempts without an end (`losses`)."""
    wrong: list[str]
    """The first five faults of the balance, as sentences."""
    ended: str
    """The sentence with which the run ended too early; empty when it reached its end."""
    steps: int
    steps_failed: int
    incarnations_max: int
    dead_letters: int
    wall_s: float
    """From the first fault to the last."""
    conditions: Conditions
    targets: dict[str, Target]
    """`headrace chaos` ends with 1 unless all of them are met."""


async def collect(
    folder: RunDir, results: Sequence[FaultResult], kills: int, seed: int, ended: str, end: float
) -> ChaosReport:
    """The report of a finished run. ended: the sentence with which it ended too early; end: the time of its end, in
    seconds since the epoch."""
    async with bus_of(folder) as bus:
        report, wrong = await prove(bus, folder.id)
        reissued = await _reissued(bus, folder.id)
        outcomes = [received async for received in bus.history("HR_STEP", s.STEP.at(run=folder.id))]
        letters = [received.message async for received in bus.history("HR_DLQ", s.DLQ.where())]
    steps = [entry for entry in outcomes if isinstance(entry.message, StepDone | StepFailed)]
    counted = Counter(f"{result.planned.fault}_{result.planned.target.replace('-', '_')}" for result in results)
    lost = losses(report)
    failed = [result for result in results if result.recovered_s is None]
    late = sum(end - result.at - result.planned.asleep_s < LATE_S for result in failed)
    return ChaosReport(
        run=folder.id,
        seed=seed,
        kills_asked=kills,
        kills=len(results),
        not_recovered=len(failed) - late,
        late=late,
        connections_cut=sum(result.connections for result in results),
        faults=dict(sorted(counted.items())),
        recovery=recovery(results),
        sandboxes_lost=len(reissued),
        reissue=_quantiles(reissued),
        audit=report,
        losses=lost,
        wrong=wrong[:5],
        ended=ended,
        steps=len({entry.message.step for entry in steps}),
        steps_failed=sum(isinstance(entry.message, StepFailed) for entry in steps),
        incarnations_max=max((entry.message.incarnation for entry in steps), default=0),
        dead_letters=sum(isinstance(letter, DeadLetter) for letter in letters),
        wall_s=round(results[-1].at - results[0].at, 1) if results else 0.0,
        conditions=conditions("nats-py", "torch"),
        targets={
            "kills": at_least(len(results), kills),
            "unbalanced": at_most(int(not report.balanced), 0),
            "duplicates": at_most(report.duplicates, 0),
            "losses": at_most(lost, 0),
            "not_recovered": at_most(len(failed) - late, 0),
            **machine_target(results),
        },
    )


def machine_target(results: Sequence[FaultResult]) -> dict[str, Target]:
    """The target for killed machines, where any were killed. A machine that was never replaced misses it."""
    seconds = [result.recovered_s for result in results if result.kind == f"{MACHINE}_kill"]
    if not seconds:
        return {}
    slowest = None if None in seconds else max(value for value in seconds if value is not None)
    return {"machine_kill_max_s": at_most(slowest, MACHINE_S)}


def losses(report: AuditReport) -> int:
    """Slots and attempts without an end; after the end of a run also those that are still running."""
    slots = report.issued - report.trained - sum(report.dropped.values()) - report.in_flight
    attempts = report.attempts
    ended = attempts.kept + sum(attempts.lost.values()) + attempts.running
    return abs(slots) + abs(attempts.started - ended) + report.in_flight + attempts.running


async def _reissued(bus: Bus, run: str) -> list[float | None]:
    """Per SlotFailed for its sandbox: seconds until the slot was issued again; None where it was its last attempt, or
    where its group was over."""
    failed: dict[tuple[str, int, int], float] = {}
    issued: dict[tuple[str, int, int], float] = {}
    async for received in bus.history("HR_LEDGER", s.LEDGER.where(run=run), s.FAIL.where(run=run)):
        message = received.message
        if isinstance(message, SlotFailed) and message.reason == "sandbox_lost":
            failed.setdefault((message.group, message.slot, message.attempt), received.time)
        elif isinstance(message, SlotIssued):
            issued.setdefault((message.group, message.slot, message.attempt), received.time)
    return [
        issued[group, slot, attempt + 1] - moment if (group, slot, attempt + 1) in issued else None
        for (group, slot, attempt), moment in failed.items()
    ]


def recovery(results: Sequence[FaultResult]) -> Recovery:
    """Quantiles over all faults and by kind of fault, and the slowest kind."""
    kinds = {
        kind: [result.recovered_s for result in results if result.kind == kind]
        for kind in {result.kind for result in results}
    }
    longest = {
        kind: max(value for value in seconds if value is not None)
        for kind, seconds in kinds.items()
        if any(value is not None for value in seconds)
    }
    slowest = max(longest, key=lambda kind: (longest[kind], kind), default="")
    return Recovery(
        all=_quantiles([result.recovered_s for result in results]),
        by_kind={kind: _quantiles(kinds[kind]) for kind in sorted(kinds)},
        slowest_kind=slowest,
        slowest_s=round(longest.get(slowest, 0.0), 2),
        at_work_again=_quantiles([result.working_s for result in results]),
    )


def _quantiles(values: Sequence[float | None]) -> Quantiles:
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return Quantiles(None, None, None)
    p50, p99 = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.99))
    return Quantiles(round(p50, 2), round(p99, 2), round(ordered[-1], 2))
