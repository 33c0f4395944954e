"""The file of a cluster: each mistake is one sentence, and each host gets its own keys and no others."""

import re
import tarfile
from io import BytesIO
from pathlib import Path

import msgspec
import pytest

from headrace.bus.broker import credentials
from headrace.bus.broker.permissions import ROLES
from headrace.cli.main import main
from headrace.config import ConfigError
from headrace.launch.cluster.file import read
from headrace.launch.cluster.plan import HostPlan, Order, environment, names, plan
from tests.support.paths import ROOT

RUN = '[run]\nid = "r1"\n[bus]\nurl = "nats://10.0.0.1:4222"\ncredentials = "credentials"\n'
RUN += '[weights]\nfull_snapshots_url = "s3://weights"\n'
TEXT = (ROOT / "deploy" / "hosts" / "cluster.toml").read_text()


def plans(folder: Path, text: str = TEXT, run: str = RUN) -> dict[str, HostPlan]:
    (folder / "cluster.toml").write_text(text)
    (folder / "run.toml").write_text(run)
    return {one.host.name: one for one in plan(read(folder / "cluster.toml"), folder)}


def test_each_host_gets_its_processes_and_only_the_keys_of_their_roles(tmp_path: Path) -> None:
    hosts = plans(tmp_path)
    assert list(hosts) == ["trainer", "sampler"], "the broker's host comes first"
    with tarfile.open(fileobj=BytesIO(hosts["sampler"].archive())) as tar:
        assert {entry.mode for entry in tar} == {0o600}
        names = set(tar.getnames())
    keys = {"environment.nk", "rollout.nk", "weight_sync.nk", "weight_publisher.pub", "writers.pub"}
    assert names == {"node.json", "run.toml"} | {f"credentials/{name}" for name in keys}
    trainer_keys = {name for name in hosts["trainer"].files if name.endswith(".nk")}
    assert {"credentials/admin.nk", "credentials/weight_publisher.nk", "credentials/trainer.nk"} <= trainer_keys
    assert (
        "credentials/rollout.nk" not in trainer_keys
        and {"credentials/web.nk", "credentials/dashboard.nk"} <= trainer_keys
    )
    assert {Path(name).stem for name in trainer_keys} - {"weight_publisher"} <= set(ROLES)
    order = msgspec.json.decode(hosts["trainer"].files["node.json"], type=Order)
    trainer = next(process for process in order.processes if "trainer" in process.actors)
    assert environment(order, trainer, {"NCCL_DEBUG": "INFO"}) == {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "NCCL_DEBUG": "WARN",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }


def test_hosts_need_a_location_of_full_snapshots_that_all_reach(tmp_path: Path) -> None:
    alone = RUN.partition("[weights]")[0]
    with pytest.raises(ConfigError, match=r"weights\.full_snapshots_url is empty, so the other 1 hosts"):
        plans(tmp_path, run=alone)
    assert len(plans(tmp_path, run=alone + '[weights]\nfull_snapshots_url = "s3://weights"\n')) == 2


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('name = "sampler"', 'name = "trainer"', "host trainer: two hosts have this name"),
        ("devices = [2, 3]", "devices = [1, 2]", "process rollout-two: device 1 belongs to process rollout-one"),
        ("devices = [2, 3]", 'devices = ["2"]', "host sampler: processes[2].devices[0]: expected `int`"),
        ('"rollout:two"', '"rollin"', "host sampler: unknown actor 'rollin'; expected one of curriculum"),
        ('actors = ["weight_receiver"]', "broker = true", "host trainer has the broker already"),
        ('["weight_receiver"]', '["search"]', "host sampler runs rollout without weight_receiver"),
        ('"evaluator", ', '"trainer", ', "trainer runs 2 times"),
        (', "weight_sender"', "", "no host runs the actor weight_sender"),
        ('folder = "/srv/headrace"', 'folder = "srv"', "host trainer: folder: expected an absolute path, got 'srv'"),
        ("rollout.credit=16", "rollout.credits=16", "unknown key; [rollout] has credit"),
        ("broker = true", 'command = ["x"]', "process without a name: a command needs a name"),
        ("broker = true", 'command = ["x"]\nname = "dashboard"', "the live page's process is named dashboard"),
        ("broker = true", "brokers = true", "host trainer: processes[0]: object contains unknown field `brokers`"),
    ],
)
def test_a_mistake_is_one_sentence(old: str, new: str, sentence: str, tmp_path: Path) -> None:
    assert old in TEXT
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        plans(tmp_path, TEXT.replace(old, new, 1))


def test_the_broker_of_a_launched_run_has_the_pages_web_socket(tmp_path: Path) -> None:
    hosts = plans(tmp_path)
    conf = hosts["trainer"].files["nats.conf"].decode()
    assert 'websocket { host: "127.0.0.1", port: 8091' in conf and '"http://127.0.0.1:8090"' in conf
    order = hosts["trainer"].order
    assert order.page is not None and names(order)[-1] == "dashboard" and hosts["sampler"].order.page is None
    off = plans(tmp_path, run=RUN + "[dashboard]\nenabled = false\n")["trainer"]
    assert "websocket {" not in off.files["nats.conf"].decode() and "credentials/web.nk" not in off.files


def test_certificates_go_to_the_hosts_that_need_them_and_guard_the_web_socket_too(tmp_path: Path) -> None:
    keys = tmp_path / "credentials"
    keys.mkdir()
    for name in ("server.pem", "server.key", "ca.pem"):
        (keys / name).write_text(name)
    credentials.write(keys)
    hosts = plans(tmp_path)
    assert f'cert_file: "{hosts["trainer"].host.folder}/credentials/server.pem"' in (
        hosts["trainer"].files["credentials/users.conf"].decode()
    )
    assert {"credentials/server.pem", "credentials/server.key"} <= set(hosts["trainer"].files)
    assert "credentials/ca.pem" in hosts["sampler"].files and "credentials/server.key" not in hosts["sampler"].files
    with pytest.raises(ConfigError, match="its WebSocket would be open without it: set"):
        plans(tmp_path, run=RUN + '[dashboard]\nhost = "10.0.0.1"\n')
    secure = plans(tmp_path, run=RUN + '[dashboard]\nhost = "10.0.0.1"\nwebsocket = "https://10.0.0.1:8091"\n')
    conf = secure["trainer"].files["nats.conf"].decode()
    assert 'tls { cert_file: "/srv/headrace/credentials/server.pem"' in conf
    (keys / "server.pem").unlink()
    with pytest.raises(ConfigError, match=r"there is no .*server\.pem"):
        plans(tmp_path, run=RUN + '[dashboard]\nwebsocket = "https://10.0.0.1:8091"\n')


def test_a_run_that_its_processes_cannot_find_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for key in ("id", "url", "credentials"):
        text = "\n".join(line for line in RUN.splitlines() if not line.startswith(key))
        with pytest.raises(ConfigError, match=key):
            plans(tmp_path, run=text)
    assert main(["launch", str(tmp_path / "none.toml")]) == 2
    assert "there is no such file; start from deploy/hosts/cluster.toml" in capsys.readouterr().err
