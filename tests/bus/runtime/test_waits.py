"""Waits that last are reported after a minute and at each doubling, on a clock that the test holds."""

from contextlib import ExitStack

from headrace.bus.runtime.waits import Waits


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_wait_is_reported_after_a_minute_and_at_each_doubling() -> None:
    clock = Clock()
    waits = Waits(clock)
    reports = []
    with waits.named(lambda: f"batch 3 at {clock.now:g}"):
        for _ in range(300):
            clock.now += 1
            text, seconds = waits.report()
            if text:
                reports.append((text, seconds))
    assert reports == [(f"waiting for {n} s: batch 3 at {100 + n}", float(n)) for n in (60, 120, 240)]
    clock.now += 3600
    assert waits.report() == ("", 0.0), "it is over"


def test_a_loop_of_short_waits_is_one_and_a_new_one_begins_anew() -> None:
    clock = Clock()
    waits = Waits(clock)

    def loop(seconds: int) -> list[float]:
        began, reports = clock.now, []
        for _ in range(seconds // 2):
            with waits.named("capacity", began):
                clock.now += 1
                reports.append(waits.report()[1])
            clock.now += 1
        return [each for each in reports if each]

    assert loop(100) == [61.0]
    assert loop(50) == []


def test_many_waits_are_one_report() -> None:
    clock = Clock()
    waits = Waits(clock)
    with ExitStack() as stack:
        for number in range(5):
            stack.enter_context(waits.named(f"slot {number}"))
            clock.now += 1
        clock.now += 60
        assert waits.report() == ("waiting for 65 s: slot 0; slot 1; slot 2, and 2 more", 65.0)
