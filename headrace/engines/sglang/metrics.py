"""Reads the requests of other clients from a server's Prometheus page; the scavenger needs them before it lends the
server.

Idea: a product's front end may use the same server directly, without any actor. With priority scheduling the server
counts its requests by priority. headrace uses priorities that no other client uses, so the rest of the total is the
load of other clients. The same priorities make the server prefer production: when a request of the product finds no
free capacity, the server retracts a training request at once, before any actor decides.

Trade-off: the server updates the gauges every --decode-log-interval steps and when it becomes idle, so they lag by that
many steps. The requests of a server without priority scheduling cannot be told apart, and its figures are not used.
"""

import re
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from headrace.engines.server.backend import Requests
from headrace.messages.rollout import Lane

PRIORITY: Mapping[Lane, int] = {"production": 1, "eval": -100, "train": -100}
"""Lane to priority. Requests of other clients have the server's default, 0: above training by more than the server's
preemption threshold (10), and below headrace's production by less than that."""
RUNNING, QUEUED, DONE = "sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:num_requests_total"
_WANTED = re.compile(rf"^(?:# (?:TYPE|HELP) )?(?:{RUNNING}|{QUEUED}|{DONE})[ {{].*$", re.MULTILINE)
"""The lines that are parsed: the page has a thousand lines, and parsing all of them every second would cost too
much."""


def by_priority(page: str) -> dict[str, Requests]:
    """Requests by the label `priority`, summed over ranks; under "" the totals over all priorities.

    Finished requests are counted by priority alone. ValueError when this is not a Prometheus page.
    """
    by_label: dict[str, dict[str, int]] = {}
    for family in text_string_to_metric_families("\n".join(_WANTED.findall(page)) + "\n"):
        for sample in family.samples:
            counts = by_label.setdefault(sample.labels.get("priority", ""), {})
            counts[sample.name] = counts.get(sample.name, 0) + round(sample.value)
    return {
        label: Requests(counts.get(RUNNING, 0), counts.get(QUEUED, 0), counts.get(DONE, 0))
        for label, counts in by_label.items()
    }


def outside(page: str) -> Requests:
    """The requests of other clients in a server with priority scheduling."""
    counts = by_priority(page)
    ours = [counts.get(str(priority), Requests()) for priority in set(PRIORITY.values())]
    others = [requests for label, requests in counts.items() if label and label not in map(str, PRIORITY.values())]
    whole = counts.get("", Requests())
    return Requests(
        max(0, whole.running - sum(requests.running for requests in ours)),
        max(0, whole.queued - sum(requests.queued for requests in ours)),
        sum(requests.done for requests in others),
    )
