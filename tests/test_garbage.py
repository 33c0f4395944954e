import gc

import pytest

from headrace.garbage import uncollected


class Node:
    """An object that only the collector can free."""

    def __init__(self) -> None:
        self.itself = self


def living() -> int:
    return sum(type(thing) is Node for thing in gc.get_objects())


@pytest.mark.parametrize("enabled", [True, False])
def test_what_is_loaded_is_never_visited_and_the_collector_is_as_it_was(enabled: bool) -> None:
    if not enabled:
        gc.disable()
    try:
        before = gc.get_freeze_count()
        with pytest.raises(LookupError), uncollected():
            assert not gc.isenabled()
            nodes = [Node() for _ in range(1000)]
            assert living() >= 1000
            raise LookupError
        assert gc.isenabled() == enabled and gc.get_freeze_count() - before >= 1000
        assert living() == 0 and len(nodes) == 1000
    finally:
        gc.enable()
