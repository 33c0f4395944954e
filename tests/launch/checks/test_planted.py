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
import transformers
import uvloop

from headrace.bus.broker.server import Server
from headrace.cli.main import main
from headrace.config import Config, Policy, Processes
from headrace.machine_memory import available_bytes
from headrace.messages.tasks import Oracle, Task
from headrace.policy.layout import hugging_face
from headrace.training import memory_plan
from headrace.training.figures.layout import layout_of
from tests.policy.test_gpt_oss import GPT_OSS
from tests.support import chat_formats, tiny

GROUPS = [list(group) for group in Processes().groups]
PROCESS = {"environment.backend": "process", "run.min_free_mb": 16, "production.enabled": False}
"""A configuration without problems on any machine."""
PRODUCT = {"production.enabled": True}


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


TWICE_WRONG = ("no staging folder", "gpt-oss on a GPU")
"""Their server does not answer either, or the machine may have no GPU."""
Plant = Callable[[Path, int], dict[str, Any]]


class Broken:
    """A suite of a beginner: its tasks lack fields."""

    name = "broken"

    def ids(self) -> list[str]:
        return ["0"]

    def task(self, id: str) -> Task:
        fields: dict[str, Any] = {"prompt": "x"}
        return Task(**fields)

    def oracle(self, id: str) -> Oracle:
        raise AssertionError("not reached")


def open_broken(name: str, root: Path) -> Broken:
    return Broken()


PLANTED: dict[str, tuple[Plant, int, str, str]] = {
    # name: changes, exit code, what is wrong, the fix
    "unknown key": (lambda *_: {"curriculum.step": 1}, 2, "curriculum.step: unknown key", "[curriculum] has"),
    "wrong type": (lambda *_: {"curriculum.steps": "many"}, 2, "curriculum.steps: expected `int`", "expected"),
    "out of range": (lambda *_: {"curriculum.group_size": 0}, 2, "curriculum.group_size", "expected"),
    "unknown actor": (lambda *_: {"processes.groups": [*GROUPS, ["jugde"]]}, 1, "no actor 'jugde'", "expected one of"),
    "actor missing": (lambda *_: {"processes.groups": without("judge")}, 1, "the actor 'judge'", "add it to a group"),
    "actor twice": (
        lambda *_: {"processes.groups": [*GROUPS, ["judge"]]},
        1,
        "'judge' is listed 2 times",
        "list it once",
    ),
    "two trainers": (
        lambda *_: {"processes.groups": [*GROUPS, ["trainer:b"]]},
        1,
        "a run has one trainer, got 2",
        "keep one of them",
    ),
    "no product rollout": (
        lambda *_: {"production.enabled": True, "production.rollouts": ["shop"]},
        1,
        "no process has the actor 'rollout:shop'",
        "add it to processes.groups",
    ),
    "no such suite": (lambda *_: {"tasks.heldout": "nowhere"}, 1, "nowhere", "name another suite in tasks.heldout"),
    "a suite that cannot make its task": (
        lambda *_: {"tasks.heldout": f"{__name__}:open_broken/x"},
        1,
        "task '0' cannot be made: TypeError: ",
        "name another suite in tasks.heldout",
    ),
    "broker port": (lambda _, port: {"bus.port": port}, 1, "is taken", "choose another [bus] port"),
    "gateway port": (
        lambda _, port: PRODUCT | {"production.port": port},
        1,
        "is taken",
        "choose another [production] port",
    ),
    "no broker": (
        lambda *_: {"bus.url": "nats://127.0.0.1:1"},
        1,
        "nothing answers at nats://127.0.0.1:1",
        "start nats-",
    ),
    "no keys": (
        lambda folder, _: {"bus.url": "nats://127.0.0.1:1", "bus.credentials": str(folder / "keys")},
        1,
        "there is no folder",
        "python -m headrace.bus.broker.credentials",
    ),
    "keys without a broker": (
        lambda *_: {"bus.credentials": "keys"},
        1,
        "bus.credentials is set and bus.url names no broker",
        "set bus.url to the broker of keys, or remove bus.credentials",
    ),
    "no collector": (
        lambda *_: {"bus.otlp_endpoint": "http://127.0.0.1:1"},
        1,
        "nothing answers at http://127.0.0.1:1",
        "start the collector",
    ),
    "no blob folder": (lambda *_: {"bus.blob_dir": "/nowhere"}, 1, "there is no folder /nowhere", "create it"),
    "a stream that cannot hold the versions": (
        lambda *_: {"bus.stream_gib.weights": 0.0001, "weights.anchor_every": 10, "weights.collect_chains": 3},
        1,
        "BAD  weights: 4 chains of deltas to versions of ",
        "and bus.stream_gib.weights allows 0.10 MiB; set bus.stream_gib.weights or weights.collect_chains = 2 (3)",
    ),
    "a stream that cannot hold the records": (
        lambda *_: {"bus.stream_gib.turn": 0.001},
        1,
        "BAD  bus.stream_gib.turn: the records of the kept steps need up to ",
        "of HR_TURN, and it allows 1.02 MiB: raise it, lower replay.keep_steps or set keep_gib",
    ),
    "a location of an unknown kind": (
        lambda *_: {"weights.full_snapshots_url": "nowhere://bucket"},
        1,
        "BAD  weights.full_snapshots_url: nowhere://bucket/r: cannot open: Protocol not known",
        "name another location",
    ),
    "a disk that cannot hold the versions": (
        lambda *_: {"weights.keep": 1 << 30},
        1,
        "BAD  run.dir: runs/ needs 1073741825 versions as files ",
        "free some space, or lower weights.keep (1073741824)",
    ),
    "disk": (lambda *_: {"run.min_free_mb": 1 << 30}, 1, "MiB of free disk, a run needs", "free some space"),
    "folder": (lambda *_: {"run.dir": "/dev/null/runs"}, 1, "/dev/null is not a folder", "set another run.dir"),
    "memory": (
        lambda *_: {"environment.backend": "qemu", "environment.memory_mb": 1 << 20},
        1,
        "an agent and a judge need two",
        "lower environment.memory_mb",
    ),
    "no checkpoint": (
        lambda *_: {"policy.checkpoint": "nowhere"},
        1,
        "nowhere/config.json cannot be read",
        "expected a",
    ),
    "checkpoint broken": (
        lambda folder, _: {"policy.checkpoint": checkpoint(folder / "c", config="{}")},
        1,
        "is not JSON with a model_type",
        "export the checkpoint again",
    ),
    "no weights": (
        lambda folder, _: {"policy.checkpoint": checkpoint(folder / "c", weights=False)},
        1,
        "has no *.safetensors file",
        "convert its weights",
    ),
    "no tokenizer": (
        lambda folder, _: {"policy.checkpoint": checkpoint(folder / "c")},
        1,
        "tokenizer.json cannot be read",
        "copy tokenizer and chat template",
    ),
    "unsupported architecture": (
        lambda folder, _: unsupported(folder),
        1,
        "model_type 'phi3' is not supported by the provider native, only qwen3",
        "choose a checkpoint whose architecture is supported",
    ),
    "unsupported field": (
        lambda folder, _: {
            "policy.checkpoint": checkpoint(folder / "c", config=json.dumps(SHAPE | {"hidden_act": "gelu"}))
        },
        1,
        "hidden_act 'gelu' is not supported, only 'silu'",
        "choose a checkpoint whose architecture is supported",
    ),
    "no chat template": (
        lambda folder, _: without_template(folder),
        1,
        "has no chat template (neither chat_template.jinja nor chat_template in tokenizer_config.json)",
        "set [policy] chat_template to a file in the syntax of the model",
    ),
    "gpt-oss on a GPU": (
        lambda folder, _: {
            "policy.checkpoint": checkpoint(
                folder / "c", config=json.dumps(transformers.GptOssConfig(**GPT_OSS).to_dict())
            ),
            "trainer.device": "cuda",
        },
        1,
        "[trainer] device = 'cuda': gpt_oss is not supported on a GPU",
        "set it to 'cpu'",
    ),
    "no such GPU": (
        lambda *_: {"trainer.device": "cuda:99"},
        1,
        "cuda:99 is not there: this machine has ",
        "set trainer.device = 'cpu', or start the trainer on a host with a GPU",
    ),
    "no such GPU for the engine": (
        lambda *_: {"engine.device": "cuda:99"},
        1,
        "BAD  engine.device: cuda:99 is not there: this machine has ",
        "set engine.device = 'cpu', or start the rollout actor on a host with a GPU",
    ),
    "memory of the trainer": (
        lambda *_: {"trainer.device": "cpu", "trainer.micro_tokens": 1 << 30},
        1,
        "BAD  trainer: it needs ",
        "lower trainer.micro_tokens",
    ),
    "memory of the trainer that recomputing saves": (
        lambda *_: {
            "trainer.device": "cpu",
            "policy.layers": 64,
            "trainer.micro_tokens": recomputable(),
        },
        1,
        "BAD  trainer: it needs ",
        "set numerics.recompute = true",
    ),
    "no SGLang": (
        lambda *_: {"engine.kind": "sglang", "engine.exact": False, "engine.options.python": "/nowhere/python"},
        1,
        "/nowhere/python cannot be started",
        "docs/engines.md says how",
    ),
    "SGLang not installed": (
        lambda *_: {"engine.kind": "sglang", "engine.exact": False, "engine.options.python": sys.executable},
        1,
        "has no package sglang",
        "install it",
    ),
    "SGLang down": (
        lambda *_: {"engine.kind": "sglang", "engine.exact": False, "engine.options.url": "http://127.0.0.1:1"},
        1,
        "/server_info does not answer",
        "start the server",
    ),
    "no folder in memory": (
        lambda *_: {"weights.memory_dir": "/nowhere"},
        1,
        "weights.memory_dir: there is no folder /nowhere",
        "create it",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_found_with_its_fix(
    name: str, tmp_path: Path, taken: int, capsys: pytest.CaptureFixture[str]
) -> None:
    plant, code, wrong, fix = PLANTED[name]
    exit_code, problems = check(capsys, PROCESS | plant(tmp_path, taken))
    [problem] = [line for line in problems.splitlines() if wrong in line]
    assert exit_code == code and fix in problem
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
