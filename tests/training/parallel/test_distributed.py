"""Several processes compute what one does: losses, bytes, and a checkpoint that another number of them reads."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.training.gradient import Recipe
from headrace.training.micro_batch import micro_batches
from headrace.training.parallel import distributed
from headrace.training.state import TrainerState
from headrace.training.step import take
from headrace.weights import snapshot
from headrace.weights.state import state_hash
from tests.support.distributed import ALGORITHM, MICRO_TOKENS, algorithm, data, policy, told
from tests.support.paths import ROOT
from tests.support.world import model

pytestmark = pytest.mark.timeout(600)
Steps = list[dict[str, Any]]


def torchrun(processes: int, folder: Path, *words: str) -> tuple[Steps, str]:
    """The steps that these processes took, and the hash of what they published."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += ["-m", "tests.support.distributed", str(folder), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((folder / f"steps{int('resume' in words)}.json").read_text())
    return found["steps"], found["published"]


def alone(*words: str) -> tuple[Steps, TrainerState]:
    """The same four steps by one process."""
    state, made = TrainerState(policy(words)), data()
    steps: Steps = []
    for _ in range(4):
        out = take(state, made, Recipe(algorithm(words), MICRO_TOKENS, bound=9))
        steps.append(told(out))
    return steps, state


def bits(steps: Steps) -> Steps:
    """All but the gradient's norm: its squares are added shard by shard."""
    return [{name: value for name, value in step.items() if name != "norm"} for step in steps]


def assert_close(found: Steps, want: Steps) -> None:
    """The first loss is the same number: nothing was added yet. Later ones within the rounding of four updates."""
    assert found[0]["loss"] == want[0]["loss"] and found[0]["k3"] == want[0]["k3"] == 0.0
    for a, b in zip(found, want, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4, abs=1e-6)
        assert a["norm"] == pytest.approx(b["norm"], rel=1e-4)


@pytest.mark.slow
def test_two_processes_are_one_bit_for_bit(tmp_path: Path) -> None:
    """Two micro-batches, one per process: every sum has two terms, so there is only one order."""
    made = data()
    computed = [segment for segment in made.segments if segment.advantage]
    assert len(list(micro_batches(computed, MICRO_TOKENS))) == 2
    want, _ = alone()
    found, digest = torchrun(2, tmp_path)
    assert [step["loss"] for step in found] == [step["loss"] for step in want]
    assert [step["hash"] for step in found] == [step["hash"] for step in want]
    assert digest == want[-1]["hash"] == snapshot.file_hash(tmp_path / "published0.safetensors")
    resumed = TrainerState(model(9))
    distributed.load(resumed, tmp_path / "checkpoint")
    assert (resumed.version, resumed.step, resumed.hash()) == (3, 3, want[2]["hash"])
    again = take(resumed, made, Recipe(ALGORITHM, MICRO_TOKENS, bound=9))
    assert again.state_hash == want[3]["hash"], "the moments came along too"


@pytest.mark.slow
def test_parts_of_a_batch_and_a_proximal_policy_too(tmp_path: Path) -> None:
    """Two updates a step, one micro-batch each: a process has nothing to do and takes part all the same."""
    want, _ = alone("parts")
    found, _ = torchrun(2, tmp_path, "parts")
    assert bits(found) == bits(want) and want[-1]["hash"] != alone()[0][-1]["hash"]


@pytest.mark.slow
def test_experts_in_eight_bits_too(tmp_path: Path) -> None:
    want, _ = alone("mxfp8")
    found, _ = torchrun(2, tmp_path, "mxfp8")
    assert bits(found) == bits(want) and want[-1]["hash"] != alone()[0][-1]["hash"]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_experts_on_different_processes(tmp_path: Path, processes: int) -> None:
    want, _ = alone()
    found, digest = torchrun(processes, tmp_path, "experts")
    assert_close(found, want)
    assert digest == found[-1]["hash"]
    other, published = torchrun(6 - processes, tmp_path, "resume", "experts")
    assert other[0]["hash"] == found[2]["hash"], "the same state, dealt out otherwise, publishes the same bytes"
    assert other[1]["loss"] == found[3]["loss"] and published == other[1]["hash"]


@pytest.mark.slow
def test_four_processes_and_another_number_on_resume(tmp_path: Path) -> None:
    want, _ = alone()
    found, _ = torchrun(4, tmp_path)
    assert_close(found, want)
    other, _ = torchrun(2, tmp_path, "resume")
    assert other[0]["hash"] == found[2]["hash"] and other[1]["loss"] == found[3]["loss"]


@pytest.mark.slow
def test_a_checkpoint_of_one_process_starts_two(tmp_path: Path) -> None:
    state, made = TrainerState(model()), data()
    take(state, made, Recipe(ALGORITHM, MICRO_TOKENS, bound=9))
    distributed.save(state, tmp_path / "checkpoint")
    found, _ = torchrun(2, tmp_path, "resume")
    assert found[0]["hash"] == state.hash() == state_hash(state.published())
    take(state, made, Recipe(ALGORITHM, MICRO_TOKENS, bound=9))
    assert found[1]["hash"] == state.hash()
