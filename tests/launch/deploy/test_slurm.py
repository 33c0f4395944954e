"""The generated job on a real Slurm cluster of one node: it trains, is requeued in the middle, and continues.

slurmctld, slurmd and the job are in namespaces of their own (network, processes, host name), so their fixed ports
collide with nothing and all of them end with the test.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tiny_run import TINY
from headrace.bus.broker import credentials
from headrace.cli.main import main
from tests.support.paths import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, ("slurmctld", "slurmd", "sbatch", "unshare", "nsenter"))),
        reason="needs root and Slurm: apt-get install slurmctld slurmd slurm-client",
    ),
]
STEPS = 6
CONF = """
ClusterName=tests
SlurmctldHost=localhost
SlurmUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
MpiDefault=none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
KillWait=30
MinJobAge=600
NodeName=localhost CPUs={cpus} RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=localhost Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE
"""
INSIDE = """
set -e
hostname localhost
ip link set lo up
# Slurm looks up names with AI_ADDRCONFIG, which needs an address besides the loopback's.
ip link add one type veth peer name other
ip addr add 10.97.0.1/30 dev one
ip link set one up
ip link set other up
slurmctld -D -f {conf} &
exec slurmd -D -f {conf} -N localhost
"""
FOLLOW = """
import asyncio, sys
from headrace.bus.connection import Bus
from headrace.bus.errors import BusError
from headrace.messages import subjects as s
from headrace.messages.training import StepDone

async def main(seeds, wanted):
    async with asyncio.timeout(300):
        while True:
            try:
                bus = await Bus.connect("nats://localhost:4222", role="operator", credentials=seeds)
                await bus.last("HR_STEP", s.STEP.at(run="r1"))
                break
            except BusError:  # the job has not started its broker, or not declared its streams
                await asyncio.sleep(0.2)
    async for received in bus.follow("HR_STEP", s.STEP.at(run="r1")):
        if isinstance(received.message, StepDone) and received.message.step == wanted:
            return

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


class Cluster:
    """A running cluster of one node."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("state", "spool"):
            (folder / name).mkdir()
        self.conf = folder / "slurm.conf"
        self.conf.write_text(CONF.format(folder=folder, cpus=os.cpu_count()))
        binaries = Path(sys.executable).parent
        self.env = os.environ | {"SLURM_CONF": str(self.conf), "PATH": f"{binaries}:{os.environ['PATH']}"}
        self.env["TMPDIR"] = str(folder)  # its processes have numbers of their own, and so have folders in /tmp

        words = ("unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        with (folder / "daemons.log").open("wb") as log:
            self.process = subprocess.Popen(
                [*words, "bash", "-c", INSIDE.format(conf=self.conf)], env=self.env, stdout=log, stderr=log
            )

    def run(self, *words: str, cwd: Path = ROOT) -> str:
        """Standard output of a command inside."""
        (inside,) = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        enter = ("nsenter", "--target", inside, "--net", "--uts", "--mount", "--pid", f"--wd={cwd}")
        done = subprocess.run([*enter, *words], env=self.env, capture_output=True, text=True)
        assert done.returncode == 0, f"{words}: {done.stderr}{done.stdout}\n{self.logs()}"
        return done.stdout

    def logs(self) -> str:
        """The ends of all logs."""
        return "\n".join(f"{path}: {path.read_text()[-1500:]}" for path in sorted(self.folder.rglob("*.log")))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    (tmp_path / "slurm").mkdir()
    made = Cluster(tmp_path / "slurm")
    yield made
    made.process.kill()  # the kernel ends its namespace of processes with it, the job's too
    made.process.wait(60)


def written(folder: Path) -> None:
    """The configuration of a tiny run in a job's folder: run.toml as a deployment needs it, and here.toml, which names
    the credentials where they are."""
    sections: dict[str, dict[str, Any]] = tomllib.loads((ROOT / "deploy" / "demo.toml").read_text())
    of_job = {
        "run.id": "r1",
        "run.dir": str(folder / "runs"),
        "bus.url": "nats://localhost:4222",
        "bus.credentials": "/etc/headrace/credentials",
        "trainer.device": "cpu",
        "production.enabled": False,
        "curriculum.steps": STEPS,
    }
    for key, value in (TINY | of_job).items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    lines = []
    for section, entries in sections.items():
        lines += [f"[{section}]", *(f"{name} = {json.dumps(value)}" for name, value in entries.items())]
    text = "\n".join(lines) + "\n"
    (folder / "run.toml").write_text(text)
    (folder / "here.toml").write_text(text.replace("/etc/headrace/credentials", str(folder / "credentials")))


def test_the_job_trains_is_requeued_and_continues(cluster: Cluster, tmp_path: Path) -> None:
    job = tmp_path / "job"
    job.mkdir()
    written(job)
    seeds, binary = str(job / "credentials"), str(Path(sys.executable).parent / "headrace")
    words = ["deploy", "slurm", str(job), "--config", str(job / "run.toml"), "--binary", binary, "--nodes", "1"]
    assert main(words) == 0
    credentials.write(Path(seeds))
    number = re.findall(r"\d+", cluster.run("sbatch", "headrace.sbatch", cwd=job))[0]
    cluster.run(sys.executable, "-c", FOLLOW, seeds, "0")
    cluster.run("scontrol", "requeue", number)
    cluster.run(sys.executable, "-c", FOLLOW, seeds, str(STEPS - 1))
    state = cluster.run("scontrol", "show", "job", number)
    assert "Restarts=1" in state, state
    report = json.loads(cluster.run(binary, "audit", "r1", "--config", str(job / "here.toml"), cwd=job))
    assert report["balanced"] and report["trained"] > 0, report
    cluster.run("scancel", number)
