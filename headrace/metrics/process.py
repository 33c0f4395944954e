"""The metrics of this process, in one Prometheus registry: deliveries, publications, events and figures of its actors.

The bus calls these functions; they cost about a microsecond each and never raise when no server reads them.
`headrace.metrics.exposition` serves `registry`.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from headrace.metrics.figures import Figure, figure_of

registry = CollectorRegistry(auto_describe=False)
ProcessCollector(registry=registry)  # process_cpu_seconds_total, process_resident_memory_bytes, ...

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)

_handled = Histogram(
    "headrace_delivery_seconds",
    "Time from a delivery to its settlement, by stream and by how it ended.",
    ("stream", "outcome"),
    buckets=_SECONDS,
    registry=registry,
)
_published = Histogram(
    "headrace_publish_seconds",
    "Time until the broker stored a message, by family of subjects.",
    ("family",),
    buckets=_SECONDS,
    registry=registry,
)
_bytes = Counter("headrace_published_bytes", "Payload bytes stored, by family.", ("family",), registry=registry)
_events = Counter("headrace_events", "Events, by actor, kind and level.", ("actor", "kind", "level"), registry=registry)
_restarts = Counter("headrace_actor_restarts", "Actors that failed and started again.", ("actor",), registry=registry)
_unlisted = Counter(
    "headrace_unlisted_figures", "Figures without a metric, by name.", ("actor", "figure"), registry=registry
)
_busy = Gauge(
    "headrace_actor_busy_ratio", "Share of the last interval in which the actor worked.", ("actor",), registry=registry
)
_gpus = Gauge("headrace_gpus", "GPUs of this machine that the driver answers for.", registry=registry)


def gpus(count: int) -> None:
    """The GPUs of this machine that its driver answers for."""
    _gpus.set(count)


def delivered(stream: str, outcome: str, seconds: float) -> None:
    """A delivery was settled: handled, retried, rejected or handed back."""
    _handled.labels(stream, outcome).observe(seconds)


def published(family: str, size: int, seconds: float) -> None:
    """A message was stored."""
    times, sizes = _of_family(family)
    times.observe(seconds)
    sizes.inc(size)


@cache
def _of_family(family: str) -> tuple[Histogram, Counter]:
    return _published.labels(family), _bytes.labels(family)


def event(actor: str, kind: str, level: str) -> None:
    """An actor published an event."""
    _events.labels(actor, kind, level).inc()


def restarted(actor: str) -> None:
    """An actor failed and is started again."""
    _restarts.labels(actor).inc()


def busy(actor: str, share: float) -> None:
    """The share of the last heartbeat's interval in which an actor worked."""
    _busy.labels(actor).set(share)


class _Figures(Collector):
    """The newest figures of this process's actors."""

    def __init__(self) -> None:
        self.values: dict[Figure, dict[str, float]] = defaultdict(dict)

    def collect(self) -> Iterable[Metric]:
        """A family per figure; `list` first, because another thread reads while actors write."""
        for figure, by_actor in list(self.values.items()):
            values = list(by_actor.values())
            total = _merged(figure, values) * figure.scale
            family = CounterMetricFamily if figure.kind == "counter" else GaugeMetricFamily
            yield family(figure.name, figure.help, value=total)


def _merged(figure: Figure, values: list[float]) -> float:
    if figure.merge == "sum":
        return sum(values)
    return min(values) if figure.merge == "min" else max(values)


_figures = _Figures()
registry.register(_figures)


def figures(actor: str, id: str, values: Mapping[str, float]) -> None:
    """The newest figures of one actor. A figure that `headrace.metrics.figures` does not list is only counted, by
    name, because a missing metric must not end an actor; tests/metrics/test_process.py finds such a figure."""
    for name, value in values.items():
        try:
            figure = figure_of(actor, name)
        except KeyError:
            _unlisted.labels(actor, name).inc()
            continue
        _figures.values[figure][id] = float(value)


def ended(id: str) -> None:
    """Drop the gauges of an actor that ended, because they are no longer true; keep its counters."""
    for figure, by_actor in list(_figures.values.items()):
        if figure.kind == "gauge" and by_actor.pop(id, None) is not None and not by_actor:
            del _figures.values[figure]
