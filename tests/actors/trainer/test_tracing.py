"""A step is a trace of its own: one link per trajectory, its records and its mismatch event in that trace."""

from pathlib import Path

import msgspec
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from headrace.actors.trainer.actor import Trainer
from headrace.bus.runtime import tracing
from headrace.messages.base import Array
from headrace.messages.rollout import Trajectory
from headrace.messages.subjects import EVENT, STEP, TRAJ
from headrace.messages.training import StepDone, TokenGaps
from tests.conftest import Connect
from tests.support import world
from tests.support.actors import living
from tests.support.recorded_run import RunFeeder, config, new_run

pytestmark = pytest.mark.anyio


def shifted(made: Trajectory) -> Trajectory:
    """The trajectory as an engine records it that is off by 0.1 nats."""
    turns = (
        msgspec.structs.replace(turn, logprobs=Array.of([each - 0.1 for each in turn.logprobs.tolist()], "<f4"))
        for turn in made.turns
    )
    return msgspec.structs.replace(made, turns=tuple(turns))


async def test_a_step_is_a_trace_with_a_link_per_trajectory(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "_tracer", provider.get_tracer("test"))
    bus = await connect()
    feeder = RunFeeder(bus, new_run(), tmp_path)
    sample = world.episodes
    monkeypatch.setattr(world, "episodes", lambda *arguments: [shifted(each) for each in sample(*arguments)])
    limited = config(tmp_path, numerics={"limit_k3": 0.001})  # each batch is above it
    async with living(Trainer, limited, await connect("trainer"), feeder.run):
        for number in range(2):
            await feeder.batch(number)
        await feeder.version(2)
    finished = (s for s in exporter.get_finished_spans() if s.name == "train step")
    spans = sorted(finished, key=lambda s: s.start_time or 0)
    named = [{"hr.run": feeder.run, "hr.step": k, "hr.version": k + 1} for k in range(2)]
    assert [dict(s.attributes or {}) for s in spans] == named
    traces = [f"{s.context.trace_id:032x}" for s in spans if s.context is not None]
    assert len(set(traces)) == 2 and all(s.parent is None for s in spans)
    sent = [r async for r in bus.history("HR_TRAJ", TRAJ.where(run=feeder.run))]
    for number, span in enumerate(spans):
        batch = sent[4 * number : 4 * number + 4]
        assert sorted(link.attributes["hr.seq"] for link in span.links) == [r.seq for r in batch]  # type: ignore[index, type-var]
        assert [event.name for event in span.events] == ["engine_mismatch", "mismatch"]
    done = [r async for r in bus.history("HR_STEP", STEP.at(run=feeder.run)) if isinstance(r.message, StepDone)]
    for record, trace in zip(done, traces, strict=True):
        context = tracing.extract(record.headers)
        assert context is not None and context.trace_id == trace
    where = EVENT.where(run=feeder.run, actor="trainer", type="token_gaps")
    gaps = [r.message async for r in bus.history("HR_EVENT", where) if isinstance(r.message, TokenGaps)]
    assert [record.step for record in gaps] == [0, 1]
    ids = {getattr(r.message, "id", "") for r in sent}
    assert all({gap.trajectory for gap in record.of} < ids and record.of[0].gaps is not None for record in gaps)
    alarms = [r async for r in bus.history("HR_EVENT", EVENT.where(run=feeder.run, actor="trainer"))]
    told = [getattr(r.message, "data", {}) for r in alarms if getattr(r.message, "kind", "") == "mismatch"]
    assert [attributes.get("trace") for attributes in told] == traces
