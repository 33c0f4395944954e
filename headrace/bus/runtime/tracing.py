"""W3C trace context in every message, spans by OpenTelemetry's messaging conventions, and OTLP where an endpoint is
configured.

The idea: only the context is always on, a trace id and a span id in a context variable and in the lower-case
``traceparent`` header; that costs about a microsecond. Spans are made by the OpenTelemetry SDK (37 us each) only when
`configure` was given an endpoint, and only then is the SDK imported. A process span continues the producer's trace, one
message to one span; a trainer's step is a trace of its own with one link per trajectory.
"""

import contextlib
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from headrace.bus.nats.addressing import family_of
from headrace.bus.nats.received import Received

HEADER = "traceparent"
SCHEMA = "https://opentelemetry.io/schemas/1.44.0"
"""The conventions that the names of spans and attributes follow, messaging and GenAI."""
Value = str | int | float | bool | Sequence[str]
"""An attribute's value."""
_PARENT = re.compile(r"^00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})$")

Kind = Literal["internal", "producer", "consumer", "client", "server"]


class TraceContext(NamedTuple):
    """A position in a trace: ids in lower-case hex."""

    trace_id: str
    span_id: str


class Link(NamedTuple):
    """Another span that this one was caused by, with attributes."""

    context: TraceContext
    attributes: Mapping[str, str | int]


_current: ContextVar[TraceContext | None] = ContextVar("headrace_trace", default=None)
_random = random.Random()
_tracer: Any = None
_provider: Any = None


def current() -> TraceContext | None:
    """The context that a message published now would carry."""
    return _current.get()


def inject(headers: dict[str, str]) -> None:
    """Write the current context, or a new trace, into headers. The last flag says whether its span is exported."""
    context = _current.get()
    exported = int(_tracer is not None and context is not None)
    if context is None:
        context = TraceContext(f"{_random.getrandbits(128):032x}", f"{_random.getrandbits(64):016x}")
    headers[HEADER] = f"00-{context.trace_id}-{context.span_id}-0{exported}"


def extract(headers: Mapping[str, str]) -> TraceContext | None:
    """The context that a message carries; None when it has none or a malformed one."""
    match = _PARENT.match(headers.get(HEADER, ""))
    return TraceContext(match[1], match[2]) if match else None


def exported(headers: Mapping[str, str]) -> TraceContext | None:
    """`extract` for spans that are exported: None where the publisher exported none, because its ids lead nowhere."""
    return extract(headers) if headers.get(HEADER, "").endswith("1") else None


def link(received: Received[Any]) -> Link | None:
    """A link to the span that published a message; None when its publisher exported none."""
    context = exported(received.headers)
    return Link(context, {"messaging.destination.name": received.subject, "hr.seq": received.seq}) if context else None


class TraceSpan:
    """A span in work. Without an exporter it only carries ids."""

    __slots__ = ("_span", "context")

    def __init__(self, context: TraceContext, span: Any = None) -> None:
        self.context, self._span = context, span

    def set(self, **attributes: Value) -> None:
        """Add attributes."""
        if self._span is not None:
            self._span.set_attributes(attributes)

    def event(self, name: str, **attributes: str | int | float | bool) -> None:
        """Add an event at this moment."""
        if self._span is not None:
            self._span.add_event(name, attributes)

    def fail(self, error: BaseException) -> None:
        """Mark the span as failed."""
        if self._span is not None:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))


_NO_SPAN = TraceSpan(TraceContext("0" * 32, "0" * 16))


def here() -> TraceSpan:
    """The innermost open span, for attributes and events; a silent one when nothing is exported."""
    return _open.get()


_open: ContextVar[TraceSpan] = ContextVar("headrace_span", default=_NO_SPAN)


@contextlib.contextmanager
def span(
    name: str,
    kind: Kind = "internal",
    *,
    parent: TraceContext | None = None,
    root: bool = False,
    links: Sequence[Link | None] = (),
    attributes: Mapping[str, Value] | None = None,
) -> Iterator[TraceSpan]:
    """A span around a block: below `parent`, or below the current one, or (`root`) the first of a new trace."""
    above = None if root else parent or _current.get()
    if _tracer is None:
        trace_id = above.trace_id if above else f"{_random.getrandbits(128):032x}"
        made = TraceSpan(TraceContext(trace_id, f"{_random.getrandbits(64):016x}"))
    else:
        made = _start(name, kind, above, links, attributes or {})
    token, opened = _current.set(made.context), _open.set(made)
    try:
        yield made
    except BaseException as error:
        made.fail(error)
        raise
    finally:
        _open.reset(opened)
        _current.reset(token)
        if made._span is not None:
            made._span.end()


def _start(
    name: str, kind: Kind, above: TraceContext | None, links: Sequence[Link | None], attributes: Mapping[str, Any]
) -> TraceSpan:
    from opentelemetry import trace

    def remote(context: TraceContext) -> trace.SpanContext:
        flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
        return trace.SpanContext(int(context.trace_id, 16), int(context.span_id, 16), True, flags)

    empty = trace.set_span_in_context(trace.INVALID_SPAN)
    where = trace.set_span_in_context(trace.NonRecordingSpan(remote(above))) if above else empty
    made = _tracer.start_span(
        name,
        context=where,
        kind=trace.SpanKind[kind.upper()],
        links=[trace.Link(remote(each.context), dict(each.attributes)) for each in links if each is not None],
        attributes=dict(attributes),
    )
    context = made.get_span_context()
    return TraceSpan(TraceContext(f"{context.trace_id:032x}", f"{context.span_id:016x}"), made)


@contextlib.contextmanager
def sending(subject: str, msg_id: str, size: int) -> Iterator[TraceSpan | None]:
    """PRODUCER span around a publish; nothing when no span is exported."""
    if _tracer is None:
        yield None
        return
    attributes: dict[str, str | int] = {
        "messaging.system": "nats",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": subject,
        "messaging.destination.template": template(subject),
        "messaging.message.body.size": size,
    }
    if msg_id:
        attributes["messaging.message.id"] = msg_id
    with span(f"send {template(subject)}", "producer", attributes=attributes) as made:
        yield made


@contextlib.contextmanager
def processing(
    subject: str, headers: Mapping[str, str], consumer: str = "", deliveries: int = 0
) -> Iterator[TraceSpan]:
    """CONSUMER span around a handler: it continues the trace of the publisher of the message."""
    parent = extract(headers) if _tracer is None else exported(headers)
    if _tracer is None:
        with span("", parent=parent, root=parent is None) as made:
            yield made
        return
    attributes: dict[str, str | int] = {
        "messaging.system": "nats",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": subject,
        "messaging.destination.template": template(subject),
    }
    if consumer:
        attributes |= {"messaging.consumer.group.name": consumer, "hr.deliveries": deliveries}
    name = f"process {template(subject)}"
    with span(name, "consumer", parent=parent, root=parent is None, attributes=attributes) as made:
        yield made


@lru_cache(4096)
def template(subject: str) -> str:
    """The family that a concrete subject belongs to, such as ``hr.traj.{run}.{group}``; else its first two tokens."""
    family = family_of(subject)
    return family.template if family is not None else ".".join([*subject.split(".")[:2], "*"])


def configure(endpoint: str, **resource: str) -> None:
    """Export spans of this process by OTLP/HTTP to an endpoint such as ``http://127.0.0.1:4318``; "" for none."""
    global _tracer, _provider
    shutdown()
    if not endpoint:
        return
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    url = endpoint.rstrip("/")
    if not url.endswith("/v1/traces"):
        url += "/v1/traces"
    attributes = {"service.name": "headrace", **{key.replace("_", "."): value for key, value in resource.items()}}
    _provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
    _provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url, timeout=5)))
    _tracer = _provider.get_tracer("headrace", schema_url=SCHEMA)


def flush(timeout: float = 5.0) -> None:
    """Export the pending spans."""
    if _provider is not None:
        _provider.force_flush(int(timeout * 1000))


def shutdown() -> None:
    """Export the pending spans and stop exporting."""
    global _tracer, _provider
    if _provider is not None:
        _provider.shutdown()
    _tracer = _provider = None
