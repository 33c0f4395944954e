"""A whole run exports its traces: no span is an orphan, and links lead from a rating to the regions.

One test receives the spans itself; the other sends them to a real store, MLflow, and reads them back from it. That
test makes the store's environment in .cache/mlflow on its first run.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.bus.runtime.test_tracing import Collector
from tests.launch.test_up import Up
from tests.support.rated_run import REGION, rated_run
from tests.support.spans import Seen, orphans, received, ways
from tests.support.trace_store import trace_store

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


@pytest.mark.timeout(600)
async def test_no_span_of_a_run_is_an_orphan(receiver: Collector, tmp_path: Path) -> None:
    endpoint = f"http://127.0.0.1:{receiver.server_port}"
    up = Up(tmp_path, **{"bus.otlp_endpoint": endpoint, "curriculum.steps": 2})
    code, said = await up.end(500)
    assert code == 0, said
    spans = [received(span) for span in receiver.spans]
    assert not orphans(spans)
    there = {(span.trace, span.id): span for span in spans}
    steps = [span for span in spans if span.name == "train step"]
    assert {(span.attributes["hr.step"], span.attributes["hr.version"]) for span in steps} == {("0", "1"), ("1", "2")}
    for step in steps:
        assert len(step.links) == 8  # two groups of four attempts
        assert all(there[link].name.startswith("send hr.traj") for link in step.links)
    names = defaultdict(set)
    for span in spans:
        names[span.trace].add(span.name)
    attempt = names[steps[0].links[0][0]]
    assert {"send hr.task.{run}.{lane}.{suite}", "process hr.task.{run}.{lane}.{suite}"} <= attempt
    assert "send hr.score.{run}.{judge}.{group}" in attempt
    assert {"invoke_agent headrace", "chat latest"} <= attempt
    versions = {span.attributes["hr.version"]: span for span in spans if span.name == "weight version"}
    steps_of = {step.trace: step.attributes["hr.version"] for step in steps}
    assert {steps_of[versions[version].links[0][0]] for version in ("1", "2")} == {"1", "2"}
    assert "stage version" in names[versions["2"].trace]


def check_the_way(spans: Sequence[Seen], run: str) -> None:
    """No span is an orphan, and each of two ratings leads to a region."""
    assert not orphans(spans)
    rated_ways = ways(spans)
    assert {way.rating.id for way in rated_ways} and len({way.rating.id for way in rated_ways}) == 2
    for way in rated_ways:
        assert way.regions == (REGION,)
        assert way.step.attributes["hr.run"] == way.version.attributes["hr.run"] == f"{run}-feedback"
        assert way.step.attributes["hr.version"] == way.version.attributes["hr.version"]
        of_session = {span.name for span in spans if span.trace == way.session.trace}
        assert {"invoke_agent headrace", "chat pinned"} <= of_session


@pytest.mark.timeout(600)
async def test_links_lead_from_a_rating_to_a_region(receiver: Collector, tmp_path: Path) -> None:
    run = await rated_run(tmp_path, **{"bus.otlp_endpoint": f"http://127.0.0.1:{receiver.server_port}"})
    check_the_way([received(span) for span in receiver.spans], run)


@pytest.mark.timeout(1800)
async def test_a_store_keeps_the_links_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with trace_store(tmp_path / "store") as store:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", store.headers)
        (tmp_path / "run").mkdir()
        run = await rated_run(tmp_path / "run", **{"bus.otlp_endpoint": store.url})
        check_the_way(store.spans(), run)
