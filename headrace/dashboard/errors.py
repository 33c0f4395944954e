"""The error events of a run: how many of each kind, and the text of the first ones, tracebacks included."""

from collections import Counter

from headrace.dashboard.hypertext import escape
from headrace.dashboard.watch import Watch
from headrace.messages.operations import Event

_SHOWN = 20
"""Events that are shown with their text."""


def counts(watch: Watch) -> dict[str, int]:
    """Number of error events by ``actor: kind``, most frequent first."""
    counted = Counter(f"{event.actor}: {event.kind}" for event in _errors(watch))
    return dict(counted.most_common())


def section(watch: Watch) -> str:
    """The first error event of each kind, then further ones, as HTML."""
    events = _errors(watch)
    first: dict[tuple[str, str], Event] = {}
    rest: list[Event] = []
    for event in events:
        if first.setdefault((event.actor, event.kind), event) is not event:
            rest.append(event)
    shown = [*first.values(), *rest][:_SHOWN]
    entries = "".join(
        f"<h3>{escape(event.actor)}: {escape(event.kind)}</h3><pre class='bad'>{escape(event.text)}</pre>"
        for event in shown
    )
    more = f"<p>{len(events) - len(shown)} more.</p>" if len(events) > len(shown) else ""
    return entries + more or "<p>None.</p>"


def _errors(watch: Watch) -> list[Event]:
    return [event for _, event in watch.events if event.level == "error"]
