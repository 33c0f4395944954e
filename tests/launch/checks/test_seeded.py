"""Faults of folders, suites and hosts, seeded one by one into a good run: `check` ends non-zero and names the key."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.main import main
from headrace.launch.checks import trainer
from headrace.messages.tasks import Oracle, SandboxLimits, Task, TaskRef, TestPlan
from headrace.metrics.gpus import Gpu
from headrace.policy.layout import hugging_face
from tests.recipes.test_init import Machine, sglang, simulate
from tests.support import model_folders, tiny
from tests.support.folder_suites import write_suite

SHAPE = hugging_face.as_json(tiny.config(vocab=600, layers=3)) | {"max_position_embeddings": 40960}
GOOD: dict[str, Any] = {
    "environment.backend": "process",
    "run.min_free_mb": 16,
    "production.enabled": False,
    "tasks.uncertified": True,
    "evaluation.heldout_tasks": 0,
    "evaluation.unseen_tasks": 0,
    "trainer.device": "cpu",
}
Seed = Callable[[Path], dict[str, Any]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of three shards, in the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model_folders, "SHARD_BYTES", 300_000)
    return model_folders.folder(tmp_path, "model", SHAPE)


def check(capsys: pytest.CaptureFixture[str], changes: dict[str, Any], *words: str) -> tuple[int, list[str]]:
    """The exit code, and the keys of the problems."""
    sets = [word for key, value in (GOOD | changes).items() for word in ("--set", f"{key}={json.dumps(value)}")]
    code = main(["check", *words, "--set", "policy.checkpoint=model", *sets])
    out = capsys.readouterr().out
    return code, [line.split()[1].rstrip(":") for line in out.splitlines() if line.startswith("BAD")]


def suite(**fields: Any) -> dict[str, Any]:
    """A suite of one task."""
    task = Task(
        ref=TaskRef("swe", "1"), family="swe", prompt="mend it", files={}, allowed=("*",),
        tests=TestPlan(kind="command", argv=("true",)), **fields,
    )  # fmt: skip
    write_suite(
        "swe",
        Path("suites/swe"),
        [(task, Oracle(ref=task.ref, hidden={}, tests=task.tests, expected=(), solution={}))],
        "made",
    )
    return {"tasks.suite": "swe"}


def edit(file: Path, **changes: Any) -> dict[str, Any]:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return {}


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def rewritten(folder: Path, change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """The folder's shards and index with a change of the shape that wrote them; config.json stays."""
    for file in [*shards(folder), folder / "model.safetensors.index.json"]:
        file.unlink()
    raw = dict(SHAPE)
    change(raw)
    model_folders.weights(folder, raw)
    return {}


def cut(file: Path, size: int) -> dict[str, Any]:
    with file.open("r+b") as shard:
        shard.truncate(size)
    return {}


def gone(file: Path) -> dict[str, Any]:
    file.unlink()
    return {}


CHECKPOINTS: dict[str, Seed] = {
    "a missing shard": lambda model: gone(shards(model)[1]),
    "a shard of no bytes": lambda model: cut(shards(model)[1], 0),
    "a shard whose end is missing": lambda model: cut(shards(model)[2], shards(model)[2].stat().st_size - 1),
    "an index that is no JSON": lambda model: cut(model / "model.safetensors.index.json", 1),
    "shards without their index": lambda model: gone(model / "model.safetensors.index.json"),
    "a missing head": lambda model: rewritten(model, lambda raw: raw.update(tie_word_embeddings=True)),
    "a wrong shape": lambda model: rewritten(model, lambda raw: raw.update(moe_intermediate_size=96)),
    "a missing layer": lambda model: rewritten(model, lambda raw: raw.update(num_hidden_layers=2)),
    "a stop id outside the vocabulary": lambda model: edit(
        model / "generation_config.json", eos_token_id=[SHAPE["vocab_size"]]
    ),
    "a tokenizer larger than the embedding": lambda model: (
        rewritten(model, lambda raw: raw.update(vocab_size=300)) or edit(model / "config.json", vocab_size=300)
    ),
}
"""Faults of a folder; the key is `policy.checkpoint`."""
FOLDERS: dict[str, tuple[Seed, str]] = {name: (seed, "policy.checkpoint") for name, seed in CHECKPOINTS.items()} | {
    "positions below the limits": (
        lambda model: edit(model / "config.json", max_position_embeddings=4096) | {"limits.context_tokens": 8192},
        "limits.context_tokens",
    ),
    "the rate of a new policy": (lambda _: {"algorithm.learning_rate": 1e-3 * 32}, "algorithm.learning_rate"),
    "an image that is not stored": (
        lambda _: suite(image="docker.io/org/app:1") | {"environment.backend": "qemu"},
        "environment.cache_dir",
    ),
    "a backend without images": (lambda _: suite(image="docker.io/org/app:1"), "environment.backend"),
    "a backend without a limit": (lambda _: suite(limits=SandboxLimits(disk_mib=64)), "environment.backend"),
    "a backend without templates": (
        lambda _: suite(template="nowhere") | {"environment.backend": "qemu"},
        "environment.cache_dir",
    ),
    "a suite that is elsewhere": (lambda _: {"tasks.suite": "swe"}, "tasks.suite"),
}


def test_the_good_folder_has_no_problem(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(shards(folder)) >= 3
    assert check(capsys, {}) == (0, [])


@pytest.mark.parametrize("name", FOLDERS)
def test_a_seeded_fault_is_found_with_its_key(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seed, key = FOLDERS[name]
    assert check(capsys, seed(folder)) == (1, [key])


DEVICES = "engine.options.server_devices"


GPUS: dict[str, Any] = {
    "engine.kind": "sglang",
    "engine.exact": False,
    "trainer.device": "cuda",
    "trainer.mesh.shard": 4,
    "engine.options.servers": 2,
    DEVICES: ["4,5", "6,7"],
    "engine.options.args": ["--tp-size", "2"],
}
NO_MEMORY = Machine(8, memory=1)
HOSTS: dict[str, tuple[dict[str, Any], Machine, str]] = {
    "a server on the trainer's GPU": ({DEVICES: ["3,4", "6,7"]}, Machine(8), DEVICES),
    "a server on a GPU that is not there": ({}, Machine(6), DEVICES),
    "more ranks than GPUs": ({"trainer.mesh.shard": 16, DEVICES: ["20,21", "22,23"]}, Machine(8), "both"),
    "a server with too few GPUs": ({"engine.options.args": ["--tp-size=4"]}, Machine(8), "engine.options.args"),
    "servers that name no GPU": ({"engine.options.servers": 1, DEVICES: []}, Machine(8), DEVICES),
    "no interpreter of SGLang": ({"engine.options.python": "/nowhere/python"}, Machine(8), "engine.options.python"),
    "an optimizer that the host cannot hold": (
        {"trainer.offload": "optimizer"},
        Machine(8, memory=1),
        "trainer.offload",
    ),
}


@pytest.mark.parametrize("name", HOSTS)
def test_a_host_that_lacks_something_is_found_with_its_key(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, machine, key = HOSTS[name]
    simulate(monkeypatch, machine)
    keys = [DEVICES, "trainer.mesh"] if key == "both" else [key]
    code, problems = check(capsys, GPUS | {"engine.options.python": sglang(folder)} | changes)
    assert (code, sorted(problems)) == (1, keys)


def test_memory_and_disks_count_what_grows(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checkpoints, records and the staged versions of each server; trainer and plan leave the same share free."""
    good = GPUS | {"engine.options.python": sglang(folder)}
    simulate(monkeypatch, Machine(8))
    assert check(capsys, good) == (0, [])
    simulate(monkeypatch, Machine(8, disk=20 << 20))
    assert check(capsys, good) == (1, ["run.dir"])
    simulate(monkeypatch, Machine(8, disk=8 << 30))
    assert check(capsys, good)[0] == 0
    assert check(capsys, good | {"trainer.checkpoint_every": 1, "curriculum.steps": 4000}) == (1, ["run.dir"])
    assert check(capsys, good | {"limits.context_tokens": 30_000, "curriculum.groups_per_step": 64}) == (1, ["run.dir"])


def test_plan_and_check_have_one_margin(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"trainer.device": "cuda", "trainer.micro_tokens": 60_000, "engine.kind": "sglang", "engine.exact": False}
    changes |= {"engine.options.url": "http://127.0.0.1:1"}
    words = [word for key, value in (GOOD | changes).items() for word in ("--set", f"{key}={json.dumps(value)}")]
    Path("run.toml").write_text('[policy]\ncheckpoint = "model"\n')
    assert main(["trainer", "plan", "run.toml", *words]) == 0
    needed = next(float(line.split()[1]) for line in capsys.readouterr().out.splitlines() if line.split()[0] == "total")
    for share, fits in ((0.75, True), (0.85, False)):
        gpu = Gpu(free=int(needed * (1 << 30) / share), total=80 << 30, busy=None)
        monkeypatch.setattr(trainer, "gpus", lambda gpu=gpu: (gpu,))
        assert main(["trainer", "plan", "run.toml", *words, "--gpu-gib", str(needed / share)]) == (0 if fits else 1)
        capsys.readouterr()
        assert ("trainer" in check(capsys, changes)[1]) != fits


@pytest.mark.parametrize(
    ("role", "keys"),
    [
        ("trainer", []),
        ("rollout", [DEVICES]),
        ("judge", ["tasks.suite"]),
        ("weight_sender", []),
    ],
)
def test_a_host_is_checked_for_its_own_actors(
    role: str, keys: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A host with four GPUs trains, and has neither the servers' GPUs nor the suite."""
    simulate(monkeypatch, Machine(4))
    changes = GPUS | {"engine.options.python": sglang(folder), "tasks.suite": "swe"}
    assert check(capsys, changes, "--role", role) == (1 if keys else 0, keys)
