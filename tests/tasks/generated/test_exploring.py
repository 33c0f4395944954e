"""Traces with all tools: solved as asked for, in many ways, and every call is answered by the tool."""

import itertools
from collections import Counter
from functools import partial

from headrace.harness.sync_tools import answer
from headrace.harness.tools.registry import schemas_of
from headrace.harness.tools.search.session import SearchSession
from headrace.rendering.schemas import tags
from headrace.rendering.terse import Format, TerseRenderer
from headrace.rendering.tokenizer import Tokenizer
from headrace.search.chunks import PATTERNS
from headrace.search.local import WordSearcher
from headrace.tasks.generated import exploring, traces


def test_good_traces_solve_their_task_in_many_ways() -> None:
    tools = schemas_of(exploring.TOOLS)
    answers = partial(answer, search=partial(SearchSession, WordSearcher(), "traces", "", PATTERNS))
    texts = traces.tokenizer_texts(1, 60, Format(tools), answers, player=exploring.play)
    renderer = TerseRenderer(Tokenizer.train(texts, 640, tags(tools)), tools)
    made = traces.mid_training_texts(1, 0.7, renderer, answers, player=exploring.play)
    called: Counter[str] = Counter()
    per_turn: Counter[int] = Counter()
    for trace in itertools.islice(made, 80):
        assert trace.solved == (not trace.fault) or trace.fault in ("unread", "random")
        assert len(trace.ids) == len(trace.weights) < 700
        stop, begin = renderer.stop_ids[0], renderer.tokenizer.tags["<turn>"]
        at = 0
        while begin in trace.ids[at:]:
            start = trace.ids.index(begin, at) + 1
            at = trace.ids.index(stop, start) + 1
            calls = renderer.parse(trace.ids[start:at]).calls
            assert not any(call.error for call in calls)
            called.update(call.name for call in calls)
            per_turn[len(calls)] += 1
    assert set(called) == set(exploring.TOOLS) - {"write_file", "terminal", "lint"}
    assert {1, 2, 3} <= set(per_turn)
