"""Whose requests a server runs, from its Prometheus page: what the scavenger must know before it lends the server.

Idea: a product's own front end may use the same server beside headrace, and asks no actor of ours. With priority
scheduling the server counts its requests by priority, headrace's have priorities that nobody else uses, and what is
left of the total is somebody else's. The same priorities make the server itself put training behind: a request of the
product that finds no free capacity has a training one retracted at once, before anybody decides anything.

Trade-off: the gauges are written every --decode-log-interval steps and when the server becomes idle, so they lag by so
many steps; a server without priority scheduling cannot tell whose its requests are, and its figures are not used.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from headrace.messages.rollout import Lane

PRIORITY: Mapping[Lane, int] = {"production": 1, "eval": -100, "train": -100}
"""Of our requests. Others have the server's default, 0: more than its preemption threshold (10) above training, and
less than that below our production."""
RUNNING, QUEUED, DONE = "sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:num_requests_total"
_WANTED = re.compile(rf"^(?:# (?:TYPE|HELP) )?(?:{RUNNING}|{QUEUED}|{DONE})[ {{].*$", re.MULTILINE)
"""The page has a thousand lines, mostly buckets; parsing all of them every second would be most of the work."""


class Requests(NamedTuple):
    """Requests in a server, or of a share of its users."""

    running: int = 0
    queued: int = 0
    done: int = 0
    """Since the server started."""


def by_priority(page: str) -> dict[str, Requests]:
    """Requests by the label `priority`, summed over ranks; under "" those of all priorities together.

    Finished requests are counted by priority alone. ValueError: not a Prometheus page.
    """
    found: dict[str, dict[str, int]] = {}
    for family in text_string_to_metric_families("\n".join(_WANTED.findall(page)) + "\n"):
        for sample in family.samples:
            counts = found.setdefault(sample.labels.get("priority", ""), {})
            counts[sample.name] = counts.get(sample.name, 0) + round(sample.value)
    return {
        label: Requests(counts.get(RUNNING, 0), counts.get(QUEUED, 0), counts.get(DONE, 0))
        for label, counts in found.items()
    }


def outside(page: str) -> Requests:
    """Requests that headrace did not send, of a server with priority scheduling."""
    counts = by_priority(page)
    ours = [counts.get(str(priority), Requests()) for priority in set(PRIORITY.values())]
    others = [one for label, one in counts.items() if label and label not in map(str, PRIORITY.values())]
    whole = counts.get("", Requests())
    return Requests(
        max(0, whole.running - sum(one.running for one in ours)),
        max(0, whole.queued - sum(one.queued for one in ours)),
        sum(one.done for one in others),
    )
