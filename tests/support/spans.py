"""Spans that a trace store or a receiver holds, and the way from a user's rating to a region through them."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Seen(NamedTuple):
    """A span: ids in lower-case hex; a link is the ids of a trace and a span."""

    name: str
    trace: str
    id: str
    parent: str
    links: tuple[tuple[str, str], ...]
    attributes: Mapping[str, str]


def received(span: Span) -> Seen:
    """A span as a collector gets it."""
    return Seen(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
        {each.key: each.value.string_value or str(each.value.int_value) for each in span.attributes},
    )


def orphans(spans: Iterable[Seen]) -> list[str]:
    """Names of the spans whose parent, or the other end of one of whose links, is not there."""
    there = {(span.trace, span.id) for span in spans}
    wanted = ((span, (span.trace, span.parent)) for span in spans if span.parent)
    linked = ((span, link) for span in spans for link in span.links)
    return [f"{span.name} -> {end}" for span, end in (*wanted, *linked) if end not in there]


class Way(NamedTuple):
    """The way of one rating: each part is reached from the one before by a link or inside one trace."""

    rating: Seen
    session: Seen
    """The span that published the user's trajectory."""
    step: Seen
    version: Seen
    regions: tuple[str, ...]


def ways(spans: Iterable[Seen]) -> list[Way]:
    """The way of every rating that was trained on and whose version reached a region."""
    there = {(span.trace, span.id): span for span in spans}
    rated_ways = []
    for place in (span for span in there.values() if span.name == "place rating"):
        ends = [there[link] for link in place.links]
        rating = next(span for span in ends if span.name.startswith("send hr.feedback."))
        session = next(span for span in ends if span.name.startswith("send hr.traj."))
        copies = {(span.trace, span.id) for span in there.values() if span.trace == place.trace}
        for step in (span for span in there.values() if span.name == "train step" and copies & {*span.links}):
            for version in (span for span in there.values() if span.name == "weight version"):
                if step.trace not in {trace for trace, _ in version.links}:
                    continue
                staged = [s for s in there.values() if s.trace == version.trace and s.name == "stage version"]
                regions = tuple(span.attributes["hr.region"] for span in staged)
                if regions:
                    rated_ways.append(Way(rating, session, step, version, regions))
    return rated_ways
