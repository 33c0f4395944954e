"""`headrace init` writes the recipes of deploy/gpu, which `check` and `plan` accept, and refuses what has no part."""

import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from headrace.cli.main import main
from headrace.config import load
from headrace.launch.checks import host, trainer
from headrace.metrics.gpus import Gpu
from tests.support import model_folders
from tests.support.paths import ROOT

RECIPES = sorted((ROOT / "deploy" / "gpu").glob("*.toml"))
SMALLEST = "1x80-qwen3-4b-lora"
GIB = 1 << 30


class Machine(NamedTuple):
    """The hardware that a recipe names, simulated."""

    gpus: int
    memory: int = 2048 * GIB
    disk: int = 20_000 * GIB


def simulate(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    """GPUs of 80 GB with what the driver leaves of them, the host's memory, its disks and /dev/shm."""
    usage = SimpleNamespace(free=machine.disk)
    gpu = Gpu(free=int(79.1 * GIB), total=80 * GIB, busy=None)
    monkeypatch.setattr(trainer, "gpus", lambda: (gpu,) * machine.gpus)
    monkeypatch.setattr(trainer, "available_bytes", lambda: machine.memory)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(host, "clock_state", lambda: 0)


def sglang(folder: Path) -> str:
    """An interpreter whose environment names a verified SGLang."""
    info = folder / "packages" / "sglang-0.5.23.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\n")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={info.parent} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which models/ has the published shapes."""
    monkeypatch.chdir(tmp_path)
    for name in model_folders.CONFIGS:
        model_folders.folder(tmp_path / "models", name)
    return tmp_path


def words_of(recipe: Path) -> list[str]:
    """The command that wrote a recipe, by its own comment."""
    [line] = re.findall(r"^# headrace (init .*)$", recipe.read_text(), re.MULTILINE)
    return str(line).split()


def checked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[str]]:
    capsys.readouterr()
    code = main(["check", *words])
    return code, [line for line in capsys.readouterr().out.splitlines() if line.startswith("BAD")]


CASES = [pytest.param(each, id=each.stem, marks=[pytest.mark.slow] * (each.stem != SMALLEST)) for each in RECIPES]


@pytest.mark.parametrize("recipe", CASES)
def test_init_writes_the_recipe_and_check_and_plan_accept_it(
    recipe: Path, models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words_of(recipe)) == 0
    written = Path(recipe.name).read_text()
    head, whole = recipe.read_text().removesuffix(written), recipe.read_text()
    assert whole.endswith(written) and all(line.startswith("#") for line in head.splitlines())
    assert "nothing on a GPU" in " ".join(line.removeprefix("# ") for line in head.splitlines())
    lines = [line for line in written.splitlines() if " = " in line and not line.startswith("#")]
    assert len(lines) <= 40
    assert all("# " in line or written.partition(f"\n{line}")[0].splitlines()[-1].startswith("# ") for line in lines)
    config = load(recipe.name)
    simulate(monkeypatch, Machine({"1x80-qwen3-4b-lora": 1, "2x80-qwen3-4b": 2}.get(recipe.stem, 8)))
    sets = ["--set", f"engine.options.python={sglang(models)}"] if config.engine.kind == "sglang" else []
    sets += ["--set", f"weights.full_snapshots_url={models}"] if config.weights.full_snapshots_url else []
    # Without a broker of its own `check` starts none, so one that is not there is not a fault of the file.
    sets += ["--set", "bus.url=", "--set", "bus.credentials="] if config.bus.url else []
    roles = ["trainer", "rollout"] if config.weights.full_snapshots_url else [""]
    for role in roles:
        assert checked(capsys, recipe.name, *sets, *(["--role", role] if role else [])) == (0, [])
    assert main(["trainer", "plan", recipe.name, *sets]) == 0, capsys.readouterr().out
    if recipe.stem in ("slurm", "kubernetes"):
        kind = {"slurm": "slurm", "kubernetes": "k8s"}[recipe.stem]
        assert main(["deploy", kind, "out", "--config", recipe.name]) == 0


def test_a_recipe_on_too_little_hardware_is_refused_by_check(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = ROOT / "deploy" / "gpu" / "8x80-qwen3-8b.toml"
    sets = ["--set", f"engine.options.python={sglang(models)}"]
    simulate(monkeypatch, Machine(4))
    code, problems = checked(capsys, str(recipe), *sets)
    assert code == 1 and [line.split(":")[0] for line in problems] == ["BAD  engine.options.server_devices"]
    simulate(monkeypatch, Machine(8, disk=30 * GIB))
    code, problems = checked(capsys, str(recipe), *sets)
    assert code == 1 and {line.split(":")[0] for line in problems} == {"BAD  weights.memory_dir", "BAD  run.dir"}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--agent", "own"], "--agent own: "),
        (["--engine", "vllm"], "--engine vllm: expected embedded or sglang"),
        (["--engine", "embedded", "--gpus", "8x80"], "one process samples on one GPU"),
        (["--engine", "sglang"], "a server and a trainer do not share a GPU yet"),
        (["--nodes", "3"], "--nodes 3: "),
        (["--gpus", "eight"], "--gpus: expected COUNTxGIB"),
        (["--model", "models/none"], "--model: models/none/config.json is not there"),
        (["--tasks", "nowhere"], "--tasks: there is no suite 'nowhere'"),
        (["--context", "300000"], "--context 300000: expected 1,024 to 262,144"),
        (["--gpus", "1x8"], "one GPU does not hold trainer and sampler"),
        (["--set", "curriculum.steps=0.5"], "curriculum.steps"),
    ],
)
def test_what_has_no_part_is_refused_in_one_sentence(
    words: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = model_folders.folder(tmp_path / "models", "Qwen3-4B-Instruct-2507")
    usual = {"--model": str(model), "--tasks": "generated/train", "--gpus": "1x80"}
    given = dict(zip(words[::2], words[1::2], strict=True))
    assert main(["init", "run.toml", *(word for pair in (usual | given).items() for word in pair)]) == 2
    error = capsys.readouterr().err
    assert why in error and error.count("\n") == 1
    assert not Path("run.toml").exists()


def test_an_existing_file_is_kept(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.toml").write_text("mine")
    shutil.rmtree("models")
    model = model_folders.folder(models / "models", "Qwen3-4B-Instruct-2507")
    assert main(["init", "run.toml", "--model", str(model), "--tasks", "generated/train", "--gpus", "1x80"]) == 2
    assert Path("run.toml").read_text() == "mine" and "run.toml exists" in capsys.readouterr().err
