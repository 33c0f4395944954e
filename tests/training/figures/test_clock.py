"""Every moment of a trainer belongs to one cause."""

import itertools
import time

import pytest

from headrace.training.figures.clock import CAUSES, Clock, Pause


def test_causes_add_up_to_the_wall_time_and_inner_phases_stop_outer_ones() -> None:
    ticks = itertools.count()
    clock = Clock(lambda: float(next(ticks)))  # every look at the time takes a second
    with clock.spent("batch"):
        pass
    with pytest.raises(RuntimeError), clock.spent("busy"):
        with clock.spent("rescore"), clock.transfer():
            pass
        with clock.transfer():
            raise RuntimeError
    with clock.spent("publish"), clock.transfer():
        pass
    clock.waited(0.25)
    wall, seconds = clock.lap()
    assert seconds == dict.fromkeys(CAUSES, 0.0) | {
        "records": 4.0, "batch": 1.0, "busy": 3.0, "rescore": 2.0, "communication": 1.75, "straggler": 0.25,
        "publish": 3.0,
    }  # fmt: skip
    assert sum(seconds.values()) == wall == 15.0
    assert clock.lap() == (1.0, dict.fromkeys(CAUSES, 0.0) | {"records": 1.0})


def test_a_pause_ends_at_the_first_forward_pass_and_leaves_out_the_wait_for_a_batch() -> None:
    clock = Clock()
    clock.seconds["batch"] = 4.0
    pause = Pause(time.perf_counter() - 10.0, clock)
    assert pause.seconds == 0.0
    pause.end()
    first = pause.seconds
    assert 6.0 <= first < 9.0
    pause.end()
    assert pause.seconds == first
    none = Pause(None, clock)
    none.end()
    assert none.seconds == 0.0, "the step before made no update"
