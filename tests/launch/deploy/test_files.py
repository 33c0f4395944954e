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
    assert len(pods) == len(plan.processes(config)) + 2  # broker and page
    for pod in pods:
        (container,) = pod["containers"]
        assert container["securityContext"]["privileged"] is False and not pod["automountServiceAccountToken"]
    limits = {pod["containers"][0]["name"]: pod["containers"][0]["resources"]["limits"] for pod in pods}
    assert limits["headrace-environment"]["devices.kubevirt.io/kvm"] == "1"
    assert limits["headrace-trainer"]["nvidia.com/gpu"] == "1"
    assert "SU" not in re.sub(r"[^A-Z2-7]", " ", text).split()  # no seed


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
