"""Garbage collection of HR_WEIGHTS: versions that no joiner can need any more are removed.

The idea: a joiner starts at the newest full snapshot, or, where deltas are cheaper, at the file that it has. So the
newest few chains (a full snapshot and the deltas after it) stay whole, and with them every version that an evaluation
or a promotion has pinned, with every version that it is built from. Older versions are removed one by one, oldest
first, so that the rest is always a whole tail. Head records and squash records stay: they are small, and they are the
chain's log.

A joiner reads the newest head and plans with the manifests that it names. A concurrent collection removes only versions
that are at least one whole chain behind; a joiner that planned for an older one finds a message gone and plans again.

`[weights] collect_chains` lets the trainer, the only role that may purge, do this whenever a full snapshot was
published. Steps are replayed from checkpoints and need no chain. Blobs are never removed, because no version refers to
one.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Protocol

from headrace.messages import subjects
from headrace.messages.evaluation import EvalRequest, EvalResult
from headrace.messages.product import Promotion
from headrace.messages.weights import WeightHead
from headrace.weights import chain, heads
from headrace.weights.signing import Trust
from headrace.weights.state import WeightError

LEAST = 2
"""Smallest number of chains that stay: the one that new joiners use, and the one before it, which current joiners may
use."""

Purge = Callable[[str], Awaitable[int]]
"""Remove all messages of HR_WEIGHTS on a filter; how many."""


class StreamSource(chain.StreamSource, Protocol):
    """The part of a bus that `follow` needs."""

    def follow(self, stream: str, *filters: str, start: int = 1) -> AsyncIterator[chain.Stored]:
        """History, then live."""


async def pinned(source: chain.StreamSource, run: str) -> set[int]:
    """Versions that a promotion or an open evaluation names."""
    asked: dict[str, int] = {}
    kinds = (EvalRequest.type_name, EvalResult.type_name, Promotion.type_name)
    async for stored in source.history("HR_EVENT", *(subjects.EVENT.where(run=run, type=kind) for kind in kinds)):
        message = stored.message
        if isinstance(message, EvalRequest) and message.policy.kind == "pinned":
            asked[message.id] = message.policy.version
        elif isinstance(message, EvalResult):
            asked.pop(message.id, None)
        elif isinstance(message, Promotion):
            asked["promotion"] = message.version
    return set(asked.values())


async def follow(
    source: StreamSource, purge: Purge, run: str, *, chains: int, trust: Trust | None = None
) -> AsyncIterator[dict[int, int]]:
    """Collect at the start and whenever heads name another full snapshot, for ever; yields what was removed each time.

    At that moment a chain falls behind the newest `chains`; until then there is nothing new to collect.
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
            gone = await collect(source, purge, run, chains=chains, pins=pins, trust=trust, done=done)
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
) -> dict[int, int]:
    """Remove the versions that no newest `chains` chains and no pin needs. Version to number of messages removed.

    done: versions known to be gone, which are not asked for again; it grows. WeightError for fewer than `LEAST` chains.
    """
    done = set() if done is None else done
    if chains < LEAST:
        raise WeightError(f"at least {LEAST} chains stay, not {chains}: joiners may still read the last but one")
    commits: list[WeightHead] = []
    async for _, head in heads.counting(source, heads.Heads(run, trust)):
        commits.append(head)
    full_snapshots = sorted({head.full_version for head in commits})
    if len(full_snapshots) <= chains:
        return {}
    floor = full_snapshots[-chains]
    kept = await _pinned(source, commits, frozenset(pins), trust)
    out: dict[int, int] = {}
    # Numbers between committed ones may hold chunks of a sender that died.
    for version in range(min(head.version for head in commits), floor):
        if version not in kept and version not in done:
            gone = await purge(subjects.WEIGHT_CHUNK.where(run=run, version=version, shard="*"))
            gone += await purge(subjects.WEIGHT_MANIFEST.where(run=run, version=version))
            done.add(version)
            if gone:
                out[version] = gone
    return out


async def _pinned(
    source: chain.StreamSource, commits: list[WeightHead], pins: frozenset[int], trust: Trust | None
) -> set[int]:
    """The versions that pinned ones are built from. A pinned version that cannot be built any more keeps none."""
    kept: set[int] = set()
    for head in commits:
        if head.version in pins:
            try:
                way = await chain.plan(source, head, trust=trust, squashed=False)
            except WeightError:
                continue
            kept |= {manifest.version for manifest in way.manifests}
    return kept
