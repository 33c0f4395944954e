"""The watch over a group's orders."""

import threading
from queue import Queue

from headrace.training.parallel.nodes.silence import Silence

LIMIT_S = 0.2


def test_an_order_without_a_mark_is_silent_and_its_name_is_told() -> None:
    told: Queue[str] = Queue()
    watch = Silence(LIMIT_S, told.put)
    with watch.order("step of version 3"), watch.order("refusal of version 3"):
        assert watch.busy
        assert told.get(timeout=30.0) == "step of version 3"
    assert not watch.busy


def test_marks_pauses_and_times_between_orders_are_not_silent() -> None:
    told: Queue[str] = Queue()
    watch = Silence(LIMIT_S, told.put)
    threading.Event().wait(2 * LIMIT_S)
    with watch.order("step of version 3"):
        for _ in range(40):
            watch.mark()
            threading.Event().wait(LIMIT_S / 20)
        with watch.paused():
            threading.Event().wait(2 * LIMIT_S)
    assert told.empty()
    watch.close()


def test_work_beside_an_order_counts_while_the_order_waits_for_something_else() -> None:
    told: Queue[str] = Queue()
    watch = Silence(LIMIT_S, told.put)
    ended = watch.beside("publication of version 2")
    done = watch.beside("publication of version 3")
    ended()
    with watch.order("step of version 3"), watch.paused():
        assert told.get(timeout=30.0) == "publication of version 3"
    done()
