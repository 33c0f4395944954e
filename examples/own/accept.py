"""Runs the example on two hosts, uses it, and prints the results as one JSON object.

    python examples/own/accept.py FOLDER ADDRESS ADDRESS --key KEY --busybox BUSYBOX

The first host has broker, curriculum, judge and trainer; the second sampler, sandboxes and gateway. They share no
folder: each gets the checkpoint and the example by ssh, and makes its own store of images. Both need headrace in the
interpreter that runs this, root (for containers), and an sshd that takes KEY.
"""

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.own import client, image, model

HERE = Path(__file__).resolve().parent
RUN, ANSWERS_S, ENDS_S = "own", 300.0, 900.0
GROUPS = (
    (["trainer", "weight_sender"], ["curriculum", "evaluator", "dead_letter", "judge"]),
    (["weight_receiver", "rollout", "rollout:product"], ["environment"], ["gateway"]),
)


class Place(NamedTuple):
    """Where the launcher works, and how it reaches the hosts."""

    folder: Path
    addresses: list[str]
    ssh: list[str]


def headrace(place: Place, *words: str, codes: tuple[int, ...] = (0,)) -> str:
    """The output of a command of headrace. SystemExit when it fails."""
    command = [sys.executable, "-m", "headrace.cli", *words]
    done = subprocess.run(command, cwd=place.folder, capture_output=True, text=True, timeout=ENDS_S)
    if done.returncode not in codes or (done.returncode and not done.stdout.strip()):
        raise SystemExit(f"headrace {' '.join(words)} ended with code {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


def remote(place: Place, address: str, command: str, given: bytes = b"") -> str:
    """The output of a shell command on a host. SystemExit when it fails."""
    words = ["ssh", *place.ssh, address, command]
    done = subprocess.run(words, input=given, capture_output=True, timeout=ENDS_S)
    if done.returncode:
        raise SystemExit(f"{address}: {command}: {done.stderr.decode(errors='replace')}")
    return done.stdout.decode()


def write(place: Place) -> None:
    """own.toml with the broker's address, cluster.toml, checkpoint and image."""
    bus = f'[run]\nid = "{RUN}"\nmin_free_mb = 64\n[bus]\nurl = "nats://{place.addresses[0]}:4222"\n'
    bus += 'credentials = "credentials"\n'
    bus += f'[weights]\nfull_snapshots_url = "{place.folder}/weights"\n'
    own_toml = (HERE / "own.toml").read_text()
    own_toml = own_toml.replace("[production]\n", f'[production]\nhost = "{place.addresses[1]}"\n')
    (place.folder / "run.toml").write_text(bus + own_toml)
    text = f'run = "run.toml"\nssh = {json.dumps(place.ssh)}\n'
    paths = os.environ.get("PYTHONPATH", "")
    for number, (address, groups) in enumerate(zip(place.addresses, GROUPS, strict=True), 1):
        folder = place.folder / f"host{number}"
        text += f'[[hosts]]\nname = "h{number}"\naddress = "{address}"\nfolder = "{folder}"\n'
        text += f'python = "{sys.executable}"\nenvironment = {{ PYTHONPATH = "{folder}:{paths}" }}\n'
        for group in groups:
            text += f"[[hosts.processes]]\nactors = {json.dumps(group)}\n"
        if number == 1:
            text += "[[hosts.processes]]\nbroker = true\n"
    (place.folder / "cluster.toml").write_text(text)


def send(place: Place, busybox: Path) -> str:
    """Give each host the example, the checkpoint and the image; a key for the client."""
    model.make(place.folder / "model")
    image.make(place.folder / "rootfs", busybox)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name in ("model", "rootfs"):
            tar.add(place.folder / name, name)
        tar.add(HERE / "own.py", "own.py")
    paths, cli = os.environ.get("PYTHONPATH", ""), f"{sys.executable} -m headrace.cli"
    key = ""
    for number, address in enumerate(place.addresses, 1):
        enter = f"mkdir -p {place.folder}/host{number} && cd {place.folder}/host{number} && export PYTHONPATH={paths}"
        remote(place, address, f"{enter} && tar -xf -", out.getvalue())
        store = "--set environment.cache_dir='\"cache\"'"
        remote(place, address, f"{enter} && {cli} images import rootfs --name own-app {store}")
        if number == 2:
            key = remote(place, address, f"{enter} && {cli} keys add acme --training").split()[-1]
    return key


def when_ready(url: str, key: str) -> dict[str, Any]:
    """Talk to the gateway as soon as it answers. SystemExit after ANSWERS_S."""
    deadline, said = time.monotonic() + ANSWERS_S, ""
    while time.monotonic() < deadline:
        try:
            return client.talk(url, key, 2)
        except (OSError, SystemExit) as error:  # no listener yet, or no sampler
            said = str(error)
            time.sleep(1.0)
    raise SystemExit(f"the gateway at {url} gave no turn within {ANSWERS_S:g} s: {said}")


def until_trained(place: Place, steps: int) -> str:
    """The status after the last step. SystemExit after ENDS_S."""
    deadline, seen = time.monotonic() + ENDS_S, ""
    while time.monotonic() < deadline:
        seen = headrace(place, "status", "--config", "run.toml")
        if f"step {steps}, " in seen:
            return seen
        time.sleep(1.0)
    raise SystemExit(f"no step {steps} within {ENDS_S:g} s; the last status: {seen}")


def accept(place: Place, busybox: Path) -> dict[str, Any]:
    """Launch, use, watch, audit and export the run; stop it in any case."""
    write(place)
    key = send(place, busybox)
    headrace(place, "launch", "cluster.toml")
    try:
        talked = when_ready(f"http://{place.addresses[1]}:8750", key)
        seen = until_trained(place, 3)
        hosts = headrace(place, "launch", "cluster.toml", "status")
        audit = json.loads(headrace(place, "audit", "--config", "run.toml", codes=(0, 1)))
        exported = headrace(place, "export", RUN, "exported", "--config", "run.toml")
    except BaseException:
        sys.stderr.write(headrace(place, "launch", "cluster.toml", "logs", codes=(0, 1, 2, 3)))
        raise
    finally:
        stopped = headrace(place, "launch", "cluster.toml", "stop")
    return {
        "client": talked,
        "status": seen.splitlines(),
        "hosts": hosts.splitlines(),
        "audit": audit,
        "exported": exported.strip(),
        "stopped": stopped.strip(),
    }


def main() -> None:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description="one's own checkpoint, image tasks, reward and client on two hosts")
    parser.add_argument("folder", type=Path)
    parser.add_argument("addresses", nargs=2)
    parser.add_argument("--key", type=Path, required=True, help="private key for ssh")
    parser.add_argument("--busybox", type=Path, default=Path("/bin/busybox"))
    args = parser.parse_args()
    ssh = ["-i", str(args.key.resolve()), "-o", "UserKnownHostsFile=/dev/null", "-o", "StrictHostKeyChecking=no"]
    ssh += ["-o", "LogLevel=ERROR", "-F", "none", "-o", "BatchMode=yes"]
    args.folder.mkdir(parents=True, exist_ok=True)
    place = Place(args.folder.resolve(), args.addresses, ssh)
    sys.stdout.write(json.dumps(accept(place, args.busybox), indent=1) + "\n")


if __name__ == "__main__":
    main()
