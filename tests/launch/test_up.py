"""`headrace up` when something fails: however a run ends, only its streams are left."""

import asyncio
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

import pytest

from benchmarks import tiny_run
from headrace.bus.broker.server import open_store, running
from headrace.bus.connection import Bus
from headrace.cli.main import main
from headrace.messages import subjects as s
from headrace.messages.ledger import SlotIssued
from headrace.messages.training import StepDone, StepManifest
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.anyio
DEMO = ROOT / "deploy" / "demo.toml"
HEADRACE = (sys.executable, "-m", "headrace.cli")
TINY = tiny_run.TINY | {"production.enabled": False}
FEW = {
    "processes.groups": [
        ["curriculum", "evaluator", "dead_letter", "environment", "judge"],
        ["rollout", "trainer", "weight_sender", "weight_receiver"],
    ]
}
"""The actors in two processes, one of which imports torch; tests/chaos has the ordinary groups."""
GRACE_S = PATIENCE_S
"""How long to wait for a process that has been told to end, before the test fails."""


class Process(NamedTuple):
    """A process of a run: its id, the words of its command line, and a handle that outlives it."""

    pid: int
    words: list[str]
    handle: int

    @property
    def actors(self) -> str:
        return self.words[self.words.index("actor") + 1] if "headrace.cli" in self.words else ""


class Up:
    """One `headrace up`. Everything that it starts carries a mark in its environment."""

    def __init__(self, folder: Path, *words: str, **changes: Any) -> None:
        self.folder = folder
        self.mark = f"HEADRACE_TEST={token_hex(8)}"
        name, _, value = self.mark.partition("=")
        settings = [f"{key}={json.dumps(entry)}" for key, entry in (TINY | changes).items()]
        self.process = subprocess.Popen(
            [*(words or (*HEADRACE, "up", str(DEMO))), *(word for entry in settings for word in ("--set", entry))],
            cwd=folder,
            env=os.environ | {name: value},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )

    async def line(self, begins: str) -> str:
        """The next line of its output that begins so."""
        assert self.process.stdout is not None
        while text := await asyncio.to_thread(self.process.stdout.readline):
            if text.startswith(begins):
                return text
        raise AssertionError(f"no line {begins!r}; it said {self.process.stderr and self.process.stderr.read()!r}")

    def family(self) -> list[Process]:
        """Every live process that it or its children started."""
        processes = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == self.process.pid:
                continue
            try:
                if self.mark.encode() not in (entry / "environ").read_bytes().split(b"\0"):
                    continue
                handle = os.pidfd_open(int(entry.name))
                words = (entry / "cmdline").read_bytes().decode().split("\0")[:-1]
            except OSError:
                continue
            processes.append(Process(int(entry.name), words, handle))
        return processes

    async def end(self, patience_s: float = GRACE_S) -> tuple[int, str]:
        """Its exit code and its standard error; no process that it started is left."""
        _, said = await asyncio.to_thread(self.process.communicate, timeout=patience_s)
        await asyncio.to_thread(self.nobody_is_left)
        return self.process.returncode, said

    def nobody_is_left(self) -> None:
        for left in self.family():
            readable, _, _ = select.select([left.handle], [], [], GRACE_S)
            assert readable, f"an orphan: {left.words}"
            os.close(left.handle)

    @property
    def run(self) -> Path:
        return (self.folder / "runs" / "latest").resolve()

    async def operator(self) -> Bus:
        """A connection to the run's broker."""
        broker = running(self.run / "broker")
        assert broker is not None
        return await Bus.connect(broker.url, role="operator", credentials=self.run / "broker" / "credentials")


async def steps_in(folder: Path) -> list[int]:
    """The numbers of the steps that a run has trained, in the order of its stream. No broker may serve the run."""
    async with await open_store(folder / "broker") as store:
        async with await Bus.connect(store.url, role="operator", credentials=store.credentials) as bus:
            records = [record.message async for record in bus.history("HR_STEP", s.STEP.at(run=folder.name))]
    return [message.step for message in records if isinstance(message, StepDone)]


@asynccontextmanager
async def up(folder: Path, *words: str, **changes: Any) -> AsyncIterator[Up]:
    """A running `headrace up`, killed when the test fails in between."""
    started = Up(folder, *words, **changes)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.kill()
            started.process.communicate()
        started.nobody_is_left()


def command(folder: Path, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*HEADRACE, *words], cwd=folder, capture_output=True, text=True, env=env)


def headrace(folder: Path, *words: str) -> tuple[int, Any]:
    """A command's exit code and its JSON line."""
    done = command(folder, *words)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def one_sentence(said: str) -> bool:
    return said.startswith("headrace: ") and said.count("\n") == 1


async def test_an_interrupted_run_keeps_its_books_and_goes_on(tmp_path: Path) -> None:
    async with up(tmp_path, **FEW, **{"curriculum.steps": 500}) as started:
        await started.line("run r")
        run = started.run.name
        bus = await started.operator()
        async for _ in bus.follow("HR_TRAJ", s.TRAJ.where(run=run)):
            break
        await bus.close()

        other = command(tmp_path, "up", str(DEMO))
        assert other.returncode == 5 and f"pid {started.process.pid}" in other.stderr and one_sentence(other.stderr)
        status = command(tmp_path, "status")
        assert status.returncode == 0 and f"run {run}: active" in status.stdout and "trainer" in status.stdout

        os.killpg(started.process.pid, signal.SIGINT)  # Ctrl-C in a terminal
        code, said = await started.end()
        assert code == 130 and one_sentence(said) and run in said
    code, before = headrace(tmp_path, "audit", "latest")
    assert code == 0 and before["in_flight"] > 0

    async with up(tmp_path, **FEW, **{"curriculum.steps": 500, "run.id": run}) as again:
        await again.line("run r")
        bus = await again.operator()
        issued = await bus.last_seq("HR_LEDGER")
        async for received in bus.follow("HR_STEP", s.STEP.at(run=run), start=await bus.last_seq("HR_STEP") + 1):
            if isinstance(received.message, StepDone):
                break
        async for record in bus.follow("HR_LEDGER", s.LEDGER.where(run=run), start=issued + 1):
            new = record.message
            if isinstance(new, SlotIssued) and new.lane == "train" and not new.attempt:
                break  # the step returned its credit; interrupted slots are issued again before that
        await bus.close()
        family = again.family()
        again.process.kill()
        again.process.communicate()
        again.nobody_is_left()
        assert len(family) >= 3  # the broker and two processes of actors
    code, after = headrace(tmp_path, "audit", run)
    assert code == 0 and after["in_flight"] > 0 and after["trained"] > before["trained"]
    assert after["issued"] > before["issued"]
    trained = await steps_in(tmp_path / "runs" / run)
    assert trained and trained == list(range(len(trained)))  # each step once, without a gap
    lost = await lose_a_trajectory(tmp_path / "runs" / run)
    damaged = command(tmp_path, "audit", run)
    assert damaged.returncode == 1 and not json.loads(damaged.stdout)["balanced"]
    assert f"its trajectory {lost} is not in the stream" in damaged.stderr and one_sentence(damaged.stderr)


async def lose_a_trajectory(run: Path) -> int:
    """Delete a trajectory of the first step from the run's store, as a damaged disk would. Returns its sequence."""
    async with await open_store(run / "broker") as server:
        admin = await Bus.connect(server.url, role="admin", credentials=server.credentials)
        async for received in admin.history("HR_STEP", s.STEP.at(run=run.name)):
            if isinstance(received.message, StepManifest):
                lost = received.message.groups[0].slots[0][0]
                assert await admin.delete("HR_TRAJ", lost)
                break
        await admin.close()
    return lost


@pytest.mark.parametrize("killed", [pytest.param(False, marks=pytest.mark.slow), True])
async def test_down_leaves_no_process(tmp_path: Path, killed: bool) -> None:
    async with up(tmp_path, **FEW, **{"curriculum.steps": 500}) as started:
        await started.line("run r")
        bus = await started.operator()
        async for _ in bus.follow("HR_LEDGER", s.LEDGER.where(run=started.run.name)):
            break  # every actor is up
        await bus.close()
        if killed:
            started.process.kill()
            started.process.wait()
        done = await asyncio.to_thread(command, tmp_path, "down", "--drain", "0.5")
        assert done.returncode == 0 and "no processes are left" in done.stdout, done.stdout + done.stderr
        assert ("no process of `headrace up` was active" in done.stdout) is killed
        started.process.communicate()
        assert started.family() == []


async def phase(started: Up, until: str) -> None:
    """Return when the run has published the message, or the event, of that name."""
    bus = await started.operator()
    async for received in bus.follow("HR_EVENT", s.EVENT.where(run=started.run.name)):
        if until in (received.type, getattr(received.message, "kind", "")):
            break
    await bus.close()


@pytest.mark.parametrize(
    ("until", "signals"),
    [
        ("eval_request", (signal.SIGTERM, signal.SIGINT)),  # during the final evaluation, and a second signal at once
        ("run_finished", (signal.SIGINT,)),  # during the audit
    ],
)
@pytest.mark.slow
async def test_a_signal_near_the_end(tmp_path: Path, until: str, signals: Sequence[signal.Signals]) -> None:
    steps = {"curriculum.steps": 1, "evaluation.after": until == "eval_request", "evaluation.heldout_tasks": 200}
    async with up(tmp_path, **steps) as started:
        await started.line("run r")
        await phase(started, until)
        started.process.send_signal(signals[0])
        assert started.process.stderr is not None
        said = await asyncio.to_thread(started.process.stderr.readline)
        for number in signals[1:]:
            started.process.send_signal(number)
        code, more = await started.end()
    assert code == 130 and one_sentence(said + more)
    code, ledger = headrace(tmp_path, "audit", "latest")
    assert code == 0 and ledger["trained"] + sum(ledger["dropped"].values()) >= 8


def test_what_this_machine_cannot_do_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refused(*words: str) -> tuple[int, str]:
        """Exit code and standard error of `headrace up`, called in this process; it prints nothing else."""
        code = main(["up", *words])
        printed = capfd.readouterr()
        assert not printed.out and one_sentence(printed.err), printed
        return code, printed.err

    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for changes, code, says, path in (
            ({"bus.port": port}, 4, f"port {port} on 127.0.0.1 is taken", None),
            ({"production.port": port, "production.enabled": True}, 4, "another [production] port", None),
            ({"bus.url": "nats://127.0.0.1:1"}, 4, "no broker answers at nats://127.0.0.1:1", None),
            ({"bus.credentials": "keys"}, 4, "bus.credentials is set and bus.url names no broker", None),
            ({"run.min_free_mb": 1 << 30}, 3, "free some space first", None),
            ({"environment.backend": "qemu"}, 3, "qemu-system-x86_64 is not installed: apt-get install", tmp_path),
            ({"environment.backend": "qemu", "environment.memory_mb": 1 << 20}, 3, "free memory", None),
            ({"curriculum.step": 1}, 2, "curriculum.step: unknown key", None),
            ({"engine.kind": "sglang"}, 2, "engine.options: expected either url", None),
            ({"engine.kind": "sglang", "engine.options.url": "http://x"}, 2, "engine.exact: expected false", None),
            (
                {"engine.kind": "nothing"},
                2,
                "engine.kind: headrace.engines: expected one of embedded, sglang, vllm",
                None,
            ),
        ):
            settings = [f"{key}={json.dumps(value)}" for key, value in (TINY | changes).items()]
            with monkeypatch.context() as patched:
                if path is not None:
                    patched.setenv("PATH", str(path))
                answer, said = refused(str(DEMO), *(word for entry in settings for word in ("--set", entry)))
            assert answer == code and says in said, said
    (tmp_path / "runs/old").mkdir(parents=True, exist_ok=True)
    (tmp_path / "runs/old/report.json").write_text('{"steps": 4, "wall_s": 1.0}')
    answer, said = refused(str(DEMO), "--set", "run.id=old", "--set", "curriculum.steps=4")
    assert answer == 2 and "run old has ended after 4 steps and would train nothing: set [curriculum] steps" in said
    (tmp_path / "bad.toml").write_text("[curriculum]\nsteps = many\n")
    answer, said = refused("bad.toml")
    assert answer == 2 and "line 2" in said, said


def test_a_broker_that_cannot_hold_the_versions_is_refused_before_any_actor_starts(tmp_path: Path) -> None:
    changes = {"bus.stream_gib.weights": 0.0004, "weights.anchor_every": 10, "weights.collect_chains": 3}
    settings = [f"{key}={json.dumps(value)}" for key, value in (TINY | changes).items()]
    done = command(tmp_path, "up", str(DEMO), *(word for entry in settings for word in ("--set", entry)))
    assert done.returncode == 2 and one_sentence(done.stderr), done.stderr
    assert re.search(
        r"the stream HR_WEIGHTS may hold 429496 bytes, and the run needs \d+ there: 4 chains of deltas to versions of "
        r"\d+ bytes; set bus\.stream_gib\.weights or weights\.collect_chains = 2 \(3\)",
        done.stderr,
    ), done.stderr
    logs = tmp_path / "runs" / "latest" / "logs"
    assert logs.is_dir() and not list(logs.iterdir())
