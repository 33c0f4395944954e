"""Traces: the renderer's very format, faults as asked for, deterministic, cheap."""

import itertools
from collections import Counter

import pytest

from headrace.harness.sync_tools import answer
from headrace.rendering import schemas
from headrace.rendering.registry import Renderers
from headrace.rendering.terse import Format, TerseRenderer
from headrace.rendering.tokenizer import Tokenizer
from headrace.tasks.generated import repositories, traces
from headrace.tasks.generated.templates import TRAINED
from headrace.tasks.generated.traces import Trace
from tests.support import chat_formats


@pytest.fixture(scope="module")
def renderer() -> TerseRenderer:
    return TerseRenderer(Tokenizer.train(traces.tokenizer_texts(1, 400, Format(), answer), 640))


def take(renderer: TerseRenderer, seed: int, quality: float, count: int) -> list[Trace]:
    return list(itertools.islice(traces.mid_training_texts(seed, quality, renderer, answer), count))


def test_quality_is_the_share_without_faults(renderer: TerseRenderer) -> None:
    made = take(renderer, 1, 0.35, 600)
    faults = Counter(trace.fault for trace in made)
    assert 0.29 < faults[""] / 600 < 0.41 and len(faults) == 5
    assert all(trace.solved for trace in made if not trace.fault)
    assert not any(trace.solved for trace in made if trace.fault in ("quits", "wrong", "careless"))
    assert {trace.fault for trace in take(renderer, 1, 1.0, 50)} == {""}
    families = Counter(trace.family for trace in made)
    assert families["multi_line"] > 1.5 * families["one_line"]


def test_broad_traces_and_retries_are_as_many_as_asked_for() -> None:
    """Broad traces repair functions that no suite has; a retry takes five turns instead of three."""

    def share(broad: float, retries: float) -> tuple[float, float]:
        plays = traces._plays(1, 1.0, answer, broad=broad, retries=retries)
        taken = [game for game, _ in itertools.islice(plays, 200)]
        return (
            sum(game.made.target.template not in TRAINED for game in taken) / 200,
            sum(len(game.turns) == 5 for game in taken) / 200,
        )

    assert share(0.0, 0.0) == (0.0, 0.0)
    new, again = share(0.3, 0.5)
    assert 0.2 < new < 0.4 < again < 0.6


def test_the_same_seed_gives_the_same_traces(renderer: TerseRenderer) -> None:
    assert take(renderer, 4, 0.35, 30) == take(renderer, 4, 0.35, 30) != take(renderer, 5, 0.35, 30)


def test_a_trace_is_an_episode_in_the_policys_format(renderer: TerseRenderer) -> None:
    turn, stop = renderer.tokenizer.tags["<turn>"], renderer.stop_ids[0]
    for trace in take(renderer, 2, 0.5, 100):
        assert len(trace.ids) == len(trace.weights) and trace.weights[0] == 0.0
        assert trace.ids[-1] == stop and trace.ids.count(turn) == trace.ids.count(stop)
        at = 0
        while turn in trace.ids[at:]:
            start = trace.ids.index(turn, at) + 1
            at = trace.ids.index(stop, start) + 1
            written = set(trace.weights[start:at])
            shown = {traces.CONTEXT} if not trace.fault else {1.0}  # a good trace's wrong turn is not taught
            assert written in ({1.0}, shown), "what the policy writes"
            assert not any(call.error for call in renderer.parse(trace.ids[start:at]).calls)
        read = [weight for weight in trace.weights if weight != 1.0]
        assert set(read) <= {0.0, traces.CONTEXT}


def test_episodes_are_short(renderer: TerseRenderer) -> None:
    made = take(renderer, 3, 1.0, 300)
    lengths = sorted(len(trace.ids) for trace in made)
    written = sorted(sum(weight == 1.0 for weight in trace.weights) for trace in made)
    assert lengths[150] < 130 and lengths[-1] < 300
    assert written[150] < 40 and written[-1] < 80


@pytest.mark.parametrize("syntax", sorted(chat_formats.TEMPLATES))
def test_traces_are_written_in_the_policys_own_chat_format(syntax: str) -> None:
    """The renderer reads every turn that is learned as the policy's own back as calls without an error."""
    form = Renderers(chat_formats.bundle(syntax)).open([schemas.BY_NAME[name] for name in repositories.TOOLS])
    for trace in itertools.islice(traces.mid_training_texts(5, 0.7, form, answer), 12):
        text = form.tokenizer.decode(trace.ids)
        assert text.startswith(form.tokenizer.decode(form.prompt("\0")).partition("\0")[0])
        assert trace.ids[-1] in form.stop_ids and trace.weights[0] == 0.0
        taught = [at for at, weight in enumerate(trace.weights) if weight == 1.0]
        starts = [at for at in taught if trace.weights[at - 1] != 1.0]
        assert starts
        for start in starts:
            end = next(at for at in range(start, len(trace.ids)) if trace.ids[at] in form.stop_ids) + 1
            calls = form.parse(trace.ids[start:end], prompt=trace.ids[:start]).calls
            assert calls and not any(call.error for call in calls)
