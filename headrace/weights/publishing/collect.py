"""Garbage collection of HR_WEIGHTS: what no joiner can need any more goes, and nobody is surprised.

The idea: a joiner starts at the newest anchor, or, where deltas are cheaper, at the file that it has. So the newest few
chains (an anchor and the deltas after it) stay whole, and with them every version that an evaluation or a promotion has
pinned, with all that it is built from. What lies before goes version by version, oldest first, so that what is left is
always a whole tail. Head records and folds stay: they are small, and they are the chain's log.

A joiner reads the newest head, and plans with what that names: a collection that runs beside it takes only what lies at
least one whole chain behind. One that was planning for something older finds a message gone and looks for another way.

`[weights] collect_chains` lets the trainer, whom alone the broker lets purge, do this whenever an anchor was laid.
Steps are replayed from checkpoints and need no chain. Blobs are never touched: no version names any.
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
"""Chains that stay at least: the one that joiners take, and the one that those take who began before it."""

Purge = Callable[[str], Awaitable[int]]
"""Remove all messages of HR_WEIGHTS on a filter; how many."""


class Source(chain.Source, Protocol):
    """What `follow` needs of a bus."""

    def follow(self, stream: str, *filters: str, start: int = 1) -> AsyncIterator[chain.Stored]:
        """History, then live."""


async def pinned(source: chain.Source, run: str) -> set[int]:
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
    source: Source, purge: Purge, run: str, *, chains: int, trust: Trust | None = None
) -> AsyncIterator[dict[int, int]]:
    """Collect at the start and whenever heads name another anchor, for ever; yields what was removed each time.

    That is the moment at which a chain falls behind the newest `chains`; until then there is nothing new to collect.
    """
    where = subjects.WEIGHT_HEAD.at(run=run)
    last = await source.last(chain.STREAM, where)
    anchor: object = None
    done: set[int] = set()
    async for stored in source.follow(chain.STREAM, where, start=last.seq if last is not None else 1):
        try:
            head = stored.message
        except (ValueError, LookupError):
            continue
        if isinstance(head, WeightHead) and head.anchor_seq != anchor:
            anchor = head.anchor_seq
            pins = await pinned(source, run)
            gone = await collect(source, purge, run, chains=chains, pins=pins, trust=trust, done=done)
            if gone:
                yield gone


async def collect(
    source: chain.Source,
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
    anchors = sorted({head.anchor_version for head in commits})
    if len(anchors) <= chains:
        return {}
    floor = anchors[-chains]
    kept = await _pinned(source, commits, frozenset(pins), trust)
    out: dict[int, int] = {}
    # Numbers between committed ones may hold what a sender that died left behind.
    for version in range(min(head.version for head in commits), floor):
        if version not in kept and version not in done:
            gone = await purge(subjects.WEIGHT_CHUNK.where(run=run, version=version, shard="*"))
            gone += await purge(subjects.WEIGHT_MANIFEST.where(run=run, version=version))
            done.add(version)
            if gone:
                out[version] = gone
    return out


async def _pinned(
    source: chain.Source, commits: list[WeightHead], pins: frozenset[int], trust: Trust | None
) -> set[int]:
    """The versions that pinned ones are built from. A pin that cannot be built any more keeps nothing."""
    kept: set[int] = set()
    for head in commits:
        if head.version in pins:
            try:
                way = await chain.plan(source, head, trust=trust, folded=False)
            except WeightError:
                continue
            kept |= {manifest.version for manifest in way.manifests}
    return kept
