"""Copies in the shared folder: a sender that was killed leaves nothing for ever, and a copy under way is left alone."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.weights import tensor_state
from headrace.weights.state import WeightError
from headrace.weights.transfer.copies import ABANDONED_S, remove_abandoned, share
from tests.support.weights import model

COPYING = """
import resource, signal, sys
from pathlib import Path
from headrace.weights.transfer.copies import share

def halfway(number, frame):
    print("halfway", flush=True)
    sys.stdin.read()

signal.signal(signal.SIGXFSZ, halfway)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
share(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
"""
"""Stands still after it has copied 64 KiB."""


@pytest.fixture
def version(tmp_path: Path) -> tuple[Path, Path, str]:
    """A file of more than 64 KiB, its name in the shared folder, and its state hash."""
    source = tmp_path / "0.safetensors"
    state_hash = tensor_state.write(source, model(wide=20_000))
    assert source.stat().st_size > 1 << 17
    return source, tmp_path / "shared" / "r1" / f"0-{state_hash}.safetensors", state_hash


def test_a_copy_under_way_stays_and_that_of_a_killed_sender_goes(version: tuple[Path, Path, str]) -> None:
    source, path, state_hash = version
    argv = [sys.executable, "-c", COPYING, str(source), str(path), state_hash]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sender:
        assert sender.stdout is not None and sender.stdout.readline() == "halfway\n"
        (part,) = path.parent.iterdir()
        assert remove_abandoned(path.parent) == [] and part.stat().st_size == 1 << 16
        share(source, path, state_hash)  # of a sender that took over
        assert part.exists() and path.read_bytes() == source.read_bytes()
        sender.kill()
        sender.wait()
    assert remove_abandoned(path.parent) == [part]
    assert list(path.parent.iterdir()) == [path]


def test_a_copy_of_another_machine_goes_long_after_its_last_byte_and_not_while_it_is_locked(tmp_path: Path) -> None:
    part = tmp_path / ".0-ab.safetensors.0123456789abcdef-01234567.part"
    earlier = tmp_path / ".1-cd.safetensors.4711.part"
    for file in (part, earlier):
        file.write_bytes(b"half")
    assert remove_abandoned(tmp_path) == []
    long_ago = part.stat().st_mtime - ABANDONED_S - 60.0
    os.utime(part, (long_ago, long_ago))
    with open(part, "rb") as living:
        fcntl.flock(living, fcntl.LOCK_EX)
        assert remove_abandoned(tmp_path) == []
    assert remove_abandoned(tmp_path) == [part] and earlier.exists(), "a name of an earlier release is as another's"


def test_a_copy_with_another_state_gets_no_name_and_stays_nowhere(version: tuple[Path, Path, str]) -> None:
    source, path, _ = version
    with pytest.raises(WeightError, match=f"has state .*, expected {'0' * 32}"):
        share(source, path, "0" * 32)
    assert list(path.parent.iterdir()) == []
