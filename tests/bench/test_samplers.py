"""The simulation of many samplers, small: real broker, curriculum, judge and audit; recorded durations."""

import json
import subprocess
import sys

import pytest

from benchmarks.samplers.recorded import RecordedTurn
from benchmarks.samplers.sampler import Timeline, sampled
from headrace.messages.rollout import PolicyRef, Sampling, Span, Trajectory, Turn
from headrace.messages.tasks import TaskRef
from headrace.replay.tokens import versions
from tests.support.paths import ROOT

WORDS = ("--samplers", "8", "--group-size", "4", "--steps", "3", "--speed", "20", "--whole")
ARMS = ("--bound", "0,2", "--kill", "2", "--drop", "1")


def test_the_spans_of_a_turn_name_the_versions_that_the_sampler_had() -> None:
    turns: list[Turn] = []
    turns.append(sampled(RecordedTurn(1.0, 0.5, 10, 4), turns, [(0.0, 3)], 1.0))
    turns.append(sampled(RecordedTurn(1.0, 0.0, 2, 9), turns, [(2.0, 3), (2.5, 4)], 3.0))
    made = Trajectory(
        run="r",
        lane="train",
        group="g",
        slot=0,
        attempt=0,
        id="g-0-0",
        task=TaskRef("a", "b"),
        family="f",
        seed=1,
        policy=PolicyRef(),
        sampling=Sampling(),
        outcome="finished",
        turns=tuple(turns),
        diff={},
    )
    assert turns[0].spans == (Span(0, 13, 3),)
    assert turns[1].spans == (Span(13, 19, 3), Span(19, 24, 4))
    assert versions(made) == [3] * 4 + [3] * 4 + [4] * 5


def test_a_timeline_gives_each_moment_one_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("benchmarks.samplers.sampler.time.time", lambda: now)
    timeline = Timeline()
    timeline.idle()
    timeline.lane(False)
    now = 2.0
    timeline.lane(True)
    now = 7.0
    timeline.handed(stored=6.0)
    timeline.parts.append(("turns", 7.5, 9.5))
    now = 10.0
    timeline.idle()
    times = timeline.within(1.0, 12.0)
    assert times.seconds == {"swap": 1.0, "slot": 4.0 + 2.0, "handover": 1.0, "turns": 2.0, "bus": 1.0}
    assert times.handover_s == [1.0]
    assert sum(times.seconds.values()) == 11.0


@pytest.mark.slow
def test_killed_samplers_lose_nothing_and_no_token_is_older_than_the_bound() -> None:
    command = [sys.executable, "-m", "benchmarks.samplers", *WORDS, *ARMS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    for arm, bound in (("bound0", 0), ("bound2", 2), ("bound2_killed", 2), ("bound1_drop", 1)):
        assert figures[f"{arm}_balanced"], figures[f"{arm}_wrong"]
        assert figures[f"{arm}_staleness_max"] <= figures[f"{arm}_staleness_bound"] == bound
        assert figures[f"{arm}_in_flight"] == figures[f"{arm}_duplicates"] == figures[f"{arm}_skipped_records"] == 0
    for arm in ("bound0", "bound2", "bound2_killed"):
        assert figures[f"{arm}_issued"] == figures[f"{arm}_trained"] > 0
    assert (figures["bound2_killed_samplers_killed"], figures["bound2_killed_resumed"] > 0) == (4, True)
    assert figures["bound0_utilisation"] < figures["bound2_utilisation"]
    assert figures["targets"]["lost"]["met"]
