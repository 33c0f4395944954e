"""How many clones should wait: as many as were lately taken at one time, for a minute, and never above the most."""

from headrace.vmhost.node.prewarming import MEMORY_S, SPAN_S, Demand


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_largest_burst_of_late_decides() -> None:
    clock = Clock()
    demand = Demand({"light": 1}, most=4, now=clock)
    assert (demand.wanted("light"), demand.wanted("task")) == (1, 0)
    assert list(demand.templates()) == ["light"]
    for _ in range(3):
        demand.took("task")
    assert demand.wanted("task") == 3
    assert set(demand.templates()) == {"light", "task"}
    clock.now += 2 * SPAN_S
    demand.took("task")
    assert demand.wanted("task") == 3, "a burst is remembered after single ones"
    clock.now += MEMORY_S
    assert demand.wanted("task") == 1
    clock.now += MEMORY_S
    assert demand.wanted("task") == 0 and list(demand.templates()) == ["light"]


def test_what_is_taken_slowly_is_no_burst_and_none_exceeds_the_most() -> None:
    clock = Clock()
    demand = Demand({}, most=4, now=clock)
    for _ in range(20):
        demand.took("slow")
        clock.now += 1.5 * SPAN_S
    assert demand.wanted("slow") == 1
    for _ in range(100):
        demand.took("fast")
    assert demand.wanted("fast") == 4
    assert Demand({"fast": 9}, most=4, now=clock).wanted("fast") == 9, "what the configuration asks for is no burst"
