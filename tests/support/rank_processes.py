"""The processes of a trainer's ranks."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from headrace.config import Config
from headrace.training.parallel.nodes.meeting import opened
from tests.support.paths import ROOT


def group_of(module: str, config: Config, folder: Path, more: str = "") -> list[Any]:
    """The last lines of the processes of a group, read as JSON. Each calls `rank` of a test module with the text that
    `joining` reads. folder: of node 0; it is made. Processes of other nodes (`trainer.node_ranks`) get a path that does
    not exist. more: passed on to `rank`."""
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def place(number: int) -> Path:
        return folder if number < config.trainer.machine_ranks else folder / "of another node"

    code = f"import sys; from {module} import rank; rank(sys.argv[1])"
    encoded = msgspec.json.encode(config).decode()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, json.dumps([number, port, encoded, str(place(number)), more])],
            stdout=subprocess.PIPE, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True,
        )
        for number in range(config.trainer.ranks)
    ]  # fmt: skip
    told = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return [json.loads(each.splitlines()[-1]) for each in told]


def joining(arguments: str) -> tuple[int, Config, Path, str, PrefixStore]:
    """In a process of `group_of`: number, configuration, folder, `more`, and the group's keys."""
    number, port, encoded, folder, more = json.loads(arguments)
    return number, msgspec.json.decode(encoded, type=Config), Path(folder), more, keys(port, first=number == 0)


def keys(port: int, *, first: bool = False) -> PrefixStore:
    """The keys of a group whose store is at a port of loopback. first: open it."""
    if first:
        return PrefixStore("group", opened("127.0.0.1", port))
    return PrefixStore("group", TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))


def ranks_of(starter: int = 0) -> list[int]:
    """The ranks that a process has started and that still run. starter: 0 for this process."""
    pids = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if int(parent) == (starter or os.getpid()) and b"headrace.training.parallel.rank" in command:
            pids.append(int(entry.name))
    return sorted(pids)
