"""Times of versions in a run whose rollout actors are in regions, read from the streams at the hub.

The rollout actors and the nodes have their regions' names. Each time is that at which the hub's stream stored a record.
"""

from collections import Counter
from collections.abc import Iterable
from statistics import median
from typing import Any, NamedTuple

from benchmarks.conditions import Figures
from headrace.bus.connection import Bus
from headrace.messages.rollout import Trajectory, versions
from headrace.messages.subjects import EVENT, STEP, TRAJ, TURN, WEIGHT_HEAD
from headrace.messages.training import StepDone, StepManifest

CUT_WITHIN_S = 5.0
"""A version whose step ended this long before the cut may still have been under way."""


class Cut(NamedTuple):
    """A link that dropped every packet, from and to when (seconds since the epoch)."""

    region: str
    since: float
    until: float


class Moments(NamedTuple):
    """When each record of a version was stored. Regions and versions are the keys."""

    done: dict[int, float]
    head: dict[int, float]
    staged: dict[tuple[str, int], float]
    swapped: dict[tuple[str, int], float]
    sampled: dict[tuple[str, int], float]


class Records(NamedTuple):
    """The records of the run, read from its streams."""

    moments: Moments
    outcomes: list[StepDone]
    trained: Counter[str]
    """Trained attempts by region."""
    attempts: Counter[str]
    """Trajectories by region."""
    back: float
    """When the first turn of the region whose link was cut was stored after its return; infinite: never."""
    elsewhere: int
    """Trajectories whose sandbox was not in the region of their rollout actor."""


async def records(bus: Bus, run: str, names: Iterable[str], cut: Cut) -> Records:
    """Read the streams of the finished run."""
    moments = Moments({}, {}, {}, {}, {})
    outcomes, manifests = [], {}
    async for received in bus.history("HR_STEP", STEP.at(run=run)):
        if isinstance(received.message, StepManifest):
            manifests[received.seq] = received.message
        elif isinstance(received.message, StepDone):
            outcomes.append(received.message)
            moments.done[received.message.version] = received.time
    async for received in bus.history("HR_WEIGHTS", WEIGHT_HEAD.at(run=run)):
        moments.head.setdefault(received.message.version, received.time)
    for kind, times in (("weights_staged", moments.staged), ("weights_swapped", moments.swapped)):
        async for received in bus.history("HR_EVENT", EVENT.where(run=run, type=kind)):
            times.setdefault((received.message.node, received.message.version), received.time)
    stored: dict[tuple[str, int], tuple[float, str]] = {}
    async for received in bus.history("HR_TURN", TURN.where(run=run)):
        if received.message.type_name == "turn_sampled":
            key = (received.message.trajectory, received.message.turn.index)
            stored.setdefault(key, (received.time, received.message.node))
    trained, attempts, elsewhere = Counter(dict.fromkeys(names, 0)), Counter(dict.fromkeys(names, 0)), 0
    back = float("inf")
    seqs = {seq for step in outcomes for group in manifests[step.manifest_seq].groups for seq, _ in group.slots}
    async for received in bus.history("HR_TRAJ", TRAJ.where(run=run)):
        made: Trajectory = received.message
        attempts[made.rollout] += 1
        trained[made.rollout] += received.seq in seqs
        by_token, at = versions(made.turns), 0
        for turn in made.turns:
            when, node = stored[made.id, turn.index]
            if made.rollout == cut.region and when > cut.until:
                back = min(back, when)
            elsewhere += turn is made.turns[0] and not node.startswith(made.rollout)
            for version in set(by_token[at : at + len(turn.ids)]):
                first = moments.sampled.get((made.rollout, version), when)
                moments.sampled[made.rollout, version] = min(first, when)
            at += len(turn.ids)
    return Records(moments, outcomes, trained, attempts, back, elsewhere)


def or_later(times: dict[tuple[str, int], float], name: str, version: int) -> float | None:
    """When a region first had this version or a later one; None when it never had."""
    return min((at for (region, other), at in times.items() if region == name and other >= version), default=None)


def delays(moments: Moments, names: list[str], cut: Cut, bound: int) -> Figures:
    """Seconds from StepDone, by version and region, and their medians without the versions of the cut.

    bound: of staleness. The last `bound` + 1 versions are left out: when they are made, every attempt of the run has
    been issued.
    """
    table: dict[str, dict[str, Any]] = {}
    seconds: dict[str, dict[str, list[float]]] = {name: {"staged": [], "swapped": [], "sampled": []} for name in names}
    every: list[float] = []
    skipped = never = 0
    for version, done in sorted(moments.done.items())[: -1 - bound]:
        row: dict[str, Any] = {"head_s": round(moments.head[version] - done, 3)}
        last: list[float] = []
        apart = cut.since - CUT_WITHIN_S <= done <= cut.until
        row["link_cut"] = apart
        for name in names:
            row[name] = {}
            for what, times in (("staged", moments.staged), ("swapped", moments.swapped), ("sampled", moments.sampled)):
                at = or_later(times, name, version)
                row[name][f"{what}_s"] = None if at is None else round(at - done, 3)
                if at is not None and not apart:
                    seconds[name][what].append(at - done)
            skipped += (name, version) not in moments.sampled
            never += row[name]["sampled_s"] is None
            if row[name]["sampled_s"] is not None:
                last.append(row[name]["sampled_s"])
        if len(last) == len(names):
            row["every_region_sampled_s"] = max(last)
            every += [] if apart else [max(last)]
        table[str(version)] = row
    out: Figures = {"versions": table, "versions_skipped": skipped, "versions_never_sampled": never}
    out["every_region_sampled_s"] = [round(value, 3) for value in every]
    out["every_region_sampled_median_s"] = round(median(every), 3) if every else None
    for name in names:
        for what, values in seconds[name].items():
            out[f"{name}_{what}_median_s"] = round(median(values), 3) if values else None
    return out
