"""Trace context crosses every hop; spans reach a real OTLP/HTTP collector as the conventions say."""

import asyncio
import http.server
import threading
from collections.abc import Iterator
from secrets import token_hex
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from headrace.bus.nats.received import Received
from headrace.bus.runtime import tracing
from headrace.bus.runtime.actor import Actor
from headrace.config import Config
from headrace.messages import subjects as s
from headrace.messages.base import Message
from headrace.messages.operations import Ack, Event, Ping
from tests.conftest import Connect
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.anyio


class Probe(Actor):
    role = "admin"


def event(text: str) -> Event:
    return Event(actor="a", id="a-1", kind="test", text=text)


async def relay(connect: Connect, run: str) -> tuple[Received[Any], Received[Any], Received[Any]]:
    """One message through an actor that publishes another, then a step that links to both."""
    actor = Probe(Config(), await connect(), run, "p")
    first, second, third = (s.EVENT.at(run=run, actor="admin", type=f"t{n}") for n in (1, 2, 3))
    done = asyncio.Event()

    async def handle(received: Received[Event]) -> None:
        await actor.bus.publish(second, event("two"))
        done.set()

    await actor.consume(s.EVENT, handle, durable=f"d{token_hex(4)}", filter=first)
    await actor.bus.publish(first, event("one"))
    await asyncio.wait_for(done.wait(), PATIENCE_S)
    one, two = [r async for r in actor.bus.history("HR_EVENT", first, second)]
    with tracing.span("train step", root=True, links=[tracing.link(one), tracing.link(two)]):
        seq = await actor.bus.publish(third, event("three"))
    step = await actor.bus.get("HR_EVENT", seq)
    await actor.shut(5)
    return one, two, step


async def test_ids_travel_without_any_exporter(connect: Connect) -> None:
    one, two, step = (tracing.extract(r.headers) for r in await relay(connect, f"r{token_hex(4)}"))
    assert one and two and step
    assert one.trace_id == two.trace_id and one.span_id != two.span_id
    assert step.trace_id != one.trace_id
    assert tracing._tracer is None


async def test_a_request_carries_its_trace_too(connect: Connect) -> None:
    actor, asker = Probe(Config(), await connect("environment"), "r1", "p"), await connect("rollout")
    seen: list[tracing.TraceContext | None] = []

    async def answer(_: Ping) -> Message:
        seen.append(tracing.current())
        return Ack()

    await actor.serve("hr.rpc.environment.rollout.trace", answer)
    with tracing.span("caller") as caller:
        await asker.request("hr.rpc.environment.rollout.trace", Ping())
    assert seen[0] is not None and seen[0].trace_id == caller.context.trace_id
    await actor.shut(5)


def test_malformed_parents_are_ignored() -> None:
    good = f"00-{'a' * 32}-{'b' * 16}-01"
    assert tracing.extract({"traceparent": good}) == tracing.TraceContext("a" * 32, "b" * 16)
    for bad in ("", "00-xyz", good.upper(), good + "-more", good.replace("00-", "ff-", 1)):
        assert tracing.extract({"traceparent": bad}) is None


def test_templates() -> None:
    assert tracing.template("hr.traj.r1.g000001") == "hr.traj.{run}.{group}"
    assert tracing.template("hr.traj.r1.user.g1") == "hr.traj.{run}.{group}"
    assert tracing.template("$KV.HR_LEASE.a.b") == "$KV.HR_LEASE.*"


class Collector(http.server.ThreadingHTTPServer):
    """The receiving side of OTLP/HTTP, decoded with the protocol's own definitions."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.spans: list[Span] = []
        self.services: set[str] = set()


class Handler(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        import gzip

        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        request = ExportTraceServiceRequest.FromString(body)
        assert self.path == "/v1/traces"
        for resource in request.resource_spans:
            names = {a.key: a.value.string_value for a in resource.resource.attributes}
            self.server.services.add(names["service.name"])
            for scope in resource.scope_spans:
                self.server.spans.extend(scope.spans)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        return None


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        tracing.configure(f"http://127.0.0.1:{made.server_port}", service_name="headrace-test")
        yield made
        tracing.shutdown()
        made.shutdown()
        thread.join()


async def test_spans_reach_a_collector_with_kinds_parents_and_links(connect: Connect, collector: Collector) -> None:
    run = f"r{token_hex(4)}"
    one, two, step = await relay(connect, run)
    await asyncio.to_thread(tracing.shutdown)
    spans = {span.span_id.hex(): span for span in collector.spans}
    at = {name: tracing.extract(received.headers) for name, received in {"one": one, "two": two, "step": step}.items()}
    assert at["one"] and at["two"] and at["step"]
    sent_one, sent_two, sent_step = (spans[context.span_id] for context in at.values() if context)
    assert sent_one.kind == sent_two.kind == Span.SPAN_KIND_PRODUCER
    assert sent_one.name == "send hr.event.{run}.{actor}.{type}"
    process = spans[sent_two.parent_span_id.hex()]
    assert process.kind == Span.SPAN_KIND_CONSUMER and process.name == "process hr.event.{run}.{actor}.{type}"
    assert process.parent_span_id == sent_one.span_id and process.trace_id == sent_one.trace_id
    attributes = {a.key: a.value.string_value for a in process.attributes}
    assert attributes["messaging.system"] == "nats" and attributes["messaging.operation.type"] == "process"
    train = spans[sent_step.parent_span_id.hex()]
    assert train.name == "train step" and not train.parent_span_id
    assert [link.span_id for link in train.links] == [sent_one.span_id, sent_two.span_id]
    ids = {span.span_id for span in spans.values()}
    spans_here = [span for span in spans.values() if span.trace_id in (sent_one.trace_id, train.trace_id)]
    assert all(not span.parent_span_id or span.parent_span_id in ids for span in spans_here), "no orphans"
    assert collector.services == {"headrace-test"}


async def test_a_message_of_a_process_without_an_exporter_begins_a_trace(collector: Collector) -> None:
    headers: dict[str, str] = {}
    tracing.inject(headers)  # a heartbeat: no span is open
    with tracing.processing("hr.beat.judge.j1", headers):
        tracing.inject(headers)
    with tracing.processing("hr.step.r1", headers):
        pass
    await asyncio.to_thread(tracing.shutdown)
    first, second = collector.spans
    assert not first.parent_span_id and second.parent_span_id == first.span_id


async def test_a_failing_handler_marks_its_span(connect: Connect, collector: Collector) -> None:
    with pytest.raises(RuntimeError), tracing.processing("hr.step.r1", {}):
        raise RuntimeError("boom")
    await asyncio.to_thread(tracing.shutdown)
    (span,) = collector.spans
    assert span.status.code == 2 and span.status.message == "RuntimeError: boom"
