"""Generated units, job, manifests: each is parsed by its own tool, or by its schema."""

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.bus.broker.server import CONF
from headrace.cli.main import main, parser
from headrace.config import ConfigError, load
from headrace.launch.deploy import kubernetes, plan, slurm, systemd
from headrace.policy.layout import sizes
from tests.support import model_folders
from tests.support.paths import ROOT

ANALYZE = shutil.which("systemd-analyze")
TOML = """
[run]
id = "r1"
[bus]
url = "nats://nats:4222"
credentials = "/etc/headrace/credentials"
[metrics]
host = "0.0.0.0"
port = 9400
[trainer]
device = "cuda"
"""


@pytest.fixture
def config(tmp_path: Path) -> Any:
    (tmp_path / "run.toml").write_text(TOML)
    return load(tmp_path / "run.toml")


@pytest.mark.parametrize("kind", ["systemd", "slurm", "k8s"])
def test_the_command_writes_what_it_names(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text(TOML)
    assert main(["deploy", kind, str(tmp_path / "out"), "--config", str(tmp_path / "run.toml")]) == 0
    named = capsys.readouterr().out.splitlines()
    assert sorted(named) == sorted(str(path) for path in (tmp_path / "out").iterdir()) and named


def test_the_manifests_name_the_image_of_this_version(tmp_path: Path) -> None:
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert package["project"]["dynamic"] == ["version"]  # so a wheel has the version of the package, and no other
    assert package["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "headrace.__version__"}
    (tmp_path / "run.toml").write_text(TOML)
    assert main(["deploy", "k8s", str(tmp_path / "out"), "--config", str(tmp_path / "run.toml")]) == 0
    images = re.findall(r'"image": "([^"]+)"', (tmp_path / "out/headrace.json").read_text())
    assert len(images) > 5 and set(images) == {f"headrace:{headrace.__version__}"}


def test_a_configuration_that_processes_cannot_share_is_refused(tmp_path: Path) -> None:
    for missing in ("id", "url", "credentials"):
        text = "\n".join(line for line in TOML.splitlines() if not line.startswith(missing))
        (tmp_path / "run.toml").write_text(text)
        with pytest.raises(ConfigError, match=missing):
            plan.processes(load(tmp_path / "run.toml"))


def test_every_process_is_deployed_with_arguments_that_parse(config: Any) -> None:
    for process in plan.processes(config):
        assert parser().parse_args(process.words).names == ",".join(process.actors)
    covered = {name for process in plan.processes(config) for name in process.actors}
    assert {"trainer", "rollout", "judge", "curriculum", "environment", "gateway"} <= covered


@pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is missing: apt-get install systemd")
def test_systemd_accepts_the_units_and_finds_them_hardened(config: Any, tmp_path: Path) -> None:
    assert ANALYZE is not None
    for name in ("headrace", "nats-server"):
        (tmp_path / name).symlink_to("/bin/true")
    for name, text in systemd.files(config, str(tmp_path / "headrace")).items():
        (tmp_path / name).write_text(text)
    units = sorted(path.name for path in tmp_path.glob("*.service"))
    done = subprocess.run(
        [ANALYZE, "verify", *(f"./{name}" for name in [*units, "headrace.target"])],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    complaints = [line for line in done.stderr.splitlines() if "headrace" in line]
    assert done.returncode == 0 and not complaints, done.stderr
    for name in ("headrace-environment.service", "headrace-trainer.service", "headrace-nats.service"):
        done = subprocess.run(
            [ANALYZE, "security", "--offline=true", "--threshold=40", f"./{name}"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-400:] + done.stderr


@pytest.mark.slow
def test_kubernetes_accepts_the_manifests_and_no_pod_is_privileged(config: Any) -> None:
    import kubernetes_validate  # takes seconds, which every worker would spend while it collects

    text = kubernetes.files(config, TOML, CONF.read_text(), "headrace:1")["headrace.json"]
    objects = json.loads(text)["items"]
    for each in objects:
        kubernetes_validate.validate(each, "1.34", strict=True)
    pods = [each["spec"]["template"]["spec"] for each in objects if each["kind"] in ("Deployment", "StatefulSet")]
    containers = [container for pod in pods for container in pod["containers"]]
    assert len(containers) == len(plan.processes(config)) + 2  # broker and page
    assert not any(pod["automountServiceAccountToken"] for pod in pods)
    assert not any(container["securityContext"]["privileged"] for container in containers)
    limits = {container["name"]: container["resources"]["limits"] for container in containers}
    assert limits["headrace-environment"]["devices.kubevirt.io/kvm"] == "1"
    assert limits["headrace-trainer"]["nvidia.com/gpu"] == "1"
    assert "SU" not in re.sub(r"[^A-Z2-7]", " ", text).split()  # no seed


def pods_of(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The pod of each process."""
    pods = [each["spec"]["template"]["spec"] for each in objects if each["kind"] == "Deployment"]
    return {container["name"].removeprefix("headrace-"): pod for pod in pods for container in pod["containers"]}


def seen(pod: dict[str, Any], path: str) -> dict[str, Any]:
    """The volume of a pod at a path, which all of its containers mount."""
    names = {
        mount["name"] for each in pod["containers"] for mount in each["volumeMounts"] if mount["mountPath"] == path
    }
    (volume,) = [each for each in pod["volumes"] if each["name"] in names]
    assert len([m for c in pod["containers"] for m in c["volumeMounts"] if m["mountPath"] == path]) == len(
        pod["containers"]
    )
    return {key: value for key, value in volume.items() if key != "name"}


RECIPE = ROOT / "deploy" / "gpu" / "kubernetes.toml"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe's model, with versions of 16 GiB and checkpoints of 100."""
    monkeypatch.chdir(tmp_path)
    model_folders.folder(tmp_path / "models", "Qwen3-8B")
    monkeypatch.setattr(sizes, "version_bytes", lambda config: 16 << 30)
    monkeypatch.setattr(sizes, "checkpoint_bytes", lambda config: 100 << 30)


@pytest.mark.usefixtures("model")
def test_who_reads_a_version_shares_files_and_host_with_who_writes_it() -> None:
    """In pods of their own the sender would not see the trainer's file, and no rollout actor a receiver's."""
    one = load(RECIPE)
    pods = pods_of(kubernetes.manifests(one, "", "", "headrace:1"))
    learner = pods["trainer"]
    assert pods["weight-sender"] is pods["weight-receiver"] is pods["rollout"] is learner
    assert pods["judge"] is not learner and pods["environment"] is not learner
    assert seen(learner, "/dev/shm") == {"emptyDir": {"medium": "Memory"}}
    assert seen(learner, "/var/lib/headrace") == {"persistentVolumeClaim": {"claimName": "headrace-state"}}
    assert seen(pods["judge"], "/var/lib/headrace") == {"emptyDir": {}}
    two = load(RECIPE, ["weights.full_snapshots_url=/mnt/weights"])
    objects = kubernetes.manifests(two, "", "", "headrace:1")
    pods = pods_of(objects)
    assert pods["weight-sender"] is pods["trainer"] is not pods["rollout"] is pods["weight-receiver"]
    for name in ("trainer", "rollout"):
        claim = {"persistentVolumeClaim": {"claimName": "headrace-snapshots"}}
        assert seen(pods[name], "/mnt/weights") == claim and seen(pods[name], "/dev/shm")
    (shared,) = [each for each in objects if each["metadata"]["name"] == "headrace-snapshots"]
    assert shared["spec"]["accessModes"] == ["ReadWriteMany"]


@pytest.mark.usefixtures("model")
def test_memory_disks_gpus_and_ports_come_from_the_run() -> None:
    config = load(RECIPE, ["metrics.enabled=true", "metrics.port=9400", "production.enabled=true"])
    objects = kubernetes.manifests(config, "", "", "headrace:1")
    learner = pods_of(objects)["trainer"]
    containers = {each["name"].removeprefix("headrace-"): each for each in learner["containers"]}
    limits = {name: each["resources"]["limits"] for name, each in containers.items()}
    assert limits["trainer"] == {"memory": f"{8 + 3 * 16 + 100}Gi", "nvidia.com/gpu": "4"}
    assert limits["rollout"]["nvidia.com/gpu"] == "4" and limits["weight-sender"] == {"memory": f"{8 + 3 * 16}Gi"}
    assert 'engine.options.server_devices=["0", "1", "2", "3"]' in containers["rollout"]["args"]
    ports = [port["containerPort"] for each in containers.values() for port in each["ports"]]
    assert len(set(ports)) == len(ports), "containers of a pod share its ports"
    for each in containers.values():
        parsed = parser().parse_args(each["args"])
        assert load(RECIPE, parsed.set).metrics.port in {port["containerPort"] for port in each["ports"]}
    (state,) = [each for each in objects if each["metadata"]["name"] == "headrace-state"]
    assert int(state["spec"]["resources"]["requests"]["storage"].removesuffix("Gi")) > 2 * 100
    gateway = pods_of(objects)["gateway"]["containers"][0]
    assert gateway["readinessProbe"]["httpGet"]["path"] == "/healthz"
    services = {each["metadata"]["name"]: each["spec"] for each in objects if each["kind"] == "Service"}
    port = services["headrace-gateway"]["ports"][0]["port"]
    assert (
        port
        == gateway["ports"][-1]["containerPort"]
        == load(RECIPE, parser().parse_args(gateway["args"]).set).production.port
    )
    assert port, "[production] port is 0, any free one, in this file"
    assert (
        f"http://headrace-gateway:{port}"
        in load(RECIPE, parser().parse_args(gateway["args"]).set).production.public_urls
    )


def test_a_job_has_the_gpus_of_trainer_and_servers_and_a_receiver_on_every_node() -> None:
    script = slurm.files(load(ROOT / "deploy" / "gpu" / "slurm.toml"), "headrace", 2)["headrace.sbatch"]
    assert "#SBATCH --gpus-per-node=8\n" in script
    steps = dict(re.findall(r"(--nodes=\d) .*headrace actor (weight_\w+)", script)[i][::-1] for i in range(2))
    assert steps == {"weight_sender": "--nodes=1", "weight_receiver": "--nodes=2"}


def test_the_job_is_a_shell_script_that_slurm_may_requeue(config: Any, tmp_path: Path) -> None:
    script = slurm.files(config, "/opt/headrace/bin/headrace", 3)["headrace.sbatch"]
    (tmp_path / "job").write_text(script)
    assert subprocess.run(["bash", "-n", "job"], cwd=tmp_path, capture_output=True).returncode == 0
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", script, re.MULTILINE))
    assert {"requeue", "nodes", "signal", "gpus-per-node"} <= set(options) and options["nodes"] == "3"
    assert "live page: http://127.0.0.1:8090/ on $FIRST" in script
    commands = re.findall(r"headrace (actor [\w,:]+) \\\n  --config", script)
    assert len(commands) == len(plan.processes(config))
    if shutil.which("sbatch"):
        done = subprocess.run(["sbatch", "--test-only", "job"], cwd=tmp_path, capture_output=True, text=True)
        assert "invalid" not in done.stderr.lower(), done.stderr


def test_the_notifier_speaks_to_systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    from headrace.launch.supervision.notify import notify

    assert not notify("READY=1")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "s"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "s"))
        assert notify("READY=1")
        assert listener.recv(64) == b"READY=1"


def test_every_kind_of_file_carries_the_live_page_and_the_brokers_web_socket(config: Any, tmp_path: Path) -> None:
    block = 'websocket { host: "%s", port: 8091, no_tls: true, allowed_origins: ["http://127.0.0.1:8090", '
    units, job = systemd.files(config, "headrace"), slurm.files(config, "headrace", 1)
    for files in (units, job):
        assert block % "127.0.0.1" in files["nats.conf"], "loopback, because it listens on the host itself"
    words = re.search(r"ExecStart=headrace (.*)", units["headrace-dashboard.service"])
    assert words is not None and parser().parse_args(words[1].split()).config == "/etc/headrace/run.toml"
    assert "headrace-dashboard.service" in units["headrace.target"]
    assert 'headrace dashboard \\\n  --config "$FOLDER/run.toml" --set bus.url="$URL"' in job["headrace.sbatch"]
    objects = kubernetes.manifests(config, TOML, plan.broker_conf(config, host="0.0.0.0"), "headrace:1")
    assert block % "0.0.0.0" in plan.broker_conf(config, host="0.0.0.0")
    served = {each["metadata"]["name"]: each["spec"]["ports"] for each in objects if each["kind"] == "Service"}
    assert {"name": "websocket", "port": 8091} in served["nats"] and served["headrace-dashboard"][0]["port"] == 8090
    off = load(_written(tmp_path), ["dashboard.enabled=false"])
    assert "headrace-dashboard.service" not in systemd.files(off, "x")
    assert "websocket {" not in systemd.files(off, "x")["nats.conf"]


def _written(folder: Path) -> Path:
    (folder / "run.toml").write_text(TOML)
    return folder / "run.toml"


def test_the_units_fit_broker_and_backend(tmp_path: Path) -> None:
    path = _written(tmp_path)
    units = systemd.files(load(path), "/opt/headrace/bin/headrace")
    (command,) = re.findall(r"ExecStart=(.*) \\", units["headrace-nats.service"])
    assert command == "/opt/headrace/bin/nats-server -c /etc/headrace/nats.conf -a nats -p 4222"
    assert "After=network-online.target headrace-nats.service\n" in units["headrace-trainer.service"], "drained first"
    assert "User=headrace\n" in units["headrace-environment.service"]
    containers = systemd.files(load(path, ["environment.backend=container"]), "headrace")
    assert re.findall("(?:User|RestrictNamespaces|Delegate)=.*", containers["headrace-environment.service"]) == [
        "User=root",
        "Delegate=yes",
    ]
    own_brokers = systemd.files(load(path, ["bus.url=nats://a:4222,nats://b:4222"]), "headrace")
    assert not {"headrace-nats.service", "headrace-streams.service"} & set(own_brokers)
