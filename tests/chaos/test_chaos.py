"""`headrace chaos`: every process recovers from every kind of fault, and the audit balances."""

import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from headrace.bus.runtime import ack_waits
from headrace.chaos import faults
from headrace.chaos.faults import BROKER, MACHINE, PlannedFault
from headrace.chaos.figures import MACHINE_S, FaultResult, Quantiles, losses, machine_target, recovery
from headrace.chaos.run import lengthened
from headrace.config import Config, load
from headrace.replay.audit import Attempts, AuditReport
from tests.launch.test_up import DEMO, FEW, HEADRACE, TINY, Up, command, headrace, one_sentence, up


def demo(**changes: Any) -> Config:
    return load(DEMO, [f"{key}={json.dumps(value)}" for key, value in changes.items()])


async def fault_report(started: Up) -> dict[str, Any]:
    """The line that the command ends with."""
    assert started.process.stdout is not None
    lines = started.process.stdout.read().splitlines()
    code, said = await started.end(600.0)
    assert (code, said) == (0, ""), (said, lines[-1:])
    report: dict[str, Any] = json.loads(lines[-1])
    return report


TWO = {"kill_trainer", "kill_broker"}
THREE = {"processes.groups": [FEW["processes.groups"][0], ["rollout", "weight_sender", "weight_receiver"], ["trainer"]]}
"""Three processes of actors: the trainer's death is not that of the others."""
SEVEN = TWO | {"kill_curriculum", "cut_rollout", "kill_environment", "cut_judge", "stop_weight_sender"}


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("seed", "faults", "restarted", "groups"),
    [
        (69, TWO, {"nats-server", "trainer"}, THREE),
        (13, SEVEN, {"curriculum", "environment", "nats-server", "trainer"}, {}),
    ],
    ids=["two", "seven"],
)
async def test_processes_fail_and_the_audit_balances(
    tmp_path: Path, seed: int, faults: set[str], restarted: set[str], groups: dict[str, Any]
) -> None:
    """Each seed plans every fault of its set once; seven are one fault for every process of the run."""
    words = (*HEADRACE, "chaos", str(DEMO), "--kills", str(len(faults)), "--seed", str(seed))
    async with up(tmp_path, *words, **groups, **{"curriculum.steps": 3}) as started:
        line = await fault_report(started)
    audit = line["audit"]
    assert (line["kills"], line["not_recovered"], audit["duplicates"], line["losses"]) == (len(faults), 0, 0, 0)
    assert {name for name, count in line["faults"].items() if count == 1} >= faults, line["faults"]
    assert line["connections_cut"] >= sum("cut" in name for name in faults)
    assert audit["balanced"] and audit["trained"] == audit["issued"]
    assert all(target["met"] for target in line["targets"].values()) and line["conditions"]["cores"]
    report = json.loads((started.run / "report.json").read_text())
    assert {text.split()[0] for text in report["restarts"]} == restarted
    assert report["steps"] == line["steps"] == max(3, len(faults)) and report["max_abs_dlp"] == 0.0
    code, ledger = headrace(tmp_path, "audit", "latest")
    assert code == 0 and ledger == report["ledger"]


@pytest.mark.slow
@pytest.mark.vm
@pytest.mark.anyio
@pytest.mark.timeout(1200)
async def test_twenty_faults_over_real_machines(tmp_path: Path) -> None:
    changes = {
        "environment.backend": "qemu",
        "environment.cache_dir": str(DEMO.parents[1] / ".cache" / "headrace"),
        "production.enabled": True,
        "curriculum.group_size": 8,
        "curriculum.steps": 12,
        "evaluation.after": True,
        "evaluation.heldout_tasks": 8,
        "evaluation.unseen_tasks": 8,
    }
    async with up(tmp_path, *HEADRACE, "chaos", str(DEMO), "--kills", "20", "--seed", "2", **changes) as started:
        line = await fault_report(started)
    assert (line["kills"], line["audit"]["duplicates"], line["losses"]) == (20, 0, 0) and line["audit"]["balanced"]
    assert sum(line["faults"].get(f"{fault}_machine", 0) for fault in ("kill", "stop")) >= 3
    for words, says in (
        (("weights", "log", "latest", "--verify"), "holds"),
        (("replay", "latest", "--steps", "5"), '"bitwise_equal":true'),
        (("eval", "--policy", "latest", "--suite", "generated/heldout", "--tasks", "8"), '"tasks": 8'),
    ):
        done = command(tmp_path, *words, *(("--set", "environment.backend=process") if "eval" in words else ()))
        assert done.returncode == 0 and says in done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.timeout(300)
async def test_a_run_that_takes_too_long_is_ended_and_its_books_are_read(tmp_path: Path) -> None:
    words = (*HEADRACE, "chaos", str(DEMO), "--kills", "200", "--seed", "1", "--minutes", "0.2")
    async with up(tmp_path, *words) as started:
        assert started.process.stdout is not None
        lines = started.process.stdout.read().splitlines()
        code, said = await started.end(300.0)
    line = json.loads(lines[-1])
    assert code == 1 and one_sentence(said) and "not over after 0.2 minutes" in said
    assert line["ended"] and line["kills"] < 200 and not line["targets"]["kills"]["met"]
    assert line["audit"]["balanced"] and line["audit"]["duplicates"] == 0


def test_a_seed_determines_the_plan_and_every_target_has_every_fault() -> None:
    config = demo()
    only: list[faults.Fault] = ["kill"]
    kills = faults.plan(config, 60, 1, only)
    assert {one.fault for one in kills} == {"kill"} and {one.target for one in kills} == {*faults.targets(config)}
    planned = faults.plan(config, 200, 1)
    assert planned == faults.plan(config, 200, 1) != faults.plan(config, 200, 2)
    assert [one.due for one in planned] == sorted(one.due for one in planned) and planned[-1].due <= faults.LATEST
    hit = Counter((one.target, one.fault) for one in planned)
    assert {target for target, _ in hit} == {
        *("curriculum", "gateway", "environment", "judge", "rollout", "rollout-product", "trainer", "weight_sender"),
        *(BROKER, MACHINE),
    }
    for target in faults.targets(config):
        assert all(hit[target, fault] for fault in faults.FAULTS.get(target, faults.ACTOR_FAULTS))
    assert (BROKER, "cut") not in hit and (MACHINE, "cut") not in hit
    deal = len(faults.targets(config))
    assert sorted(one.target for one in planned[:deal]) == sorted(faults.targets(config))
    pauses = [one.asleep_s for one in planned if one.fault == "stop" and one.target not in (BROKER, MACHINE)]
    assert min(pauses) < 4.0 and max(pauses) > 30.0  # some sleep past the wait for an acknowledgement


def test_only_the_processes_of_the_run_are_targets() -> None:
    assert MACHINE not in faults.targets(demo(**TINY))
    assert BROKER not in faults.targets(demo(**{"bus.url": "nats://10.0.0.1:4222"}))
    assert "gateway" not in faults.targets(demo(**{"production.enabled": False}))


def test_a_run_is_made_long_enough() -> None:
    config = demo()
    assert lengthened(config, 200) is config
    assert lengthened(demo(**TINY), 200).curriculum.steps == 200  # eight slots a step, eight scores a fault


def test_a_connection_is_cut_from_outside_and_no_other() -> None:
    with socket.create_server(("127.0.0.1", 0)) as near, socket.create_server(("127.0.0.1", 0)) as far:
        ports = [one.getsockname()[1] for one in (near, far)]
        code = (
            "import socket\n"
            f"cut, kept = (socket.create_connection(('127.0.0.1', port)) for port in {ports})\n"
            "assert cut.recv(1) == b''\n"
            "kept.sendall(b'k')\n"
        )
        with subprocess.Popen([sys.executable, "-c", code]) as other:
            first, _ = near.accept()
            second, _ = far.accept()
            assert faults.cut(other.pid, ports[:1]) == 1
            assert first.recv(1) == b"" and second.recv(1) == b"k"
            assert other.wait() == 0
            first.close()
            second.close()
    assert faults.cut(other.pid, ports) == 0


def test_machines_are_found_among_all_descendants(tmp_path: Path) -> None:
    program = tmp_path / "qemu-system-none"
    program.symlink_to("/bin/sh")
    pipe, end = os.pipe()
    # The program itself prints the line: its parent goes on before the kernel has set the new command line.
    code = f"import subprocess; subprocess.run([{str(program)!r}, '-c', 'echo started; read line'])"
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    with subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=subprocess.PIPE) as between:
        assert between.stdout is not None and between.stdout.readline()
        try:
            [machine] = faults.machines(between.pid)
            assert machine in faults.machines(os.getpid())  # beside those that other tests may have
            os.kill(machine, 9)
        finally:  # or a failure here waits for ever
            os.close(end)
            os.close(pipe)


def test_the_attempts_of_a_killed_actor_get_a_machine_within_the_target() -> None:
    """When both rollout actors and a machine die at once, nobody asks for a machine before the broker redelivers."""
    assert ack_waits.WORK_S < MACHINE_S


def test_recovery_is_told_by_kind() -> None:
    def one(target: str, fault: faults.Fault, seconds: float | None, working: float | None = None) -> FaultResult:
        planned = PlannedFault(target, fault, 0.0, 0.0)
        return FaultResult(planned=planned, at=time.time(), recovered_s=seconds, working_s=working)

    fallen = [one("judge", "kill", float(number), 2.0 * number) for number in range(1, 101)]
    recoveries = recovery([*fallen, one(BROKER, "kill", 0.5), one(MACHINE, "stop", None)])
    assert recoveries.by_kind["kill"] == Quantiles(50.0, 99.0, 100.0) and recoveries.by_kind["broker_kill"].p99_s == 0.5
    assert recoveries.by_kind["machine_stop"].p50_s is None and recoveries.all.p50_s == 50.0
    assert recoveries.at_work_again.p50_s == 100.0 and (recoveries.slowest_kind, recoveries.slowest_s) == (
        "kill",
        100.0,
    )


@pytest.mark.parametrize(("seconds", "met"), [((0.3, 14.9), True), ((0.3, 124.0), False), ((0.3, None), False)])
def test_a_machine_that_comes_back_late_misses_the_target(seconds: tuple[float | None, ...], met: bool) -> None:
    planned = PlannedFault(MACHINE, "kill", 0.0, 0.0)
    results = [FaultResult(planned=planned, at=0.0, recovered_s=each) for each in seconds]
    assert machine_target(results)["machine_kill_max_s"].met is met
    assert machine_target([]) == {}


@pytest.mark.parametrize(
    ("issued", "in_flight", "running", "lost"),
    [(10, 0, 0, 0), (11, 0, 0, 1), (9, 0, 0, 1), (11, 1, 0, 1), (10, 0, 1, 2)],
)
def test_a_slot_that_ends_nowhere_is_a_loss(issued: int, in_flight: int, running: int, lost: int) -> None:
    report = AuditReport(
        balanced=True,
        issued=issued,
        trained=7,
        dropped={"infra": 3},
        in_flight=in_flight,
        attempts=Attempts(started=10, kept=7, lost={"sandbox_lost": 3}, running=running),
        lanes={},
        staleness_max=0,
        staleness_bound=1,
        duplicates=0,
    )
    assert losses(report) == lost
