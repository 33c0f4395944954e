"""docs/nodes.md, run literally: two groups of processes in two folders that share no run folder."""

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.bus.connection import Bus
from headrace.messages import subjects as s
from headrace.messages.operations import Event
from headrace.messages.training import StepDone
from tests.support.paths import ROOT

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
SETTINGS = """
[environment]
backend = "process"
[policy]
dim = 32
layers = 1
heads = 1
[mid_training]
tokens = 4000
[curriculum]
steps = 3
groups_per_step = 2
group_size = 4
[limits]
max_turns = 2
max_turn_tokens = 16
[evaluation]
before = false
after = false
[production]
enabled = false
"""
"""The settings that the reader chooses: a run that takes seconds, in the process backend."""
SECOND = ("weight_receiver", "environment")
"""First actors of the process groups that run on the second node."""


def recipe(port: int, weights: Path) -> tuple[str, list[list[str]]]:
    """x.toml, and the commands, of the page, with a port of this machine and a folder for the bucket."""
    text = (ROOT / "docs" / "nodes.md").read_text().partition("Actors register nowhere")[0]
    text = text.replace("10.0.0.1:4222", f"127.0.0.1:{port}").replace("-a 10.0.0.1 -p 4222", f"-a 127.0.0.1 -p {port}")
    assert "s3://weights/headrace" in text
    text = text.replace("s3://weights/headrace", str(weights))
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    toml = [line for line in lines if line.startswith("[") or re.match(r"\w+ = ", line)]
    commands = [shlex.split(line, comments=True) for line in lines if line not in toml]
    return "\n".join(toml) + SETTINGS, commands


async def test_two_nodes_without_a_shared_folder_train_and_balance(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    toml, commands = recipe(port, tmp_path / "weights")
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    shutil.copy(ROOT / "nats.conf", first)
    (first / "x.toml").write_text(toml)
    bin = Path(sys.executable).parent
    env = os.environ | {"PATH": f"{bin}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    started: list[subprocess.Popen[bytes]] = []

    def start(words: list[str], folder: Path) -> None:
        with (folder / f"{len(started)}.log").open("wb") as log:
            started.append(subprocess.Popen(words, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True))

    def finish(words: list[str], folder: Path) -> str:
        return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=True).stdout

    try:
        for words in commands:
            if words[0] == "nats-server":
                start(words, first)
                await listens(port)
            elif words[:2] == ["headrace", "actor"]:
                if not second.exists():
                    second.mkdir()
                    shutil.copytree(first / "credentials", second / "credentials")
                    shutil.copy(first / "x.toml", second)
                    # Only the sender's node signs.
                    (second / "credentials" / "weight_publisher.nk").unlink()
                start(words, second if words[2].split(",")[0] in SECOND else first)
            elif words[1] in ("status", "audit"):
                continue  # below, when the run has ended
            else:
                finish(words, first)
        steps = await until_finished(f"nats://127.0.0.1:{port}", first / "credentials")
        status, ledger = (finish(words, second) for words in commands if words[1] in ("status", "audit"))
        assert "run r1: active" in status and "step 3" in status
    finally:
        for process in reversed(started):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    audit = json.loads(ledger)
    assert steps == 3 and audit["balanced"] and audit["trained"] == 24
    assert (first / "runs/r1/checkpoints").is_dir() and not (second / "runs/r1/checkpoints").exists()


async def listens(port: int) -> None:
    """Return when something accepts connections on the port."""
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.05)
            continue
        writer.close()
        await writer.wait_closed()
        return


async def until_finished(url: str, credentials: Path) -> int:
    """Wait for the curriculum's last event; the number of steps."""
    async with await Bus.connect(url, role="operator", credentials=credentials) as bus:
        async for received in bus.follow("HR_EVENT", s.EVENT.where(run="r1", actor="curriculum", type="event")):
            if isinstance(received.message, Event) and received.message.kind == "run_finished":
                break
        steps = [received.message async for received in bus.history("HR_STEP", s.STEP.at(run="r1"))]
    return sum(isinstance(step, StepDone) for step in steps)
