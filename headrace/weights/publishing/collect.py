"""Garbage collection of HR_WEIGHTS: removes the versions that no joiner needs.

The idea: a joiner starts at the newest full snapshot or, where deltas are cheaper, at the file that it has. So the
newest few chains (a full snapshot and the deltas after it) stay complete, together with every version that an
evaluation or a promotion has pinned and every version that a pinned one is built from. Older versions are removed one
by one, oldest first. Head records stay: they are small, and they are the chain's log.

A joiner reads the newest head and plans with the manifests on its path. A concurrent collection removes only versions
that are at least one whole chain behind; a joiner whose plan needs a removed message plans again.

`[weights] collect_chains` makes the trainer, the only role that may purge, collect whenever a full snapshot was
published. Steps are replayed from checkpoints and need no chain.

Chunks are smaller than a message may be. A manifest of many tensors or blocks is not: it is a claim check, whose
payload in HR_BLOB goes with it.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Protocol

from headrace.messages import subjects
from headrace.messages.weights import WeightHead
from headrace.weights import chain, heads
from headrace.weights.pins import Pins
from headrace.weights.signing import Trust
from headrace.weights.state import WeightError

LEAST = 2
"""Smallest number of chains to keep: the one that new joiners use, and the one before it, which current joiners may
use."""

Purge = Callable[[str], Awaitable[int]]
"""Removes all messages of HR_WEIGHTS on a subject filter; returns their number."""


class CollectedStreams(chain.StreamSource, Protocol):
    """The part of a bus that `follow` needs."""

    def follow(self, stream: str, *filters: str, start: int = 1) -> AsyncIterator[chain.StoredRecord]:
        """History, then live."""


async def pinned(source: chain.StreamSource, run: str) -> set[int]:
    """The versions that the newest promotion or an open evaluation names."""
    pins = Pins(run)
    async for stored in source.history("HR_EVENT", *pins.filters):
        pins.take(stored.message)
    return set(pins.versions)


async def follow(
    source: CollectedStreams,
    purge: Purge,
    run: str,
    *,
    chains: int,
    trust: Trust | None = None,
    purge_manifests: Purge | None = None,
) -> AsyncIterator[dict[int, int]]:
    """Collect at the start and whenever heads name another full snapshot, without end. purge_manifests: as in
    `collect`.

    Yields version to number of removed messages, once per collection that removed any.
    """
    where = subjects.WEIGHT_HEAD.at(run=run)
    last = await source.last(chain.STREAM, where)
    full: object = None
    done: set[int] = set()
    async for stored in source.follow(chain.STREAM, where, start=last.seq if last is not None else 1):
        try:
            head = stored.message
        except (ValueError, LookupError):
            continue
        if isinstance(head, WeightHead) and head.full_seq != full:
            full = head.full_seq
            pins = await pinned(source, run)
            gone = await collect(
                source,
                purge,
                run,
                chains=chains,
                pins=pins,
                trust=trust,
                done=done,
                purge_manifests=purge_manifests,
            )
            if gone:
                yield gone


async def collect(
    source: chain.StreamSource,
    purge: Purge,
    run: str,
    *,
    chains: int = 3,
    pins: Iterable[int] = (),
    trust: Trust | None = None,
    done: set[int] | None = None,
    purge_manifests: Purge | None = None,
) -> dict[int, int]:
    """Remove the versions that neither the newest `chains` chains nor a pin needs. Version to number of messages
    removed.

    done: versions that are gone and need no purge; this function adds to it. purge_manifests: as `purge`, and removes
    the payloads of claim checks (`bus.payloads.retention`); None: `purge`. WeightError for fewer than `LEAST` chains.
    """
    done = set() if done is None else done
    if chains < LEAST:
        raise WeightError(
            f"expected at least {LEAST} chains to keep, got {chains}: joiners may still read the last but one"
        )
    commits: list[WeightHead] = []
    async for _, head in heads.counting(source, heads.Heads(run, trust)):
        commits.append(head)
    full_snapshots = sorted({head.full_version for head in commits})
    if len(full_snapshots) <= chains:
        return {}
    floor = full_snapshots[-chains]
    pinned = await _pinned(source, commits, frozenset(pins), trust)
    out: dict[int, int] = {}
    # A sender that died may have left chunks of a version that no head committed.
    for version in range(min(head.version for head in commits), floor):
        if version not in pinned and version not in done:
            gone = await purge(subjects.WEIGHT_CHUNK.where(run=run, version=version, shard="*"))
            gone += await (purge_manifests or purge)(subjects.WEIGHT_MANIFEST.where(run=run, version=version))
            done.add(version)
            if gone:
                out[version] = gone
    return out


async def _pinned(
    source: chain.StreamSource, commits: list[WeightHead], pins: frozenset[int], trust: Trust | None
) -> set[int]:
    """The pinned versions and those that they are built from. A pinned version that cannot be built keeps none."""
    pinned: set[int] = set()
    for head in commits:
        if head.version in pins:
            try:
                way = await chain.plan(source, head, trust=trust)
            except WeightError:
                continue
            pinned |= {manifest.version for manifest in way.manifests}
    return pinned
