"""A bundle replays where there is neither a broker nor a run, and a broken one says so in one sentence."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.bus.broker.server import Server
from tests.replay.conftest import Finished, Run


@pytest.fixture(scope="module")
def written(finished: Finished, opened: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of a step that has others before it since its checkpoint."""
    from headrace.cli.main import main

    folder = tmp_path_factory.mktemp("bundles") / "one"
    assert main(["replay", str(finished.folder), "--step", "1", "--to", str(folder)]) == 0
    return folder


def copied(written: Path, to: Path) -> Path:
    return Path(shutil.copytree(written, to / "bundle"))


def test_a_bundle_needs_nothing_else(
    finished: Finished, written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, headrace: Run
) -> None:
    there = copied(written, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    assert (there / "README").read_text().strip().endswith("headrace replay one")
    code, out, err = headrace("replay", "bundle")
    assert (code, err) == (0, "")
    report = json.loads(out[0])
    assert (report["step"], report["bitwise_equal"]) == (1, True)
    assert report["weights_hash"] == finished.outcomes[1].state_hash
    code, out, _ = headrace("replay", "bundle", "--step", "1", "--with", "algorithm.learning_rate=1e-3")
    assert (code, json.loads(out[0])["bitwise_equal"]) == (0, True)


@pytest.mark.parametrize("step", [3, 4])
def test_a_failed_step_fails_in_its_bundle_too(
    finished: Finished, opened: Server, tmp_path: Path, headrace: Run, step: int
) -> None:
    folder = tmp_path / "failed"
    code, out, _ = headrace("replay", str(finished.folder), "--step", str(step), "--to", str(folder))
    assert code == 0
    assert out == [f"step {step} of run {finished.run}; run it anywhere with: headrace replay {folder}"]
    code, out, _ = headrace("replay", str(folder))
    assert (code, json.loads(out[0])["bitwise_equal"]) == (0, True)


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def _rename(bundle: Path, name: str) -> None:
    index = json.loads((bundle / "bundle.json").read_text())
    index["files"][name] = "0" * 64
    (bundle / "bundle.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda b: _flip(b / "checkpoint.safetensors"), "damaged, checkpoint.safetensors is not what was written"),
        (lambda b: next((b / "scores").iterdir()).unlink(), "incomplete, it lacks scores/"),
        (lambda b: (b / "config.json").write_text("{}"), "damaged, config.json"),
        (lambda b: (b / "bundle.json").write_text('{"format": 1'), "its bundle.json cannot be read"),
        (lambda b: (b / "bundle.json").write_text('{"format": 9}'), "has format 9, this headrace reads 1"),
        (lambda b: _rename(b, "../../etc/passwd"), "names '../../etc/passwd'"),
        (lambda b: _rename(b, "trajectories/../../1.trajectory"), "names 'trajectories/../../1.trajectory'"),
        (lambda b: (b / "bundle.json").write_text("[]"), "its bundle.json cannot be read"),
    ],
)
def test_a_broken_bundle_is_one_sentence(
    written: Path, tmp_path: Path, headrace: Run, damage: Callable[[Path], object], says: str
) -> None:
    there = copied(written, tmp_path)
    damage(there)
    code, out, err = headrace("replay", str(there))
    assert (code, out) == (1, [])
    assert says in err
    assert err.count("\n") == 1


def test_what_a_bundle_cannot_do_is_said(finished: Finished, opened: Server, written: Path, headrace: Run) -> None:
    for words, code, says in [
        ((str(written), "--steps", "3"), 2, "a bundle of one step"),
        ((str(written), "--step", "7"), 1, "no finished step 7"),
        ((str(written), "--with", "algorithm.kl_weight=0.5"), 1, "needs the policy of version 0"),
        ((str(finished.folder), "--step", "1", "--to", str(written)), 1, "exists already"),
    ]:
        exit_code, out, err = headrace("replay", *words)
        assert (exit_code, out) == (code, []), words
        assert says in err
