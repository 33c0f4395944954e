"""The generated manifests, played by `podman kube play` with the project's image: each pod is a container group in a
network of its own with a host name of its own. A version is served in each pod, a pod is replaced, and a user is purged
after it.

podman 4.3 has no scheduler, no DNS of services and no StatefulSet, and its secrets, subPath mounts, named ports and
probes do not work; `played` puts the same contents, names and ports there by other means. Images, commands, users,
claims and volumes come from the manifests.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.bus.broker import credentials
from headrace.cli.main import main
from headrace.launch.deploy.kubernetes import USER
from tests.launch.deploy.test_slurm import written
from tests.support.paths import ROOT

ARCHIVES = sorted((ROOT / "dist").glob("headrace-*.oci.tar"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, ("podman", "unshare", "nsenter", "ip"))) or not ARCHIVES,
        reason="needs root, podman and an image in dist/: apt-get install podman, make image",
    ),
]
PODS = ("trainer", "curriculum", "environment", "judge", "gateway", "rollout", "rollout-2")
"""Each on a host of its own, and the broker on another; `rollout-2` is what a second replica of `rollout` is."""
HOSTS = {f"headrace-{name}": number for number, name in enumerate(PODS, 2)} | {"nats": 1}
CONF = """
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
[containers]
default_ulimits = ["nofile={files}:{files}", "nproc={processes}:{processes}"]
"""
OUTSIDE = """
set -e
umount /sys/fs/cgroup/unified 2>/dev/null || true  # crun refuses machines that have both versions
mount -t tmpfs none /run
mkdir /run/netns
mount --bind {folder}/hosts /etc/hosts
ip link set lo up
ip link add bridge type bridge
ip addr add 10.98.0.254/24 dev bridge
ip link set bridge up
podman $STORE pull -q oci-archive:{archive}
touch {folder}/ready
sleep infinity
"""
POD = """
set -e
ip netns add $1
ip link add port$2 type veth peer name eth0 netns $1
ip link set port$2 master bridge up
ip -n $1 link set lo up
ip -n $1 addr add 10.98.0.$2/24 dev eth0
ip -n $1 link set eth0 up
"""
SEEN = """
import asyncio, json, sys
from headrace.bus.connection import Bus
from headrace.messages.subjects import EVENT
from headrace.messages.weights import WeightsStaged, WeightsSwapped

async def main(seeds, after, wanted):
    bus = await Bus.connect("nats://nats:4222", role="operator", credentials=seeds)
    if after < 0:
        print(await bus.last_seq("HR_EVENT"))
        return
    staged, swapped, hashes = set(), set(), {}
    async with asyncio.timeout(300):
        async for received in bus.follow("HR_EVENT", EVENT.where(run="r1"), start=after + 1):
            message = received.message
            if isinstance(message, WeightsStaged):
                staged.add(message.node)
                hashes.setdefault(message.version, set()).add(message.state_hash)
            elif isinstance(message, WeightsSwapped) and message.version > 1:
                swapped.add(message.node)
            if wanted <= staged & swapped:
                break
    print(json.dumps({"swapped": sorted(swapped), "same": all(len(each) == 1 for each in hashes.values())}))

asyncio.run(main(sys.argv[1], int(sys.argv[2]), set(sys.argv[3:])))
"""
SESSION = """
import json, sys, time, urllib.error, urllib.request
url, key = sys.argv[1:]


def call(path, body=None):
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    asked = urllib.request.Request(f"{url}{path}", body and json.dumps(body).encode(), headers)
    for _ in range(600):
        try:
            with urllib.request.urlopen(asked, timeout=300) as answer:
                return json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError:
            raise
        except urllib.error.URLError:
            time.sleep(0.1)  # a pod that has just started does not listen yet

made = call("/v1/sessions", {"user": "ada", "suite": "generated/heldout", "task": "7"})
where, state = f"/v1/sessions/{made['session']}", "queued"
while state in ("queued", "running"):
    state = call(f"{where}?wait=30")["state"]
"""


def played(folder: Path, item: dict[str, Any], archive: str) -> dict[str, Any]:
    """A Deployment or StatefulSet as podman 4.3 plays it."""
    item = json.loads(json.dumps(item)) | {"kind": "Deployment"}
    spec = item["spec"]["template"]["spec"]
    claims = item["spec"].pop("volumeClaimTemplates", [])
    spec["volumes"] += [_claim(claim["metadata"]["name"]) for claim in claims]
    spec["hostAliases"] = [{"ip": f"10.98.0.{HOSTS['nats']}", "hostnames": ["nats"]}]
    files = set[str]()
    for container in spec["containers"]:
        container["image"] = archive
        for name in ("ports", "startupProbe", "livenessProbe", "readinessProbe"):
            container.pop(name, None)
        for mount in container["volumeMounts"]:
            if file := mount.pop("subPath", ""):
                mount["name"] = file.replace(".", "-")
                files.add(file)
    for volume in spec["volumes"]:
        if secret := volume.pop("secret", None):
            names = [each["key"] for each in secret.get("items", [])] or os.listdir(folder / "credentials")
            place = folder / f"secret-{item['metadata']['name']}"
            place.mkdir()
            for name in names:
                shutil.copy(folder / "credentials" / name, place)
                os.chown(place / name, USER, USER)
            volume["hostPath"] = {"path": str(place)}
    spec["volumes"] = [volume for volume in spec["volumes"] if "configMap" not in volume] + [
        {"name": file.replace(".", "-"), "hostPath": {"path": str(folder / "out" / file), "type": "File"}}
        for file in sorted(files)
    ]
    return item


def _claim(name: str) -> dict[str, Any]:
    return {"name": name, "persistentVolumeClaim": {"claimName": name}}


class Cluster:
    """podman and the hosts of its pods, in one namespace of processes, mounts and networks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.chmod(0o755)
        items = json.loads((folder / "out" / "headrace.json").read_text())["items"]
        (config,) = [item for item in items if item["kind"] == "ConfigMap"]
        for name, text in config["data"].items():
            (folder / "out" / name).write_text(text)
        made = {item["metadata"]["name"]: item for item in items if "template" in item.get("spec", {})}
        second = json.loads(json.dumps(made["headrace-rollout"]).replace("headrace-rollout", "headrace-rollout-2"))
        for name, item in (made | {"headrace-rollout-2": second}).items():
            (folder / f"{name}.json").write_text(json.dumps(played(folder, item, "localhost/headrace:tests")))
        claims = [item for item in items if item["kind"] == "PersistentVolumeClaim"]
        for claim in made["nats"]["spec"]["volumeClaimTemplates"]:
            claims.append({"apiVersion": "v1", "kind": "PersistentVolumeClaim", **claim})
        (folder / "claims.json").write_text("\n---\n".join(map(json.dumps, claims)))
        hosts = "".join(f"10.98.0.{number} {name}\n" for name, number in HOSTS.items())
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        files, processes = (
            min(most, resource.getrlimit(kind)[1] - 1)
            for kind, most in ((resource.RLIMIT_NOFILE, 16384), (resource.RLIMIT_NPROC, 30000))
        )
        (folder / "containers.conf").write_text(CONF.format(files=files, processes=processes))
        (folder / "outside.sh").write_text(OUTSIDE.format(folder=folder, archive=ARCHIVES[-1].resolve()))
        (folder / "pod.sh").write_text(POD)
        self.store = ("--root", f"{folder}/store", "--runroot", "/run/pods", "--tmpdir", "/run/podman")
        self.env = os.environ | {"CONTAINERS_CONF": f"{folder}/containers.conf", "TMPDIR": str(folder)}
        words = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        with (folder / "outside.log").open("wb") as log:
            self.process = subprocess.Popen(
                [*words, "bash", folder / "outside.sh"],
                env=self.env | {"STORE": " ".join(self.store)},
                stdout=log,
                stderr=log,
            )
        while not (folder / "ready").exists():
            assert self.process.poll() is None, (folder / "outside.log").read_text()
            time.sleep(0.2)  # nothing tells when a shell has made a file
        image = (folder / "outside.log").read_text().split()[-1]
        self.podman("tag", image, "localhost/headrace:tests")
        self.podman("kube", "play", str(folder / "claims.json"))

    def run(self, *words: str) -> str:
        """Standard output of a command on the machine that has the hosts."""
        (outer,) = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        into = ("nsenter", "--target", outer, "--mount", "--pid", "--net", f"--wd={ROOT}")
        done = subprocess.run([*into, *words], env=self.env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{words}: {done.stderr[-3000:]}{done.stdout[-3000:]}"
        return done.stdout

    def podman(self, *words: str) -> str:
        return self.run("podman", *self.store, *words)

    def start(self, name: str) -> None:
        """Start a pod on a new host."""
        self.run("bash", str(self.folder / "pod.sh"), name, str(HOSTS[name]))
        play = " ".join(("podman", *self.store, "kube", "play", "--network", "host", f"{self.folder}/{name}.json"))
        self.run("nsenter", f"--net=/run/netns/{name}", "unshare", "--uts", "sh", "-c", f"hostname {name} && {play}")

    def replace(self, name: str) -> None:
        """Kill a pod with its host and what it had in its own files, and start another."""
        self.podman("pod", "rm", "--force", "--time", "0", f"{name}-pod-0")
        self.run("ip", "link", "del", f"port{HOSTS[name]}")
        self.run("ip", "netns", "del", name)
        self.start(name)

    def headrace(self, *words: str) -> str:
        return self.run(str(Path(sys.executable).parent / "headrace"), *words)

    def logs(self) -> str:
        """The ends of the logs of all containers."""
        names = self.podman("ps", "--all", "--format", "{{.Names}}").split()
        return "\n".join(f"== {name}\n{self.podman('logs', '--tail', '5', name)[-2000:]}" for name in names)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    changes = {"production.enabled": True, "weights.full_snapshots_url": "/snapshots", "curriculum.steps": 400}
    written(tmp_path, "nats://nats:4222", changes)
    text = (tmp_path / "run.toml").read_text()
    (tmp_path / "run.toml").write_text(text.replace(f'dir = "{tmp_path}/runs"', 'dir = "runs"'))
    credentials.write(tmp_path / "credentials")
    assert main(["deploy", "k8s", str(tmp_path / "out"), "--config", str(tmp_path / "run.toml")]) == 0
    made = Cluster(tmp_path)
    try:
        yield made
    except BaseException:
        sys.stderr.write(made.logs())
        raise
    finally:
        made.podman("pod", "rm", "--all", "--force", "--time", "0")
        made.process.kill()  # the kernel ends its namespace of processes with it
        made.process.wait(60)


def test_a_version_is_served_in_each_pod_a_pod_is_replaced_and_a_user_is_purged(cluster: Cluster) -> None:
    seeds, here = str(cluster.folder / "credentials"), str(cluster.folder / "here.toml")
    cluster.start("nats")
    cluster.headrace("bus", "declare", "--url", "nats://nats:4222", "--credentials", seeds)
    for name in PODS:
        cluster.start(f"headrace-{name}")
    python = (sys.executable, "-c", SEEN, seeds)
    samplers = ["headrace-rollout-pod-0", "headrace-rollout-2-pod-0"]
    seen = json.loads(cluster.run(*python, "0", *samplers))
    assert set(samplers) <= set(seen["swapped"]) and seen["same"], seen

    key = cluster.headrace("keys", "--add", "default", "--training", "--config", here).split()[-1]
    session = (sys.executable, "-c", SESSION, "http://headrace-gateway:8750", key)
    cluster.run(*session)

    for name in ("headrace-rollout", "headrace-gateway"):
        before = cluster.run(*python, "-1").strip()
        cluster.replace(name)
        if name == "headrace-rollout":
            again = json.loads(cluster.run(*python, before, samplers[0]))
            assert samplers[0] in again["swapped"] and again["same"]
    cluster.run(*session)  # with the key that the first pod knew

    cluster.headrace("purge", "r1", "ada", "--config", here, "--output", f"{cluster.folder}/purge")
    statement = json.loads(json.loads((cluster.folder / "purge").read_text())["statement"])
    counted = {each["stream"]: each["count"] for each in statement["records"] if each["count"]}
    assert {"KV_HR_SESSION", "HR_EVENT"} <= set(counted), counted
    assert not statement["unreached"], "actors of pods that are gone are not waited for"
    reached = {name.rpartition(" on ")[2] for name in statement["reached"]}
    assert set(samplers) <= reached, reached
