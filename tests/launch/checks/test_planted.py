"""`headrace check` finds planted mistakes, each in one sentence with its fix."""

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from headrace.bus.broker.server import Server
from headrace.cli.main import main
from headrace.config import Config, Policy, Processes
from headrace.machine_memory import available_bytes
from headrace.messages.tasks import Task
from headrace.policy.layout import hugging_face
from headrace.training import memory_plan
from headrace.training.figures.layout import layout_of
from tests.support import alone, chat_formats, tiny
from tests.support.alone import Alone

GROUPS = [list(group) for group in Processes().groups]
PROCESS = {
    "environment.backend": "process",
    "run.min_free_mb": 16,
    "production.enabled": False,
    "tasks.uncertified": True,
} | alone.SUITES
"""A configuration without problems on any machine."""
PRODUCT = {"production.enabled": True}
SGLANG = {"engine.kind": "sglang", "engine.exact": False}


def check(capsys: pytest.CaptureFixture[str], changes: dict[str, Any]) -> tuple[int, str]:
    """Exit code, and the lines that name a problem."""
    words = [word for key, value in changes.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    code = main(["check", *words])
    out = capsys.readouterr()
    return code, "\n".join(line for line in (out.out + out.err).splitlines() if not line.startswith("ok  "))


def without(*names: str) -> list[list[str]]:
    return [rest for group in GROUPS if (rest := [name for name in group if name not in names])]


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def taken() -> Iterator[int]:
    """A port on which something listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


SHAPE = hugging_face.as_json(tiny.config())


def checkpoint(folder: Path, *, config: str = "", weights: bool = True, tokenizer: bool = False) -> str:
    """A Hugging Face folder without a chat template."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config or json.dumps(SHAPE))
    if weights:
        (folder / "model.safetensors").write_bytes(b"")
    if tokenizer:
        (folder / "tokenizer.json").write_text(chat_formats.tokenizer_json())
    return str(folder)


def unsupported(folder: Path) -> dict[str, Any]:
    return {"policy.checkpoint": checkpoint(folder / "c", config=json.dumps(SHAPE | {"model_type": "phi3"}))}


def without_template(folder: Path) -> dict[str, Any]:
    return {"policy.checkpoint": checkpoint(folder / "c", tokenizer=True)}


def test_a_sound_configuration_has_no_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(capsys, PROCESS) == (0, "")


def recomputable() -> int:
    """A micro-batch with which 64 layers need twice this machine's free memory, and little with recomputing."""
    config, many = Config(policy=Policy(layers=64)), 1_000_000
    layout = layout_of(config)._replace(tokens=many)
    needed = memory_plan.plan(hugging_face.of_run(config), layout).total
    return 2 * many * (available_bytes() or 0) // needed


TWICE_WRONG = ("no staging folder",)
"""Its server does not answer either."""
Plant = Callable[[Path, int], dict[str, Any]]


class Broken(Alone):
    """A suite of a beginner: its tasks lack fields."""

    def task(self, id: str) -> Task:
        fields: dict[str, Any] = {"prompt": "x"}
        return Task(**fields)


def open_broken(name: str, root: Path) -> Broken:
    return Broken(name)


REFUSED = ("unknown key", "wrong type", "out of range")
"""They end with 2: no configuration is made."""
PLANTED: dict[str, tuple[dict[str, Any] | Plant, str, str]] = {
    # name: changes, what is wrong, the fix
    "unknown key": ({"curriculum.step": 1}, "curriculum.step: unknown key", "[curriculum] has"),
    "wrong type": ({"curriculum.steps": "many"}, "curriculum.steps: expected `int`", "expected"),
    "out of range": ({"curriculum.group_size": 0}, "curriculum.group_size", "expected"),
    "unknown actor": ({"processes.groups": [*GROUPS, ["jugde"]]}, "no actor 'jugde'", "expected one of"),
    "actor missing": ({"processes.groups": without("judge")}, "the actor 'judge'", "add it to a group"),
    "actor twice": ({"processes.groups": [*GROUPS, ["judge"]]}, "'judge' is listed 2 times", "list it once"),
    "two trainers": (
        {"processes.groups": [*GROUPS, ["trainer:b"]]},
        "a run has one trainer, got 2",
        "keep one of them",
    ),
    "no product rollout": (
        {"production.enabled": True, "production.rollouts": ["shop"]},
        "no process has the actor 'rollout:shop'",
        "add it to processes.groups",
    ),
    "no such suite": ({"tasks.heldout": "nowhere"}, "nowhere", "name another suite in tasks.heldout"),
    "a suite that cannot make its task": (
        {"tasks.heldout": f"{__name__}:open_broken/x"},
        "task '0' cannot be made: TypeError: ",
        "name another suite in tasks.heldout",
    ),
    "broker port": (lambda _, port: {"bus.port": port}, "is taken", "choose another [bus] port"),
    "gateway port": (
        lambda _, port: PRODUCT | {"production.port": port},
        "is taken",
        "choose another [production] port",
    ),
    "no broker": ({"bus.url": "nats://127.0.0.1:1"}, "nothing answers at nats://127.0.0.1:1", "start nats-"),
    "no keys": (
        lambda folder, _: {"bus.url": "nats://127.0.0.1:1", "bus.credentials": str(folder / "keys")},
        "there is no folder",
        "python -m headrace.bus.broker.credentials",
    ),
    "keys without a broker": (
        {"bus.credentials": "keys"},
        "bus.credentials is set and bus.url names no broker",
        "set bus.url to the broker of keys, or remove bus.credentials",
    ),
    "no collector": (
        {"bus.otlp_endpoint": "http://127.0.0.1:1"},
        "nothing answers at http://127.0.0.1:1",
        "start the collector",
    ),
    "no blob folder": ({"bus.blob_dir": "/nowhere"}, "there is no folder /nowhere", "create it"),
    "a stream that cannot hold the versions": (
        {"bus.stream_gib.weights": 0.0001, "weights.anchor_every": 10, "weights.collect_chains": 3},
        "BAD  weights: 4 chains of deltas to versions of ",
        "and bus.stream_gib.weights allows 0.10 MiB; set bus.stream_gib.weights or weights.collect_chains = 2 (3)",
    ),
    "a stream that cannot hold the records": (
        {"bus.stream_gib.turn": 0.001},
        "BAD  bus.stream_gib.turn: the records of the kept steps need up to ",
        "of HR_TURN, and it allows 1.02 MiB: raise it, lower replay.keep_steps or set keep_gib",
    ),
    "a location of an unknown kind": (
        {"weights.full_snapshots_url": "nowhere://bucket"},
        "BAD  weights.full_snapshots_url: nowhere://bucket/r: cannot open: Protocol not known",
        "name another location",
    ),
    "a disk that cannot hold the versions": (
        {"weights.keep": 1 << 30},
        "BAD  run.dir: runs/ needs 1073741825 versions as files ",
        "free some space, or lower weights.keep (1073741824)",
    ),
    "disk": ({"run.min_free_mb": 1 << 30}, "MiB of free disk, a run needs", "free some space"),
    "folder": ({"run.dir": "/dev/null/runs"}, "/dev/null is not a folder", "set another run.dir"),
    "memory": (
        {"environment.backend": "qemu", "environment.memory_mb": 1 << 20},
        "an agent and a judge need two",
        "lower environment.memory_mb",
    ),
    "no checkpoint": ({"policy.checkpoint": "nowhere"}, "nowhere/config.json cannot be read", "expected a"),
    "checkpoint broken": (
        lambda folder, _: {"policy.checkpoint": checkpoint(folder / "c", config="{}")},
        "is not JSON with a model_type",
        "export the checkpoint again",
    ),
    "no weights": (
        lambda folder, _: {"policy.checkpoint": checkpoint(folder / "c", weights=False)},
        "has no *.safetensors file",
        "convert its weights",
    ),
    "no tokenizer": (
        lambda folder, _: {"policy.checkpoint": checkpoint(folder / "c")},
        "tokenizer.json cannot be read",
        "copy tokenizer and chat template",
    ),
    "unsupported architecture": (
        lambda folder, _: unsupported(folder),
        "model_type 'phi3' is not supported by the provider native, only qwen3",
        "choose a checkpoint whose architecture is supported",
    ),
    "unsupported field": (
        lambda folder, _: {
            "policy.checkpoint": checkpoint(folder / "c", config=json.dumps(SHAPE | {"hidden_act": "gelu"}))
        },
        "hidden_act 'gelu' is not supported, only 'silu'",
        "choose a checkpoint whose architecture is supported",
    ),
    "no chat template": (
        lambda folder, _: without_template(folder),
        "has no chat template (neither chat_template.jinja nor chat_template in tokenizer_config.json)",
        "set [policy] chat_template to a file in the syntax of the model",
    ),
    "no such GPU": (
        {"trainer.device": "cuda:99"},
        "cuda:99 is not there: this machine has ",
        "set trainer.device = 'cpu', or start the trainer on a host with a GPU",
    ),
    "no such GPU for the engine": (
        {"engine.device": "cuda:99"},
        "BAD  engine.device: cuda:99 is not there: this machine has ",
        "set engine.device = 'cpu', or start the rollout actor on a host with a GPU",
    ),
    "memory of the trainer": (
        {"trainer.device": "cpu", "trainer.micro_tokens": 1 << 30},
        "BAD  trainer: it needs ",
        "lower trainer.micro_tokens",
    ),
    "memory of the trainer that recomputing saves": (
        lambda *_: {"trainer.device": "cpu", "policy.layers": 64, "trainer.micro_tokens": recomputable()},
        "BAD  trainer: it needs ",
        "set numerics.recompute = true",
    ),
    "no SGLang": (
        SGLANG | {"engine.options.python": "/nowhere/python"},
        "/nowhere/python cannot be started",
        "docs/engines.md says how",
    ),
    "SGLang not installed": (
        SGLANG | {"engine.options.python": sys.executable},
        "has no package sglang",
        "install it",
    ),
    "SGLang down": (
        SGLANG | {"engine.options.url": "http://127.0.0.1:1"},
        "/server_info does not answer",
        "start the server",
    ),
    "no folder in memory": (
        {"weights.memory_dir": "/nowhere"},
        "weights.memory_dir: there is no folder /nowhere",
        "create it",
    ),
}


LONG = "memory of the trainer that recomputing saves"
"""Two plans of 64 layers: seconds of processor time."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == LONG else name for name in PLANTED]
)
def test_a_planted_mistake_is_found_with_its_fix(
    name: str, tmp_path: Path, taken: int, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, wrong, fix = PLANTED[name]
    planted = changes if isinstance(changes, dict) else changes(tmp_path, taken)
    code, problems = check(capsys, PROCESS | planted)
    [problem] = [line for line in problems.splitlines() if wrong in line]
    assert code == (2 if name in REFUSED else 1) and fix in problem
    if name not in TWICE_WRONG:
        assert problems == problem, "one mistake is one sentence"


@pytest.mark.parametrize(
    ("plant", "wrong"),
    [(unsupported, "model_type 'phi3' is not supported"), (without_template, "has no chat template")],
)
def test_up_refuses_a_checkpoint_before_it_makes_a_run(
    plant: Callable[[Path], dict[str, Any]], wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text("")
    words = [
        word for key, value in (PROCESS | plant(tmp_path)).items() for word in ("--set", f"{key}={json.dumps(value)}")
    ]
    assert main(["up", "run.toml", *words]) == 2
    assert wrong in capsys.readouterr().err and not list((tmp_path / "runs").glob("*/"))


def test_a_missing_emulator_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code, problems = check(capsys, PROCESS | {"environment.backend": "qemu"})
    assert code == 1 and "qemu-system-x86_64 is not installed: apt-get install" in problems


def test_a_broker_without_streams_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def body() -> tuple[int, str]:
        async with Server(tmp_path / "broker") as server:
            keys = {"bus.url": server.url, "bus.credentials": str(server.credentials)}
            return await asyncio.to_thread(check, capsys, PROCESS | keys)

    code, problem = uvloop.run(body())
    assert code == 1 and "BAD  bus.url" in problem and "headrace bus declare" in problem


def test_an_active_run_is_found_and_torch_is_not_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from headrace.cli.main import main; from headrace.launch import runs\n"
        "handle = runs.lock(Path('runs'))\n"
        "code = main(['check', '--set', 'environment.backend=process', '--set', 'production.enabled=false',"
        " '--set', f'policy.checkpoint={sys.argv[1]}'])\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "sys.exit(code)"
    )
    folder = without_template(tmp_path)["policy.checkpoint"]
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, cwd=tmp_path)
    assert "has no chat template" in done.stdout, done.stderr
    assert done.returncode == 1 and "a run is active in runs/" in done.stdout, done.stderr
    assert "headrace down" in done.stdout
