"""Makes the files of the example's two hosts, and, while they run it, uses the run and prints the results as JSON.

    python examples/own/accept.py prepare FOLDER ADDRESS ADDRESS --busybox BUSYBOX
    python examples/own/accept.py use FOLDER ADDRESS ADDRESS

The first host has broker, curriculum, judge and trainer; the second sampler, sandboxes and gateway. They share no
folder but that of the full snapshots, FOLDER/weights. `prepare` writes FOLDER/host1 and FOLDER/host2: what belongs into
/etc/systemd/system (units), /etc/headrace (etc) and /var/lib/headrace (lib) of each.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.own import client, image, model

HERE = Path(__file__).resolve().parent
RUN, ANSWERS_S, ENDS_S = "own", 300.0, 900.0
GROUPS = (
    (("trainer", "weight_sender"), ("curriculum", "evaluator", "dead_letter", "judge")),
    (("weight_receiver", "rollout", "rollout:product"), ("environment",), ("gateway",)),
)
"""Processes of each host."""
SHARED = ("headrace-nats", "headrace-streams", "headrace-dashboard")
"""Further units of the first host."""
HEADRACE = str(Path(sys.executable).with_name("headrace"))


class Place(NamedTuple):
    """Where the files are made, and the hosts' addresses."""

    folder: Path
    addresses: list[str]


def headrace(folder: Path, *words: str, codes: tuple[int, ...] = (0,)) -> str:
    """The output of a command of headrace in a folder. SystemExit when it fails."""
    done = subprocess.run([HEADRACE, *words], cwd=folder, capture_output=True, text=True, timeout=ENDS_S)
    if done.returncode not in codes or (done.returncode and not done.stdout.strip()):
        raise SystemExit(f"headrace {' '.join(words)} ended with code {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


def configuration(place: Place, credentials: str) -> str:
    """own.toml with the run's name, the broker's address and the processes. credentials: folder of the keys."""
    groups = [list(group) for host in GROUPS for group in host]
    own_toml = (HERE / "own.toml").read_text()
    own_toml = own_toml.replace("[production]\n", f'[production]\nhost = "{place.addresses[1]}"\n')
    return f"""[run]
id = "{RUN}"
min_free_mb = 64
[bus]
url = "nats://{place.addresses[0]}:4222"
credentials = "{credentials}"
[dashboard]
host = "{place.addresses[0]}"
[processes]
groups = {json.dumps(groups)}
[weights]
full_snapshots_url = "{place.folder}/weights"
{own_toml}"""


def prepare(place: Place, busybox: Path) -> None:
    """Make checkpoint, image, keys and units, and put into each host's folder what belongs there."""
    folder = place.folder
    model.make(folder / "model")
    image.make(folder / "rootfs", busybox)
    words = ["-m", "headrace.bus.broker.credentials", str(folder / "credentials")]
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
    (folder / "run.toml").write_text(configuration(place, "/etc/headrace/credentials"))
    (folder / "operator.toml").write_text(configuration(place, str(folder / "credentials")))
    headrace(folder, "deploy", "systemd", "units", "--config", "run.toml", "--binary", HEADRACE)
    for number, groups in enumerate(GROUPS, 1):
        units, etc, lib = (folder / f"host{number}" / name for name in ("units", "etc", "lib"))
        for made in (units / "headrace-.service.d", etc, lib):
            made.mkdir(parents=True)
        names = [f"headrace-{group[0].replace('_', '-')}" for group in groups] + list(SHARED if number == 1 else ())
        for name in (*(f"{name}.service" for name in names), "headrace.target"):
            shutil.copy(folder / "units" / name, units)
        # own.py is no installed package, so the units find it by a drop-in.
        drop_in = "[Service]\nEnvironment=PYTHONPATH=/var/lib/headrace\n"
        (units / "headrace-.service.d/own.conf").write_text(drop_in)
        shutil.copytree(folder / "credentials", etc / "credentials")
        for name in ("run.toml", "units/nats.conf"):
            shutil.copy(folder / name, etc)
        shutil.copytree(folder / "model", lib / "model")
        shutil.copy(HERE / "own.py", lib)
        store = "environment.cache_dir=cache"
        headrace(lib, "images", str(folder / "rootfs"), "--name", "own-app", "--set", store)


def key(place: Place) -> str:
    """Make a key of the gateway as soon as the broker answers. SystemExit after ANSWERS_S."""
    deadline = time.monotonic() + ANSWERS_S
    while True:
        try:
            return headrace(place.folder, "keys", "--add", "acme", "--training", "--config", "operator.toml").split()[
                -1
            ]
        except SystemExit:
            if time.monotonic() > deadline:
                raise
            time.sleep(1.0)


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
        seen = headrace(place.folder, "status", "--config", "operator.toml")
        if f"step {steps}, " in seen:
            return seen
        time.sleep(1.0)
    raise SystemExit(f"no step {steps} within {ENDS_S:g} s; the last status: {seen}")


def use(place: Place) -> dict[str, Any]:
    """Talk and rate, wait for three steps, audit and export the run that the hosts have started."""
    folder = place.folder
    talked = when_ready(f"http://{place.addresses[1]}:8750", key(place))
    seen = until_trained(place, 3)
    audit = json.loads(headrace(folder, "audit", "--config", "operator.toml", codes=(0, 1)))
    exported = headrace(folder, "export", RUN, "exported", "--config", "operator.toml")
    return {"client": talked, "status": seen.splitlines(), "audit": audit, "exported": exported.strip()}


def main() -> None:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description="one's own checkpoint, image tasks, reward and client on two hosts")
    parser.add_argument("action", choices=("prepare", "use"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("addresses", nargs=2)
    parser.add_argument("--busybox", type=Path, default=Path("/bin/busybox"))
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    place = Place(args.folder.resolve(), args.addresses)
    if args.action == "prepare":
        prepare(place, args.busybox)
    else:
        sys.stdout.write(json.dumps(use(place), indent=1) + "\n")


if __name__ == "__main__":
    main()
