"""A whole run exports its traces: no span is an orphan, and links lead from a step to its attempts."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.bus.runtime.test_tracing import Collector
from tests.launch.test_up import Up

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.fixture
def receiver() -> Iterator[Collector]:
    import threading

    with Collector() as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def attributes(span: Span) -> dict[str, str]:
    return {each.key: each.value.string_value or str(each.value.int_value) for each in span.attributes}


@pytest.mark.timeout(600)
async def test_no_span_of_a_run_is_an_orphan(receiver: Collector, tmp_path: Path) -> None:
    endpoint = f"http://127.0.0.1:{receiver.server_port}"
    up = Up(tmp_path, **{"bus.otlp_endpoint": endpoint, "curriculum.steps": 2})
    code, said = await up.end(500)
    assert code == 0, said
    spans = {span.span_id: span for span in receiver.spans}
    orphans = [span.name for span in spans.values() if span.parent_span_id and span.parent_span_id not in spans]
    assert not orphans
    steps = [span for span in spans.values() if span.name == "train step"]
    assert {attributes(span)["hr.step"] for span in steps} == {"0", "1"}
    for step in steps:
        assert len(step.links) == 8  # two groups of four attempts
        for link in step.links:
            sent = spans[link.span_id]
            assert sent.trace_id == link.trace_id and sent.name.startswith("send hr.traj")
    names = defaultdict(set)
    for span in spans.values():
        names[span.trace_id].add(span.name)
    attempt = names[steps[0].links[0].trace_id]
    assert {"send hr.task.{run}.{lane}.{suite}", "process hr.task.{run}.{lane}.{suite}"} <= attempt
    assert "send hr.score.{run}.{judge}.{group}" in attempt
