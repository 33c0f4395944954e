"""The readiness ledger: the version that each replica serves, and the newest version that each node has staged.

The idea: receivers and rollout actors publish WeightsStaged and WeightsSwapped on HR_EVENT, and the stream stamps the
time. The ledger is computed from these messages alone, so curriculum, trainer and operators agree, no second record can
disagree with the first, and earlier moments can be queried too. A replica's region is that of its node.

Trade-off: a replica that died keeps its last version here; a caller that needs the live replicas reads HR_PRESENCE and
passes their names.
"""

from collections.abc import AsyncIterator, Container
from typing import Any, Protocol

import msgspec

from headrace.messages.base import Message
from headrace.messages.subjects import EVENT
from headrace.messages.weights import WeightsStaged, WeightsSwapped

STREAM = "HR_EVENT"


class Stored(Protocol):
    """A message in a stream."""

    @property
    def message(self) -> Any:
        """The decoded message."""

    @property
    def time(self) -> float:
        """When it was stored, in seconds since the epoch."""


class StreamSource(Protocol):
    """The part of a bus that the ledger needs."""

    def history(self, stream: str, *filters: str, start: int = 1) -> AsyncIterator[Stored]:
        """All messages on the filters so far, in order."""

    def follow(self, stream: str, *filters: str, start: int = 1) -> AsyncIterator[Stored]:
        """History, then live."""


class NodeCopy(msgspec.Struct, frozen=True, kw_only=True):
    """A node's newest verified file."""

    node: str
    region: str
    version: int
    state_hash: str
    since: float
    """Seconds since the epoch."""
    stage_s: float


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """An engine and the version that it serves as `latest`."""

    replica: str
    node: str
    region: str
    """Empty when its node never staged a version."""
    version: int
    state_hash: str
    since: float
    """Seconds since the epoch."""
    pause_ms: float


class ReadinessLedger:
    """The state after the messages so far; `hear` gets them in stream order."""

    def __init__(self) -> None:
        self.copies: dict[str, NodeCopy] = {}
        """By node."""
        self._swaps: dict[str, tuple[WeightsSwapped, float]] = {}

    def hear(self, message: Message, time: float) -> bool:
        """Apply one message, stored at `time` (seconds since the epoch). True when the ledger changed."""
        if isinstance(message, WeightsStaged):
            earlier = self.copies.get(message.node)
            # An evaluation may pin an old version, which is then staged again; the node still holds the newer one.
            if earlier is not None and message.version < earlier.version:
                return False
            same = earlier is not None and (earlier.version, earlier.state_hash) == (
                message.version,
                message.state_hash,
            )
            self.copies[message.node] = NodeCopy(
                node=message.node,
                region=message.region,
                version=message.version,
                state_hash=message.state_hash,
                since=earlier.since if same and earlier is not None else time,
                stage_s=earlier.stage_s if same and earlier is not None else message.stage_s,
            )
            return not same
        if isinstance(message, WeightsSwapped):
            before = self._swaps.get(message.rollout)
            if before is not None and _served(before[0]) == _served(message):
                return False
            self._swaps[message.rollout] = (message, time)
            return True
        return False

    def replicas(self) -> list[Replica]:
        """Every replica that ever served, by region and name."""
        out = []
        for name, (swap, since) in self._swaps.items():
            copy = self.copies.get(swap.node)
            out.append(
                Replica(
                    replica=name,
                    node=swap.node,
                    region=copy.region if copy is not None else "",
                    version=swap.version,
                    state_hash=swap.state_hash,
                    since=since,
                    pause_ms=swap.pause_ms,
                )
            )
        return sorted(out, key=lambda replica: (replica.region, replica.replica))

    def oldest(self, alive: Container[str] | None = None) -> int | None:
        """The oldest version that a replica serves, among those in `alive` when it is given. None without replicas."""
        return min((r.version for r in self.replicas() if alive is None or r.replica in alive), default=None)

    def regions(self) -> list[str]:
        """Names of all regions."""
        return sorted({copy.region for copy in self.copies.values()} | {r.region for r in self.replicas()})


class Laggards:
    """Finds replicas that have served an older version than required for `patience_s` seconds. Each is reported once
    until it catches up."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._since: dict[str, float] = {}
        self._told: set[str] = set()

    def overdue(self, ledger: ReadinessLedger, alive: Container[str], wanted: int, now: float) -> list[Replica]:
        """The replicas to report now, of those in `alive`. wanted: the required version; now: seconds on any one
        clock."""
        behind = [replica for replica in ledger.replicas() if replica.version < wanted and replica.replica in alive]
        self._since = {replica.replica: self._since.get(replica.replica, now) for replica in behind}
        self._told.intersection_update(self._since)
        late = [replica for replica in behind if now - self._since[replica.replica] >= self._patience_s]
        late = [replica for replica in late if replica.replica not in self._told]
        self._told.update(replica.replica for replica in late)
        return late


def _served(swap: WeightsSwapped) -> tuple[str, int, str]:
    return swap.node, swap.version, swap.state_hash


def _filters(run: str) -> list[str]:
    return [EVENT.where(run=run, type=kind.type_name) for kind in (WeightsStaged, WeightsSwapped)]


async def read(source: StreamSource, run: str) -> ReadinessLedger:
    """The ledger as of now."""
    ledger = ReadinessLedger()
    async for stored in source.history(STREAM, *_filters(run)):
        ledger.hear(stored.message, stored.time)
    return ledger


async def follow(source: StreamSource, run: str) -> AsyncIterator[ReadinessLedger]:
    """Yields the ledger after every change, from the first message on, without end. It is one object."""
    ledger = ReadinessLedger()
    async for stored in source.follow(STREAM, *_filters(run)):
        if ledger.hear(stored.message, stored.time):
            yield ledger
