"""The generated job on a real Slurm cluster of two nodes: ranks of both train, it is requeued in the middle, and
continues.

Each node has a slurmd in a network of its own with a host name of its own, and both reach each other by a bridge. They
and slurmctld are in one namespace of processes and one outer network, so their fixed ports collide with nothing and all
of them end with the test. Both nodes see the job's folder, as in a cluster.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
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
        os.geteuid() != 0
        or not all(map(shutil.which, ("slurmctld", "slurmd", "sbatch", "munged", "unshare", "nsenter"))),
        reason="needs root and Slurm: apt-get install slurmctld slurmd slurm-client munge",
    ),
]
STEPS = 6
CONF = """
ClusterName=tests
SlurmctldHost=n1
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
MpiDefault=none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
KillWait=30
MinJobAge=600
AuthInfo=socket=/run/munge.socket.2
NodeName=n[1-2] CPUs={cpus} RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE
"""
OUTSIDE = """
set -e
ip link set lo up
ip link add bridge type bridge
ip link set bridge up
for node in 1 2; do
  unshare --net --uts --mount bash {folder}/node.sh $node &
  until [ "$(readlink /proc/$!/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do sleep 0.05; done
  ip link add port$node type veth peer name eth0 netns $!
  ip link set port$node master bridge up
  echo $! > {folder}/node$node.pid
done
wait
"""
NODE = """
set -e
hostname n$1
mount --bind {folder}/hosts /etc/hosts
ip link set lo up
until ip link set eth0 up 2>/dev/null; do sleep 0.05; done
ip addr add 10.97.0.$1/24 dev eth0
mount -t tmpfs none /run
munged --force --key-file={folder}/munge.key --socket=/run/munge.socket.2 --pid-file=/run/munged.pid \
  --seed-file=/run/munge.seed --log-file={folder}/munged-$1.log
if [ $1 = 1 ]; then slurmctld -D -f {conf} & fi
exec slurmd -D -f {conf} -N n$1
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
                bus = await Bus.connect("nats://n1:4222", role="operator", credentials=seeds)
                await bus.last("HR_STEP", s.STEP.at(run="r1"))
                break
            except BusError:  # the job has not started its broker, or not declared its streams
                await asyncio.sleep(0.2)
    async for received in bus.follow("HR_STEP", s.STEP.at(run="r1")):
        if isinstance(received.message, StepDone) and received.message.step == wanted:
            return

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


NODES = """
import asyncio, json, sys
from headrace.bus.connection import Bus
from headrace.messages.subjects import EVENT
from headrace.messages.weights import WeightsStaged

async def main(seeds):
    bus = await Bus.connect("nats://n1:4222", role="operator", credentials=seeds)
    nodes = {"staged": set(), "swapped": set()}
    hashes = {}
    for kind in nodes:
        async for received in bus.history("HR_EVENT", EVENT.where(run="r1", type=f"weights_{kind}")):
            message = received.message
            nodes[kind].add(message.node)
            if isinstance(message, WeightsStaged):
                hashes.setdefault(message.version, set()).add(message.state_hash)
    same = all(len(each) == 1 for each in hashes.values())
    print(json.dumps({kind: sorted(names) for kind, names in nodes.items()} | {"versions": same}))

asyncio.run(main(sys.argv[1]))
"""


class Cluster:
    """A running cluster of two nodes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("state", "spool-n1", "spool-n2"):
            (folder / name).mkdir()
        self.conf = folder / "slurm.conf"
        self.conf.write_text(CONF.format(folder=folder, cpus=os.cpu_count()))
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o400)
        (folder / "hosts").write_text("127.0.0.1 localhost\n10.97.0.1 n1\n10.97.0.2 n2\n")
        for name, text in (("outside.sh", OUTSIDE), ("node.sh", NODE)):
            (folder / name).write_text(text.format(folder=folder, conf=self.conf))
        binaries = Path(sys.executable).parent
        self.env = os.environ | {"SLURM_CONF": str(self.conf), "PATH": f"{binaries}:{os.environ['PATH']}"}
        self.env["TMPDIR"] = str(folder)  # its processes have numbers of their own, and so have folders in /tmp

        words = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        with (folder / "daemons.log").open("wb") as log:
            self.process = subprocess.Popen(
                [*words, "bash", folder / "outside.sh"], env=self.env, stdout=log, stderr=log
            )

    def run(self, *words: str, cwd: Path = ROOT) -> str:
        """Standard output of a command on the first node."""
        (outer,) = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        into = ("nsenter", "--target", outer, "--mount", "--pid", "--")
        node = ("nsenter", "--target", self.number(), "--net", "--uts", "--mount", f"--wd={cwd}")
        done = subprocess.run([*into, *node, *words], env=self.env, capture_output=True, text=True)
        assert done.returncode == 0, f"{words}: {done.stderr}{done.stdout}\n{self.logs()}"
        return done.stdout

    def number(self) -> str:
        """The first node's process, as the cluster numbers it."""
        file = self.folder / "node1.pid"
        for _ in range(600):
            if file.exists() and (text := file.read_text().strip()):
                return text
            time.sleep(0.1)  # nothing tells when a shell has written it
        raise AssertionError(self.logs())

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


def written(folder: Path, url: str, changes: dict[str, Any]) -> None:
    """The configuration of a tiny run in a job's folder: run.toml as a deployment needs it, and here.toml, which names
    the credentials where they are."""
    sections: dict[str, dict[str, Any]] = tomllib.loads((ROOT / "deploy" / "demo.toml").read_text())
    of_job = {
        "run.id": "r1",
        "run.dir": str(folder / "runs"),
        "bus.url": url,
        "bus.credentials": "/etc/headrace/credentials",
        "trainer.device": "cpu",
        "production.enabled": False,
        "curriculum.steps": STEPS,
    }
    for key, value in (TINY | of_job | changes).items():
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
    ranks = {"trainer.mesh.shard": 2, "trainer.node_ranks": 1, "trainer.rendezvous": "0.0.0.0:29500"}
    written(job, "nats://n1:4222", ranks)
    seeds, binary = str(job / "credentials"), str(Path(sys.executable).parent / "headrace")
    words = ["deploy", "slurm", str(job), "--config", str(job / "run.toml"), "--binary", binary, "--nodes", "2"]
    assert main(words) == 0
    credentials.write(Path(seeds))
    number = re.findall(r"\d+", cluster.run("sbatch", "headrace.sbatch", cwd=job))[0]
    cluster.run(sys.executable, "-c", FOLLOW, seeds, "0")
    cluster.run("scontrol", "requeue", number)
    cluster.run(sys.executable, "-c", FOLLOW, seeds, str(STEPS - 1))
    state = cluster.run("scontrol", "show", "job", number)
    assert "Restarts=1" in state, state
    steps = cluster.run("scontrol", "show", "step", number)
    assert sum("NodeList=n2\n" in each for each in steps.split("StepId=")) == 1, (
        "the rank that joined, and what both nodes start"
    )
    report = json.loads(cluster.run(binary, "audit", "r1", "--config", str(job / "here.toml"), cwd=job))
    assert report["balanced"] and report["trained"] > 0, report
    seen = json.loads(cluster.run(sys.executable, "-c", NODES, seeds))
    assert seen == {"staged": ["n1", "n2"], "swapped": ["n1", "n2"], "versions": True}, "each node has a receiver"
    cluster.run("scancel", number)
