"""`headrace launch` through OpenSSH's server, in two network namespaces whose hosts share no folder."""

import asyncio
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import pytest

from headrace.launch.cluster.state import read_state
from headrace.launch.page import read_place
from tests.launch.test_recipe import SETTINGS, until_finished
from tests.support.paths import ROOT

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not Path(SSHD).exists(), reason="needs Debian's openssh-server"),
    pytest.mark.skipif(not shutil.which("ip") or os.geteuid() != 0, reason="needs ip (iproute2) and root"),
]
SERVER = """
Port 22
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
"""
NET = f"10.{64 + os.getpid() % 128}.{os.getpid() // 128 % 256}"
"""The network of this test's hosts."""
BRIDGE = f"hrb{os.getpid()}"


def sh(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[str]]:
    """The addresses of two hosts with a running sshd. Neither sees the other's folder."""
    for name in ("key", "host_key"):
        sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name))
    Path("/run/sshd").mkdir(exist_ok=True)
    servers: list[subprocess.Popen[bytes]] = []
    for number in (1, 2):
        (tmp_path / f"host{number}").mkdir()
    with ExitStack() as closing:
        sh("ip", "link", "add", BRIDGE, "type", "bridge")
        closing.callback(sh, "ip", "link", "del", BRIDGE)
        sh("ip", "addr", "add", f"{NET}.254/24", "dev", BRIDGE)
        sh("ip", "link", "set", BRIDGE, "up")
        for number in (1, 2):
            name, address = f"hr{os.getpid()}-{number}", f"{NET}.{number}"
            sh("ip", "netns", "add", name)
            closing.callback(sh, "ip", "netns", "del", name)
            sh("ip", "link", "add", f"{BRIDGE}{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
            # The kernel ends a namespace some time after its name, and the next test takes the same names.
            closing.callback(sh, "ip", "link", "del", f"{BRIDGE}{number}")
            sh("ip", "link", "set", f"{BRIDGE}{number}", "master", BRIDGE, "up")
            for words in (("addr", "add", f"{address}/24", "dev", "eth0"), ("link", "set", "eth0", "up")):
                sh("ip", "-n", name, *words)
            sh("ip", "-n", name, "link", "set", "lo", "up")
            config = tmp_path / f"sshd{number}"
            config.write_text(SERVER.format(address=address, folder=tmp_path))
            # In a mount namespace of its own the other host's folder is hidden. `ip netns exec` would hide /sys, too.
            hidden = f"mount -t tmpfs none {tmp_path / f'host{3 - number}'} && exec {SSHD} -D -e -f {config}"
            servers.append(
                subprocess.Popen(
                    ["nsenter", f"--net=/run/netns/{name}", "unshare", "--mount", "sh", "-c", hidden],
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            )
            closing.callback(end, servers[-1])
            stderr = servers[-1].stderr
            assert stderr is not None and b"Server listening" in stderr.readline()
        yield [f"{NET}.1", f"{NET}.2"]


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a server with its sessions."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def write(folder: Path, addresses: list[str], python: str = sys.executable) -> None:
    """run.toml and cluster.toml: training on the first host, sampling and sandboxes on the second."""
    bus = f'[run]\nid = "r1"\n[bus]\nurl = "nats://{NET}.1:4222"\ncredentials = "{folder}/credentials"\n'
    bus += f'[weights]\nfull_snapshots_url = "{folder}/weights"\n'
    (folder / "run.toml").write_text(f'{bus}[dashboard]\nhost = "{NET}.1"\n{SETTINGS}')
    options = ["-i", str(folder / "key"), "-o", "UserKnownHostsFile=/dev/null", "-o", "StrictHostKeyChecking=no"]
    options += ["-o", "LogLevel=ERROR", "-F", "none"]
    text = f'run = "run.toml"\nssh = {json.dumps(options)}\n'
    groups = (
        [["trainer", "weight_sender"], ["curriculum", "evaluator", "dead_letter", "judge"]],
        [["weight_receiver", "rollout"], ["environment"]],
    )
    for number, (address, actors) in enumerate(zip(addresses, groups, strict=True), 1):
        text += f'[[hosts]]\nname = "h{number}"\naddress = "{address}"\nfolder = "{folder}/host{number}"\n'
        text += f'python = "{python}"\nenvironment = {{ PYTHONPATH = "{ROOT}" }}\n'
        for group in actors:
            text += f"[[hosts.processes]]\nactors = {json.dumps(group)}\n"
        if number == 1:
            text += "[[hosts.processes]]\nbroker = true\n"
        else:
            text += '[[hosts.processes]]\nname = "server"\ncommand = ["sh", "-c", "echo $MINE; exec sleep 100000"]\n'
            text += 'environment = { MINE = "set-for-one-process" }\n'
    (folder / "cluster.toml").write_text(text)


def headrace(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "headrace.cli", *words]
    return subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True)


def keepers(folder: Path) -> list[int]:
    """Process ids of both hosts' keepers."""
    return [read_state(folder / name).pid for name in ("host1", "host2")]


async def killed_when(folder: Path, state: str) -> None:
    """Launch, and kill -9 the launcher as soon as the first host is in this state."""
    argv = [sys.executable, "-m", "headrace.cli", "launch", "cluster.toml"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    launcher = await asyncio.create_subprocess_exec(*argv, cwd=folder, env=env, stdout=subprocess.DEVNULL)
    while read_state(folder / "host1").state != state:
        assert launcher.returncode is None
        await asyncio.sleep(0.01)  # the host's file offers no event
    clients = [int(pid) for pid in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()]
    handles = [os.pidfd_open(pid) for pid in clients]
    launcher.kill()
    await launcher.wait()
    for handle in handles:
        assert select.select([handle], [], [], 30)[0], "ssh's clients end with the launcher"
        os.close(handle)


async def test_a_launcher_that_is_killed_is_continued_by_the_next_launch(hosts: list[str], tmp_path: Path) -> None:
    write(tmp_path, hosts)
    try:
        await killed_when(tmp_path, "running")
        (first, second) = keepers(tmp_path)
        assert first and not second, "only the broker's host had begun"
        done = headrace(tmp_path, "launch", "cluster.toml")
        assert done.returncode == 0 and done.stdout.count("taken over") == 1, done.stderr
        assert keepers(tmp_path)[0] == first and keepers(tmp_path)[1]
        steps = await until_finished(f"nats://{NET}.1:4222", tmp_path / "credentials")
        audit = json.loads(headrace(tmp_path, "audit", "--config", "run.toml").stdout)
        assert steps == 3 and audit["balanced"] and audit["trained"] == 24
    finally:
        stopped = headrace(tmp_path, "launch", "cluster.toml", "stop")
    assert stopped.returncode == 0 and left(tmp_path) == [], stopped.stderr


async def test_stop_ends_a_host_whose_launcher_was_killed_while_it_started(hosts: list[str], tmp_path: Path) -> None:
    write(tmp_path, hosts)
    await killed_when(tmp_path, "starting")
    stopped = headrace(tmp_path, "launch", "cluster.toml", "stop")
    assert stopped.returncode == 0 and left(tmp_path) == [], stopped.stderr
    killed = read_state(tmp_path / "host1").state
    try:
        done = headrace(tmp_path, "launch", "cluster.toml")
        assert done.returncode == 0 and "taken over" not in done.stdout, done.stderr
        os.kill(keepers(tmp_path)[0], signal.SIGKILL)
        status = headrace(tmp_path, "launch", "cluster.toml", "status")
        assert status.returncode == 1 and "was killed" in status.stdout
    finally:
        stopped = headrace(tmp_path, "launch", "cluster.toml", "stop")
    assert killed in ("failed", "stopped") and stopped.returncode == 0 and left(tmp_path) == [], stopped.stderr


async def loaded(page: str, folder: Path) -> tuple[int, int, int]:
    """Load the page as a browser does. folder: has the page's key. Returns the closed groups of its history, its steps,
    and the status that a foreign origin gets at the broker's WebSocket."""
    place = read_place(folder / "runs" / "r1")
    assert place is not None
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {place.key}"}) as client:
        async with client.get(f"{page}/") as answer:
            assert answer.status == 200 and "text/html" in answer.headers["Content-Type"]
        settings = await (await client.get(f"{page}/config.json")).json()
        told = await (await client.get(f"{page}/api/history")).json()
        steps = await (await client.get(f"{page}/api/steps")).json()
        address = settings["websocket"]
        assert address == f"ws://{NET}.1:8091" and settings["run"] == "r1"
        async with client.ws_connect(address, origin=page) as admitted:
            assert (await admitted.receive()).data.startswith(b"INFO ")
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await client.ws_connect(address, origin="http://elsewhere:8090")
    closed = sum(record["type"] == "group_closed" for record in told["records"])
    return closed, sum(record["type"] == "step_done" for record in steps["records"]), refused.value.status


async def served_here(folder: Path) -> tuple[int, int, int]:
    """The page of `headrace dashboard` on the launcher."""
    argv = [sys.executable, "-m", "headrace.cli", "dashboard", "--config", "run.toml", "--host", "127.0.0.1"]
    process = await asyncio.create_subprocess_exec(
        *argv, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        said = await process.stdout.readline()
        assert said == b"r1: http://127.0.0.1:8090/, its key is in runs/r1/page.json\n"
        return await loaded("http://127.0.0.1:8090", folder)
    finally:
        process.terminate()
        assert await process.wait() == 130


def left(folder: Path) -> list[str]:
    """Command lines of processes in the hosts' folders."""
    command_lines = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.readlink(entry / "cwd").startswith(f"{folder}/host"):
                command_lines.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return command_lines


@pytest.mark.filterwarnings("ignore:parameter 'timeout':DeprecationWarning")  # nats-py's, over WebSocket
async def test_a_launched_run_trains_three_steps_and_balances(hosts: list[str], tmp_path: Path) -> None:
    write(tmp_path, hosts)
    try:
        done = headrace(tmp_path, "launch", "cluster.toml")
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[0].startswith(f"live page: http://{NET}.1:8090/; its key is in")
        assert f"h2: weight_receiver, environment, server; logs in {NET}.2:{tmp_path}/host2/logs/" in done.stdout
        before = keepers(tmp_path)
        again = headrace(tmp_path, "launch", "cluster.toml")
        assert again.returncode == 0 and again.stdout.count("(taken over: it ran already, with the same files)") == 2
        toml = (tmp_path / "run.toml").read_bytes()
        (tmp_path / "run.toml").write_bytes(toml + b"# another configuration\n")
        other = headrace(tmp_path, "launch", "cluster.toml")
        assert other.returncode == 3 and "runs in" in other.stderr and "with other files; stop it first" in other.stderr
        (tmp_path / "run.toml").write_bytes(toml)
        assert (tmp_path / "host1/run.toml").read_bytes() == toml and keepers(tmp_path) == before
        steps = await until_finished(f"nats://{NET}.1:4222", tmp_path / "credentials")
        page = await loaded(f"http://{NET}.1:8090", tmp_path / "host1")
        local_page = await served_here(tmp_path)
        audit = json.loads(headrace(tmp_path, "audit", "--config", "run.toml").stdout)
        status = headrace(tmp_path, "launch", "cluster.toml", "status")
        logs = headrace(tmp_path, "launch", "cluster.toml", "logs")
    finally:
        stopped = headrace(tmp_path, "launch", "cluster.toml", "stop")
    assert steps == 3 and audit["balanced"] and audit["trained"] == 24
    assert status.returncode == 0 and f"h1 ({NET}.1): running" in status.stdout and "  trainer " in status.stdout
    assert "started again" not in status.stdout and "  dashboard " in status.stdout
    assert page == local_page == (6, 3, 403)
    assert "h2: set-for-one-process" in logs.stdout
    assert (tmp_path / "host1/runs/r1/checkpoints").is_dir() and not (tmp_path / "host2/runs/r1/checkpoints").exists()
    assert stopped.returncode == 0 and "no process of the run is left on 2 hosts" in stopped.stdout, stopped.stderr
    assert left(tmp_path) == []
    over = headrace(tmp_path, "launch", "cluster.toml", "status")
    assert over.returncode == 1 and f"h1 ({NET}.1): stopped" in over.stdout


def test_every_host_that_cannot_take_part_is_named_and_nothing_starts(hosts: list[str], tmp_path: Path) -> None:
    write(tmp_path, [hosts[0], f"{NET}.3"], python="/opt/none/bin/python")
    done = headrace(tmp_path, "launch", "cluster.toml")
    first, second = done.stderr.splitlines()
    assert done.returncode == 3
    assert (
        first
        == f"headrace: host h1 ({NET}.1:22): there is no /opt/none/bin/python; install headrace there, or set python"
    )
    assert second.startswith(f"headrace: host h2 ({NET}.3:22): ssh cannot reach it: ")
    assert left(tmp_path) == []


def test_a_host_that_fails_to_start_stops_the_others(hosts: list[str], tmp_path: Path) -> None:
    write(tmp_path, hosts)
    file = tmp_path / "cluster.toml"
    file.write_text(file.read_text().replace('name = "server"', 'name = "server"\ndevices = [7]'))
    done = headrace(tmp_path, "launch", "cluster.toml")
    assert done.returncode == 3
    sentence = "process server wants device 7, and there is no /dev/nvidia7"
    assert done.stderr == f"headrace: host h2 ({NET}.2:22): {sentence}\n"
    assert left(tmp_path) == []
