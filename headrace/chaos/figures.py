"""The report of a run with injected faults: one flat JSON line, from the fault results and the run's streams."""

import json
import math
from collections import Counter
from collections.abc import Sequence

import msgspec

from headrace.bus.connection import Bus
from headrace.chaos.faults import BROKER, MACHINE, PlannedFault
from headrace.launch.conditions import Figures, at_least, at_most, conditions
from headrace.launch.runs import RunDir
from headrace.launch.session import bus_of
from headrace.messages import subjects as s
from headrace.messages.ledger import SlotIssued
from headrace.messages.operations import DeadLetter
from headrace.messages.rollout import SlotFailed
from headrace.messages.training import StepDone, StepFailed
from headrace.replay.audit import AuditReport, prove


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


async def collect(folder: RunDir, results: Sequence[FaultResult], kills: int, seed: int, ended: str) -> Figures:
    """The report of a finished run. ended: the sentence with which it ended too early."""
    async with bus_of(folder) as bus:
        report, wrong = await prove(bus, folder.id)
        reissued = await _reissued(bus, folder.id)
        outcomes = [received async for received in bus.history("HR_STEP", s.STEP.at(run=folder.id))]
        letters = [received.message async for received in bus.history("HR_DLQ", s.DLQ.where())]
    steps = [entry for entry in outcomes if isinstance(entry.message, StepDone | StepFailed)]
    counted = Counter(f"{one.planned.fault}_{one.planned.target.replace('-', '_')}" for one in results)
    return {
        "run": folder.id,
        "seed": seed,
        "kills_asked": kills,
        "kills": len(results),
        "not_recovered": sum(one.recovered_s is None for one in results),
        "connections_cut": sum(one.connections for one in results),
        **dict(sorted(counted.items())),
        **recovery(results),
        "sandboxes_lost": len(reissued),
        **_quantiles("reissue", reissued),
        "audit_balanced": report.balanced,
        "wrong": wrong[:5],
        "ended": ended,
        "steps": len({entry.message.step for entry in steps}),
        "steps_failed": sum(isinstance(entry.message, StepFailed) for entry in steps),
        "incarnations_max": max((entry.message.incarnation for entry in steps), default=0),
        "issued_slots": report.issued,
        "trained_slots": report.trained,
        **{f"dropped_{reason}_slots": count for reason, count in report.dropped.items()},
        "in_flight_slots": report.in_flight,
        "duplicates": report.duplicates,
        "losses": losses(report),
        "attempts_started": report.attempts.started,
        **{f"attempts_lost_{reason}": count for reason, count in report.attempts.lost.items()},
        "staleness_max": report.staleness_max,
        "staleness_bound": report.staleness_bound,
        "dead_letters": sum(isinstance(letter, DeadLetter) for letter in letters),
        "wall_s": round(results[-1].at - results[0].at, 1) if results else 0.0,
    }


def losses(report: AuditReport) -> int:
    """Slots and attempts without an end; after the end of a run also those that are still running."""
    slots = report.issued - report.trained - sum(report.dropped.values()) - report.in_flight
    attempts = report.attempts
    ended = attempts.kept + sum(attempts.lost.values()) + attempts.running
    return abs(slots) + abs(attempts.started - ended) + report.in_flight + attempts.running


def line(figures: Figures) -> str:
    """The one line."""
    return json.dumps({**figures, "conditions": conditions("nats-py", "torch"), "targets": targets(figures)})


def targets(figures: Figures) -> Figures:
    """The targets of the run; `headrace chaos` ends with 1 unless all of them are met."""
    return {
        "kills": at_least(figures["kills"], figures["kills_asked"]),
        "unbalanced": at_most(int(not figures["audit_balanced"]), 0),
        "duplicates": at_most(figures["duplicates"], 0),
        "losses": at_most(figures["losses"], 0),
    }


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


def recovery(results: Sequence[FaultResult]) -> Figures:
    """p50 and p99 over all faults, by kind of fault, and of the slowest kind."""
    kinds = sorted({one.kind for one in results})
    figures = _quantiles("recovery", [one.recovered_s for one in results])
    slowest: tuple[float, str] = (0.0, "")
    for kind in kinds:
        seconds = [one.recovered_s for one in results if one.kind == kind]
        figures |= _quantiles(f"recovery_{kind}", seconds)
        slowest = max(slowest, (max((value for value in seconds if value is not None), default=0.0), kind))
    figures |= {"recovery_slowest_s": round(slowest[0], 2), "recovery_slowest_kind": slowest[1]}
    return figures | _quantiles("at_work_again", [one.working_s for one in results])


def _quantiles(name: str, values: Sequence[float | None]) -> Figures:
    """Nearest rank; null where nothing was measured."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return {f"{name}_p50_s": None, f"{name}_p99_s": None}
    p50, p99 = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.99))
    return {f"{name}_p50_s": round(p50, 2), f"{name}_p99_s": round(p99, 2)}
