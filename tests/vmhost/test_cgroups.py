"""A process in a control group of its own: bounded, counted, and gone without a trace."""

import os
import subprocess
from collections.abc import Iterator

import pytest

from headrace.vmhost import cgroups
from headrace.vmhost.cgroups import Places

HOG = "kept = [bytearray(1 << 20) for _ in range(1 << 10)]; print('took all')"


@pytest.fixture
def places() -> Iterator[Places]:
    groups = cgroups.places()
    if groups is None:
        pytest.skip("no control groups can be had here")
    yield groups


def waiting(code: str) -> "subprocess.Popen[str]":
    """A Python that runs the code once it gets a line."""
    return subprocess.Popen(
        ["python3", "-c", f"input(); {code}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_who_takes_more_than_its_memory_is_killed_alone(places: Places) -> None:
    one, two = waiting(HOG), waiting("print('fine')")
    held = [cgroups.enclose(process.pid, 64) for process in (one, two)]
    assert one.communicate("\n")[0] == "" and one.returncode == -9
    assert two.communicate("\n")[0] == "fine\n" and two.returncode == 0
    for group in held:
        assert group is not None
        group.close()
    for place in places.folders:
        assert not (place / f"headrace-{os.getpid()}" / str(one.pid)).exists()


def test_one_that_is_gone_already_leaves_no_folder(places: Places) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    group = cgroups.enclose(gone.pid, 64)
    assert group is not None
    group.close()
    assert not [path for place in places.folders for path in place.glob(f"headrace-*/{gone.pid}")]


def test_groups_of_a_process_weigh_as_many_processes(places: Places) -> None:
    """All machines of a node once weighed as one process: 40 busy processes beside ten machines starved them."""
    if "cpu" not in places.limits:
        pytest.skip("no control groups for processors can be had here")
    of_one = {"cpu.weight": 100, "cpu.shares": 1024}

    def weight() -> float:
        files = [place / f"headrace-{os.getpid()}" / name for place in places.folders for name in of_one]
        return sum(int(path.read_text()) / of_one[path.name] for path in files if path.exists())

    before = weight()  # other tests of this process may hold machines
    groups = [cgroups.create(f"weight-{number}", processes=4) for number in range(3)]
    assert weight() == before + 3
    for left, group in zip((2, 1, 0), groups, strict=True):
        assert group is not None and group.close()
        assert weight() == before + left


def test_a_limit_that_the_kernel_refuses_is_named(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the two files, of version 2 and of version 1, can only be read."""
    monkeypatch.setattr(cgroups, "_MEMORY", ("memory.current", "memory.stat"))
    group = cgroups.create("refused", processes=4, memory_mb=64)
    assert group is not None and group.refused and all("memory." in words for words in group.refused)
    assert group.close()
    monkeypatch.undo()
    whole = cgroups.create("taken", processes=4, memory_mb=64)
    assert whole is not None and whole.refused == () and whole.close()


def test_a_machine_without_one_of_its_limits_is_logged_once(
    places: Places, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cgroups, "_MEMORY", ("memory.current", "memory.stat"))
    cgroups._warn.cache_clear()
    for _ in range(2):
        machine = subprocess.Popen(["sleep", "60"])
        group = cgroups.enclose(machine.pid, 64)
        machine.kill()
        machine.wait()
        assert group is not None and group.close()
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith("machines run without limits that the kernel refuses: memory.")


def test_what_a_killed_process_left_is_swept(places: Places) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    left = [place / f"headrace-{gone.pid}" for place in places.folders]
    for folder in left:
        (folder / "77").mkdir(parents=True)
    cgroups.places.cache_clear()
    assert cgroups.places() == places
    assert not any(folder.exists() for folder in left)


def test_a_machine_without_groups_is_said_to_have_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cgroups, "_mount_point", lambda kind, controller: None)
    cgroups.places.cache_clear()
    try:
        cgroups._warn.cache_clear()
        assert cgroups.places() is None and cgroups.enclose(os.getpid(), 64) is None
        assert "machines get no control groups" in caplog.text
    finally:
        cgroups.places.cache_clear()
