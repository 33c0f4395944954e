"""Every benchmark still runs: `--smoke` runs its real parts, and its last line fits the one schema."""

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path
from secrets import token_hex

import msgspec
import pytest

from benchmarks.conditions import Line
from tests.support.marks import marked
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S

FOLDER = ROOT / "benchmarks"
MODULES = sorted(path.stem for path in FOLDER.glob("*.py"))
WORKERS = {"bus_ray", "bus_workers", "trl_side"}
"""Programs that other benchmarks start."""
PROGRAMS = [name for name in MODULES if '__name__ == "__main__"' in (FOLDER / f"{name}.py").read_text()]
BENCHMARKS = [name for name in PROGRAMS if name not in WORKERS]
NEEDS = {
    "beside_trl": "TRL's environment",
    "demo_sglang": "SGLang's environment",
    "fanout": "network namespaces",
    "gpu_step": "a GPU",
    "images": "microVMs",
    "providers": "SmolLM2's package",
    "regions": "network namespaces",
    "vm_clone": "microVMs",
}
"""Parts that a machine may lack; the benchmark then names the reason and exits with code 2."""
SUPERVISED = {"bus", "fanout", "regions"}
"""`benchmarks.bus_workers` and `benchmarks.region_fleet` start their programs."""
UNTYPED = {"ahead_of_time"}
"""They call Triton, which has no types."""


@pytest.mark.parametrize("name", MODULES)
def test_every_module_can_be_imported(name: str) -> None:
    importlib.import_module(f"benchmarks.{name}")


@pytest.mark.parametrize("name", [name for name in MODULES if name not in UNTYPED])
def test_nothing_that_a_benchmark_calls_is_hidden_from_the_type_checker(name: str) -> None:
    """`worker: Any = engine._worker` let a benchmark call what no longer existed."""
    for node in ast.walk(ast.parse((FOLDER / f"{name}.py").read_text())):
        if isinstance(node, ast.AnnAssign) and isinstance(node.annotation, ast.Name) and node.annotation.id == "Any":
            assert node.value is None or isinstance(node.value, ast.Constant), (
                f"line {node.lineno}: {ast.unparse(node)}"
            )


def test_every_program_is_a_benchmark_with_smoke_or_a_worker() -> None:
    assert set(PROGRAMS) >= WORKERS
    assert [name for name in BENCHMARKS if "arguments(" not in (FOLDER / f"{name}.py").read_text()] == []
    assert set(BENCHMARKS) >= set(NEEDS)


@pytest.mark.parametrize("name", [name for name in BENCHMARKS if name not in SUPERVISED])
def test_a_program_that_a_benchmark_starts_ends_with_it(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text()
    assert "sys.executable" not in text or "ending_with_parent(" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHMARKS)
def test_it_runs_and_ends_with_the_line_of_the_schema(name: str, tmp_path: Path) -> None:
    mark = f"HR_BENCHMARK={token_hex(8)}"
    key, _, value = mark.partition("=")
    results = {path: path.stat().st_mtime_ns for path in (FOLDER / "results").iterdir()}
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--smoke"],
        cwd=ROOT,
        env=os.environ | {key: value, "TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    left = marked(mark)
    for pid in left:
        os.kill(pid, 9)
    if done.returncode == 2 and name in NEEDS:
        pytest.skip(f"needs {NEEDS[name]}: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode in (0, 1), done.stderr[-2000:]
    line = msgspec.json.decode(done.stdout.strip().splitlines()[-1], type=Line)
    assert (line.benchmark, line.smoke) == (name, True)
    assert len(line.conditions.commit) >= 7
    assert left == {}, "processes outlive the benchmark"
    assert {path: path.stat().st_mtime_ns for path in (FOLDER / "results").iterdir()} == results
