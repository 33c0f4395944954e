"""The connections of a group, which cannot authenticate, stay on the interface of its store."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.training.parallel.nodes.interfaces import leading_to
from tests.support.paths import ROOT

GROUP = """
import sys, torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore
from headrace.training.parallel import group
rank, host, port = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
if rank == 0:
    from headrace.training.parallel.nodes.meeting import opened
    store = opened(host, 0)
    print(store.port, flush=True)
else:
    store = TCPStore(host, port, is_master=False, wait_for_workers=False)
group.join(torch.device("cpu"), rank, 2, PrefixStore("group", store))
dist.barrier(dist.new_group(backend="gloo"))
print("joined", flush=True)
sys.stdin.read()
"""
ELSEWHERE = "192.0.2.7"
NAMESPACE = f"""
ip link set lo up && ip addr add {ELSEWHERE}/32 dev lo && hostname elsewhere.test &&
printf '127.0.0.1 localhost\\n{ELSEWHERE} elsewhere.test\\n' > $1 && mount --bind $1 /etc/hosts && shift && exec "$@"
"""
"""A machine whose own name is the address of no loopback, as most are."""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare")
def test_store_and_gloo_of_one_machine_listen_on_loopback_alone(tmp_path: Path) -> None:
    """By itself gloo listens where the machine's name resolves to."""
    wrapped = ["unshare", "--net", "--uts", "--mount", "sh", "-c", NAMESPACE, "sh", str(tmp_path / "hosts")]
    inside = [sys.executable, "-m", "tests.training.parallel.nodes.two_ranks"]
    done = subprocess.run([*wrapped, *inside], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    addresses = set(done.stdout.split())
    assert addresses == {"127.0.0.1"}


def test_the_interface_of_this_machine_is_loopback() -> None:
    assert leading_to("127.0.0.1") == leading_to("localhost") == "lo"
