"""What a node has left: too little of anything is a sentence with figures."""

import os
from pathlib import Path

import pytest

from headrace.vmhost import room
from headrace.vmhost.room import LOOKS, Processors


def test_busy_processors_are_measured_over_a_while() -> None:
    cores = len(os.sched_getaffinity(0))
    processors = Processors(0.5)
    for second in range(LOOKS - 1):
        processors.look(float(second), 1000.0 * cores * second)
        assert processors.busy() == 0.0 and not processors.short()
    processors.look(LOOKS - 1.0, 1000.0 * cores * (LOOKS - 1))
    assert processors.busy() == pytest.approx(1.0)
    assert processors.short() == "its machines use 100% of the processors, and the limit is 50%"
    for second in range(LOOKS, 2 * LOOKS):
        processors.look(float(second), 1000.0 * cores * (LOOKS - 1))
    assert processors.busy() == 0.0 and not processors.short()


def test_without_a_limit_nothing_is_too_busy() -> None:
    processors = Processors(0.0)
    for second in range(LOOKS):
        processors.look(float(second), 1e9 * second)
    assert processors.busy() > 1 and not processors.short()


def test_memory_counts_what_others_may_yet_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "free_mb", lambda: 1000.0)
    assert not room.memory_short(224, 0)
    assert room.memory_short(224, 500) == "too little memory is free: 320 MB are needed, 244 are left"
    assert "0 are left" in room.memory_short(224, 5000)


def test_a_disk_is_asked_where_the_folder_will_be(tmp_path: Path) -> None:
    assert not room.disk_short(tmp_path / "not" / "yet", 1)
    assert room.disk_short(tmp_path / "not" / "yet", 1 << 40).startswith("too little disk: ")
