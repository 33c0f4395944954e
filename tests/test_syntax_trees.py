"""Threads of one process may all parse Python sources."""

import gc
import sys
import threading

from headrace.syntax_trees import parsed

SOURCE = "\n".join(f"def f{n}(a, b):\n    return [(a + {n}) * (b - {n}) for a in b if a > {n}]\n" for n in range(200))


def test_threads_parse_at_the_same_time() -> None:
    """Without the lock most runs of this test fail with SystemError."""
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(12):
                parsed(SOURCE)
        except BaseException as error:
            failures.append(error)

    class Slow:
        def __del__(self) -> None:
            threading.Event().wait(0.0001)  # lets another thread run during a collection

    thresholds, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(50)
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(300):
            cycle = Slow()
            cycle.own = cycle  # type: ignore[attr-defined]
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval)
    assert failures == []
