"""The data of four views of the live page, from streams that the page's own role may not read.

Nothing of a user is in it: attempts of the train lane, counts of the gate, and which engine serves what.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from headrace.bus.connection import Bus
from headrace.messages import subjects as s
from headrace.messages.product import CapacityLease, GateState, GateVerdict, gate_key, lease_key
from headrace.messages.rollout import ToolResult, Trajectory
from headrace.weights.receiving import readiness
from headrace.weights.receiving.readiness import NodeCopy, Replica

NEWEST = 2_000
"""Records of HR_TRAJ that one answer covers: trajectories are large."""
READS = frozenset({"read_file", "search", "semantic_search", "list_files"})
EDITS = frozenset({"edit", "edit_file", "write_file"})


class ReplicaState(Replica, frozen=True, kw_only=True):
    """A replica, and whether it is alive."""

    alive: bool


class Regions(msgspec.Struct, frozen=True, kw_only=True):
    """The version that every node holds and every replica serves."""

    newest: int
    """The committed version; -1 for none."""
    nodes: list[NodeCopy]
    replicas: list[ReplicaState]


class GateView(msgspec.Struct, frozen=True, kw_only=True):
    """The stage of the candidate, and every verdict with the time of its record."""

    now: GateState
    verdicts: list[tuple[float, GateVerdict]]


class Leases(msgspec.Struct, frozen=True, kw_only=True):
    """The lanes that each rollout actor with a lease pulls from."""

    leases: list[CapacityLease]


class AttemptBehaviour(msgspec.Struct, frozen=True, kw_only=True):
    """The behaviour of the policy in one attempt."""

    group: str
    turns: int
    calls: int
    reads: int | None
    """Reading calls before the first edit; None without an edit."""
    tests: int
    """Times that it ran the tests."""
    lint: bool | None
    """Whether the last `lint` found no problem after an earlier one did; None if no `lint` found a problem."""


class Behaviour(msgspec.Struct, frozen=True, kw_only=True):
    """Attempts of the train lane after a sequence."""

    attempts: list[AttemptBehaviour]
    last: int
    """The sequence after which the next request should ask."""


async def regions(bus: Bus, run: str, _: int) -> Regions:
    """By the ledger of readiness."""
    last = await bus.last("HR_WEIGHTS", s.WEIGHT_HEAD.at(run=run))
    ledger = await readiness.read(bus, run)
    alive = {key.partition(".")[2] for key in await (await bus.kv("HR_PRESENCE")).keys("rollout.>")}
    return Regions(
        newest=last.message.version if last is not None else -1,
        nodes=sorted(ledger.copies.values(), key=lambda copy: (copy.region, copy.node)),
        replicas=[
            ReplicaState(**msgspec.structs.asdict(replica), alive=replica.replica in alive)
            for replica in ledger.replicas()
        ],
    )


async def gate(bus: Bus, run: str, _: int) -> GateView:
    """By the feedback actor's verdicts and its state."""
    where = s.EVENT.where(run=run, actor="feedback", type=GateVerdict.type_name)
    verdicts = [(received.time, received.message) async for received in bus.history("HR_EVENT", where)]
    entry = await (await bus.kv("HR_PRODUCT")).get(gate_key(run))
    state = entry[0] if entry is not None and isinstance(entry[0], GateState) else GateState(run=run)
    return GateView(now=state, verdicts=verdicts)


async def leases(bus: Bus, run: str, _: int) -> Leases:
    """By the bucket of leases."""
    held = await (await bus.kv("HR_LEASE")).items(lease_key(run, ">"))
    return Leases(leases=[lease for _, (lease, _) in sorted(held.items()) if isinstance(lease, CapacityLease)])


async def behaviour(bus: Bus, run: str, after: int) -> Behaviour:
    """By the trajectories of the train lane, the newest `NEWEST` records after a sequence."""
    end = await bus.last_seq("HR_TRAJ")
    attempts = []
    async for received in bus.history("HR_TRAJ", s.TRAJ.where(run=run), start=max(after, end - NEWEST) + 1):
        if isinstance(received.message, Trajectory) and received.message.lane == "train":
            attempts.append(attempt(received.message))
        end = max(end, received.seq)
    return Behaviour(attempts=attempts, last=end)


def attempt(trajectory: Trajectory) -> AttemptBehaviour:
    """The figures of one attempt."""
    calls = [call.name for turn in trajectory.turns for call in turn.calls]
    results: dict[str, ToolResult] = {result.call_id: result for turn in trajectory.turns for result in turn.results}
    edited = next((at for at, name in enumerate(calls) if name in EDITS), None)
    linted = [
        results[call.id].output.strip() == "no problems"
        for turn in trajectory.turns
        for call in turn.calls
        if call.name == "lint" and call.id in results and results[call.id].ok
    ]
    return AttemptBehaviour(
        group=trajectory.group,
        turns=len(trajectory.turns),
        calls=len(calls),
        reads=None if edited is None else sum(name in READS for name in calls[:edited]),
        tests=calls.count("run_tests"),
        lint=None if all(linted) else linted[-1],
    )


Panel = Callable[[Bus, str, int], Awaitable[Any]]
PANELS: Mapping[str, Panel] = {"regions": regions, "gate": gate, "leases": leases, "behaviour": behaviour}
"""By the name under which the page asks for them."""
