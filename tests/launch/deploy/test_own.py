"""examples/own: one's own checkpoint, image tasks, reward and client in one run on two hosts, started from generated
systemd units in two network namespaces whose hosts share no folder."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
import transformers

from headrace.launch.page import read_place
from headrace.vmhost.backends.container.backend import unavailable
from headrace.vmhost.images import packages
from headrace.vmhost.qemu import probe
from tests.support.hosts import CACHE
from tests.support.paths import ROOT

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not shutil.which("ip") or os.geteuid() != 0, reason="needs ip (iproute2) and root"),
]
NET = f"10.{64 + os.getpid() % 128}.{os.getpid() // 128 % 256}"
"""The network of this test's hosts."""
BRIDGE = f"hrb{os.getpid()}"
PLACES = {"etc": Path("/etc/headrace"), "lib": Path("/var/lib/headrace"), "broker": Path("/var/lib/headrace-broker")}
"""A host's folders, and where it sees them."""


def sh(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Addresses of two network namespaces that reach each other, named as `name_of` says."""
    with ExitStack() as closing:
        sh("ip", "link", "add", BRIDGE, "type", "bridge")
        closing.callback(sh, "ip", "link", "del", BRIDGE)
        sh("ip", "addr", "add", f"{NET}.254/24", "dev", BRIDGE)
        sh("ip", "link", "set", BRIDGE, "up")
        for number in (1, 2):
            name = name_of(number)
            sh("ip", "netns", "add", name)
            closing.callback(sh, "ip", "netns", "del", name)
            sh("ip", "link", "add", f"{BRIDGE}{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
            # The kernel ends a namespace some time after its name, and the next test takes the same names.
            closing.callback(sh, "ip", "link", "del", f"{BRIDGE}{number}")
            sh("ip", "link", "set", f"{BRIDGE}{number}", "master", BRIDGE, "up")
            for words in (("addr", "add", f"{NET}.{number}/24", "dev", "eth0"), ("link", "set", "eth0", "up")):
                sh("ip", "-n", name, *words)
            sh("ip", "-n", name, "link", "set", "lo", "up")
        for place in PLACES.values():
            if not place.exists():
                place.mkdir()
                closing.callback(place.rmdir)
        yield [f"{NET}.1", f"{NET}.2"]


def name_of(number: int) -> str:
    return f"hr{os.getpid()}-{number}"


@contextlib.contextmanager
def units(folder: Path, number: int) -> Iterator[Path]:
    """A host that runs its units; gives the folder of their logs. It sees its own folders alone."""
    host, other = folder / f"host{number}", folder / f"host{3 - number}"
    for name in (*PLACES, "logs"):
        (host / name).mkdir(exist_ok=True)
    mounts = [f"mount --bind {host / name} {place}" for name, place in PLACES.items()]
    command = f"exec {sys.executable} -m tests.support.units {host}/units {host}/logs"
    script = " && ".join([*mounts, f"mount -t tmpfs none {other}", command])
    words = ["nsenter", f"--net=/run/netns/{name_of(number)}", "unshare", "--mount", "sh", "-c", script]
    runner = subprocess.Popen(words, cwd=ROOT, start_new_session=True)
    try:
        yield host / "logs"
    finally:
        runner.terminate()
        assert runner.wait(150) == 0


def states(logs: Path) -> dict[str, dict[str, Any]]:
    """The state of each unit of a host."""
    return {file.name.split(".")[0]: json.loads(file.read_text()) for file in logs.glob("*.service.json")}


def ended(logs: Path) -> str:
    """The ends of all logs of a host, for a test that fails."""
    return "\n".join(f"== {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in logs.glob("*"))


async def loaded(page: str, lib: Path) -> tuple[int, int, int]:
    """Load the page as a browser does. lib: has the page's key. Returns the closed groups of its history, its steps,
    and the status that a foreign origin gets at the broker's WebSocket."""
    place = read_place(lib / "runs" / "own")
    assert place is not None
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {place.key}"}) as client:
        async with client.get(f"{page}/") as answer:
            assert answer.status == 200 and "text/html" in answer.headers["Content-Type"]
        settings = await (await client.get(f"{page}/config.json")).json()
        told = await (await client.get(f"{page}/api/history")).json()
        steps = await (await client.get(f"{page}/api/steps")).json()
        address = settings["websocket"]
        assert address == f"ws://{NET}.1:8091" and settings["run"] == "own"
        async with client.ws_connect(address, origin=page) as admitted:
            assert (await admitted.receive()).data.startswith(b"INFO ")
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await client.ws_connect(address, origin="http://elsewhere:8090")
    closed = sum(record["type"] == "group_closed" for record in told["records"])
    return closed, sum(record["type"] == "step_done" for record in steps["records"]), refused.value.status


async def accept(*words: str) -> str:
    """The output of accept.py."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(ROOT / "examples/own/accept.py"),
        *words,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    told, complained = await process.communicate()
    assert process.returncode == 0, complained.decode()[-4000:]
    return told.decode()


async def killed(logs: Path, unit: str) -> None:
    """kill -9 of a unit's process as soon as it is ready."""
    while not (state := states(logs).get(unit, {})).get("ready"):
        await asyncio.sleep(0.1)  # the runner's file offers no event
    os.kill(state["pid"], signal.SIGKILL)


@pytest.mark.filterwarnings("ignore:parameter 'timeout':DeprecationWarning")  # nats-py's, over WebSocket
async def test_it_trains_serves_balances_and_is_exported(hosts: list[str], tmp_path: Path) -> None:
    if why := unavailable():
        pytest.skip(f"no containers here: {why}")
    busybox = tmp_path / "busybox"
    busybox.write_bytes(probe._busybox(packages.base(Path(CACHE), lambda text: None)))
    work = tmp_path / "work"
    await accept("prepare", str(work), *hosts, "--busybox", str(busybox))
    try:
        with units(work, 1) as first, units(work, 2) as second:
            using = asyncio.create_task(accept("use", str(work), *hosts))
            await killed(second, "headrace-gateway")
            await killed(first, "headrace-trainer")
            told = json.loads(await using)
            page = await loaded(f"http://{NET}.1:8090", work / "host1/lib")
            seen = states(first) | states(second)
    except BaseException:
        sys.stderr.write(ended(work / "host1/logs") + ended(work / "host2/logs"))
        raise
    assert told["client"]["turns"] == 2 and told["client"]["tokens"] > 0
    assert told["audit"]["balanced"] and told["audit"]["trained"] == 6, told["audit"]
    assert page == (3, 3, 403)
    assert all(state["ready"] or name == "headrace-nats" for name, state in seen.items()), seen
    assert seen["headrace-trainer"]["restarts"] and seen["headrace-gateway"]["restarts"]
    assert (work / "host1/lib/runs/own/checkpoints").is_dir()
    assert not (work / "host2/lib/runs/own/checkpoints").exists()
    before = transformers.AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32).state_dict()
    after = transformers.AutoModelForCausalLM.from_pretrained(work / "exported", dtype=torch.float32).state_dict()
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    tokenizer = transformers.AutoTokenizer.from_pretrained(work / "exported")
    assert "<|im_start|>" in tokenizer.chat_template
