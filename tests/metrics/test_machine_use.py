"""The use of processors and GPUs, from the kernel's counters and the driver's library."""

from pathlib import Path

import pytest

from headrace.metrics.gpus import gpus
from headrace.metrics.machine_use import PERIOD_S, MachineUse, Use


def test_the_share_is_that_between_two_measurements(tmp_path: Path) -> None:
    stat, now = tmp_path / "stat", [0.0]

    def ticks(user: int, idle: int, waiting: int = 0) -> None:
        stat.write_text(f"cpu  {user} 0 0 {idle} {waiting} 0 0 0 7 0\ncpu0 1 2 3 4\n")

    ticks(100, 100)
    use = MachineUse(stat, lambda: now[0])
    assert use.take().cpu is None, "no time has passed"
    ticks(130, 150, waiting=20)
    now[0] += PERIOD_S
    assert use.take().cpu == 0.3  # 30 of 100 ticks
    ticks(230, 150, waiting=20)
    now[0] += PERIOD_S / 2
    assert use.take().cpu == 0.3, "another actor of the process asks within the period"
    now[0] += PERIOD_S / 2
    assert use.take().cpu == 1.0
    stat.unlink()
    now[0] += PERIOD_S
    assert use.take().cpu == 1.0
    assert MachineUse(stat).take() == Use(None, None)


def test_this_kernel_s_counters_are_read() -> None:
    now = [0.0]
    use = MachineUse(clock=lambda: now[0])
    sum(range(2_000_000))  # some ticks, in user mode
    now[0] += PERIOD_S
    cpu = use.take().cpu
    assert cpu is not None and 0.0 < cpu <= 1.0


def test_there_are_as_many_gpus_as_the_driver_has() -> None:
    folder = Path("/proc/driver/nvidia/gpus")
    assert len(gpus()) == (len(list(folder.iterdir())) if folder.is_dir() else 0)


@pytest.mark.gpu
def test_a_gpu_tells_its_memory_and_its_use() -> None:
    gpu = gpus()[0]
    assert 0 < gpu.free <= gpu.total and (gpu.busy is None or 0.0 <= gpu.busy <= 1.0)
