"""The double's scheduling by priority, and the Prometheus page that shows it: as seen on SGLang 0.5.23 with
--enable-priority-scheduling --default-priority-value 0. (The real gauges lag by --decode-log-interval steps.)"""

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.sglang.double import Double

THRESHOLD = 10
LABELS = 'engine_type="unified",model_name="{model}",moe_ep_rank="0",pp_rank="0",priority="{priority}",tp_rank="0"'


def admit(double: "Double") -> None:
    """Fill the places by priority, then by arrival; a running request that is more than the threshold below one without
    a place gives it up, and is forwarded again later."""
    double.queue.sort(key=lambda one: -one.priority)
    while double.queue:
        if len(double.running) >= double.max_running:
            least = min(double.running, key=lambda one: one.priority)
            if double.queue[0].priority - least.priority <= THRESHOLD:
                return
            double.running.remove(least)
            least.retract()
            double.queue.append(least)
        double.running.append(double.queue.pop(0))


def page(double: "Double") -> str:
    """The page at /metrics, as far as anybody here reads it."""
    lines = [
        "# HELP sglang:num_requests_total Number of requests processed.",
        "# TYPE sglang:num_requests_total counter",
    ]
    for priority, count in double.done.items():
        labels = f'engine_type="unified",is_streaming="true",model_name="{double.model_path}",priority="{priority}"'
        lines.append(f"sglang:num_requests_total{{{labels}}} {float(count)}")
    for name, what, inside in (("running", "running", double.running), ("queue", "waiting", double.queue)):
        counts = Counter(str(one.priority) for one in inside)
        lines += [
            f"# HELP sglang:num_{name}_reqs The number of {what} requests.",
            f"# TYPE sglang:num_{name}_reqs gauge",
        ]
        for priority in ("", *sorted(double.priorities)):
            labels = LABELS.format(model=double.model_path, priority=priority)
            value = counts[priority] if priority else len(inside)
            lines.append(f"sglang:num_{name}_reqs{{{labels}}} {float(value)}")
    return "\n".join(lines) + "\n"
