"""The capacity that a node has left: too little of anything is a sentence with figures."""

import os
from pathlib import Path

import pytest

from headrace.vmhost.node import capacity
from headrace.vmhost.node.capacity import SAMPLES, Processors


def test_busy_processors_are_measured_over_a_while() -> None:
    cores = len(os.sched_getaffinity(0))
    processors = Processors(0.5)
    for second in range(SAMPLES - 1):
        processors.sample(float(second), 1000.0 * cores * second)
        assert processors.busy() == 0.0 and not processors.short()
    processors.sample(SAMPLES - 1.0, 1000.0 * cores * (SAMPLES - 1))
    assert processors.busy() == pytest.approx(1.0)
    assert processors.short() == "its machines use 100% of the processors, and the limit is 50%"
    for second in range(SAMPLES, 2 * SAMPLES):
        processors.sample(float(second), 1000.0 * cores * (SAMPLES - 1))
    assert processors.busy() == 0.0 and not processors.short()


def test_without_a_limit_nothing_is_too_busy() -> None:
    processors = Processors(0.0)
    for second in range(SAMPLES):
        processors.sample(float(second), 1e9 * second)
    assert processors.busy() > 1 and not processors.short()


def test_memory_counts_what_others_may_yet_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "free_mb", lambda: 1000.0)
    assert not capacity.memory_short(224, 0)
    assert capacity.memory_short(224, 500) == "too little memory is free: 320 MB are needed, 244 are left"
    assert "0 are left" in capacity.memory_short(224, 5000)


def test_a_disk_is_asked_where_the_folder_will_be(tmp_path: Path) -> None:
    assert not capacity.disk_short(tmp_path / "not" / "yet", 1)
    assert capacity.disk_short(tmp_path / "not" / "yet", 1 << 40).startswith("too little disk: ")
